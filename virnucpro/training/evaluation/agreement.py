"""
``agreement.json`` and ``agreement.tsv``: which contigs the tables of several tools call viral, without a truth.

A contig that a table lacks is not called by a tool that lists viruses only; in another table it is absent, and the
remaining tables are compared.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from functools import cache
from heapq import nlargest
from importlib.metadata import version
from itertools import chain, compress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from virnucpro import durable
from virnucpro.errors import BadInputError, InputProblem, printable
from virnucpro.store.contig_table import Call
from virnucpro.training.evaluation.document import FORMAT, own_threshold
from virnucpro.training.evaluation.strata import length_classes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from virnucpro.run_layout import EvaluationLayout
    from virnucpro.training.evaluation.tables import ScoreTable

ALL, NONE, ONE_TABLE = "all", "none", "in one table only"
"""Patterns that are no disagreement."""
_NOT_LISTED, _ABSENT = "not listed", "absent"


class ComparedContig(NamedTuple):
    contig: str
    length: int | None
    evidence: str
    viral_hit: str
    scores: list[float | None]
    """Of the tables, in their order; so are *calls*."""
    calls: tuple[str, ...]
    pattern: str


def compare_tables(
    tables: Sequence[ScoreTable], *, threshold: float | None, length_edges_nt: Sequence[int]
) -> tuple[dict[str, Any], list[ComparedContig]]:
    """Return the document, and all contigs; *threshold* is for tables of unknown tools, None as in an evaluation."""
    names = tuple(table.name for table in tables)
    rules, called = zip(*(_called(table, threshold) for table in tables), strict=True)
    rows = []
    for contig in dict.fromkeys(chain.from_iterable(table.scores for table in tables)):
        _, evidence, viral_hit = next((one.ours[contig] for one in tables if contig in one.ours), ("", "", ""))
        length_nt = max(table.lengths_nt.get(contig, 0) for table in tables)
        found = [table.scores.get(contig, math.nan) for table in tables]
        scores = [None if math.isnan(score) else score for score in found]
        calls = tuple(_call(table, viral, contig) for table, viral in zip(tables, called, strict=True))
        pattern = _pattern(names, calls)
        rows.append(ComparedContig(contig, length_nt or None, evidence, viral_hit, scores, calls, pattern))
    patterns = [row.pattern for row in rows]
    of_lengths = length_classes(np.array([row.length or 0 for row in rows]), length_edges_nt)
    of_evidence = {one: [row.evidence == one for row in rows] for one in sorted({row.evidence for row in rows})}
    differing = (row for row in rows if row.pattern not in {ALL, NONE, ONE_TABLE})
    absent = [0 if table.tool.lists_viruses else len(rows) - len(table.scores) for table in tables]
    document = {
        "format": FORMAT,
        "kind": "agreement",
        "virnucpro": version("virnucpro"),
        "contigs": len(rows),
        "tables": [
            {"name": table.name, "scores": str(table.path), "rule": rule, "viral": len(viral), "absent": missing}
            for table, rule, viral, missing in zip(tables, rules, called, absent, strict=True)
        ],
        "patterns": _counted(patterns),
        "by_length": {name: _counted(compress(patterns, mine_C)) for name, mine_C in of_lengths.items()},
        "by_evidence": {name: _counted(compress(patterns, mine)) for name, mine in of_evidence.items() if name},
        "look_at": [row._asdict() for row in nlargest(10, differing, key=lambda row: row.length or 0)],
    }
    return document, rows


def write_agreement(document: dict[str, Any], rows: Sequence[ComparedContig], layout: EvaluationLayout) -> None:
    durable.write_bytes(layout.agreement, (json.dumps(document, indent=1) + "\n").encode())
    durable.write_bytes(layout.agreement_table, "".join(_lines(document, rows)).encode())


def _lines(document: dict[str, Any], rows: Sequence[ComparedContig]) -> Iterator[str]:
    of_tables = [f"{table['name']} {what}" for table in document["tables"] for what in ("score", "call")]
    yield _line("contig", "length", "evidence", "viral_hit", *of_tables, "pattern")
    for row in rows:
        cells = chain.from_iterable(zip(row.scores, row.calls, strict=True))
        yield _line(row.contig, row.length, row.evidence, row.viral_hit, *cells, row.pattern)


def _line(*cells: Any) -> str:
    return "\t".join("" if cell is None else printable(str(cell)) for cell in cells) + "\n"


def _called(table: ScoreTable, threshold: float | None) -> tuple[str, set[str]]:
    """Return what counts as called viral, and the contigs that are."""
    tool = table.tool
    if tool.rule:
        return tool.rule, table.called
    if tool.lists_viruses:
        return "listed", set(table.scores)
    if tool.name or threshold is None:
        threshold = own_threshold(table, np.array(list(table.scores.values())))
    if threshold is None:
        what = "its scores are not all between 0 and 1, and no threshold is known"
        raise BadInputError([InputProblem(str(table.path), None, what, "give --threshold")])
    viral = {contig for contig, score in table.scores.items() if score >= threshold}
    return f"{tool.columns[0]} at least {threshold:g}", viral


def _call(table: ScoreTable, called: set[str], contig: str) -> str:
    if contig in table.ours:
        return table.ours[contig][0]
    if contig in table.scores:
        return str(Call.VIRUS if contig in called else Call.NOT_VIRUS)
    return _NOT_LISTED if table.tool.lists_viruses else _ABSENT


@cache
def _pattern(names: tuple[str, ...], calls: tuple[str, ...]) -> str:
    """Return which of the tables that have a contig call it viral."""
    compared = [(name, call == Call.VIRUS) for name, call in zip(names, calls, strict=True) if call != _ABSENT]
    viral, others = ([name for name, is_viral in compared if is_viral is wanted] for wanted in (True, False))
    if len(compared) == 1:
        return ONE_TABLE
    if not (viral and others):
        return ALL if viral else NONE
    return f"all but {others[0]}" if len(others) == 1 < len(viral) else f"only {' and '.join(viral)}"


def _counted(patterns: Iterable[str]) -> dict[str, int]:
    """Return how often each pattern occurs: all, none, and the remaining ones by falling number."""
    counts = Counter(patterns)
    first = {one: counts.pop(one) for one in (ALL, NONE) if one in counts}
    return first | dict(counts.most_common())
