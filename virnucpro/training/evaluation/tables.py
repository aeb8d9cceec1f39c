"""
The tables of an evaluation: contigs with their labels (the truth), and scores from ``contigs.tsv`` or any tool's table.

The truth has the columns ``contig`` and ``label``, and may have ``group``, ``length`` (nucleotides) and ``genome`` (or
``accession`` or ``source``); others are ignored. Ids must match exactly. Legend: C contigs of the truth.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from virnucpro.errors import BadInputError, InputProblem, printable
from virnucpro.run_layout import PredictionLayout
from virnucpro.store.contig_table import COLUMNS, SHORT_COLUMNS, Call
from virnucpro.store.reader import finished_manifest
from virnucpro.training.evaluation.tools import names_of, tool_of
from virnucpro.training.genomes.delimited_tables import DelimitedTable, shown, whole_number
from virnucpro.training.genomes.labelled_genomes import LABEL_WORDS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from virnucpro.arrays import BoolArray, DoubleArray, IntArray
    from virnucpro.store.manifest import PredictionManifest
    from virnucpro.training.evaluation.tools import Tool
    from virnucpro.training.genomes.delimited_tables import Row, TableProblems

LABELS = LABEL_WORDS | {"1": True, "0": False, "non-viral": False, "not virus": False}
"""Lower-case label -> whether a contig is viral."""
UNKNOWN_NT = 0
"""Length of a contig whose length is not known."""
GENOME_COLUMNS = ("genome", "accession", "source")
"""Columns that may name a contig's genome; the first of them that a table has is read."""
_RANGE = re.compile(r":c?\d+-\d+$")
"""A window's range in its genome, as in NC_015574.1:1308327-1368327."""
MOST_SCORE = 1e100
"""Largest absolute score, so that sums and differences of scores are finite."""
_NO_SCORE = ("", "na", "n/a", "nan", "none", "null", "-")


@dataclass(frozen=True, kw_only=True)
class KnownContigs:
    contigs: list[str]
    """Ids, each once."""
    is_virus_C: BoolArray
    groups: list[str]
    """Empty: not known."""
    lengths_nt_C: IntArray
    """int64 (C,): nucleotides, or ``UNKNOWN_NT``."""
    genomes: list[str] | None = None
    """Empty: not known, so the contig counts as a genome of its own. None: of no contig known."""

    def __len__(self) -> int:
        return len(self.contigs)

    def take(self, numbers: IntArray) -> KnownContigs:
        """Return the contigs at these positions, in that order."""
        chosen = numbers.tolist()
        return KnownContigs(
            contigs=[self.contigs[number] for number in chosen],
            is_virus_C=self.is_virus_C[numbers],
            groups=[self.groups[number] for number in chosen],
            lengths_nt_C=self.lengths_nt_C[numbers],
            genomes=None if self.genomes is None else [self.genomes[number] for number in chosen],
        )

    def genome_numbers(self) -> IntArray | None:
        """Return a number for each contig's genome, int64 (C,); None if genomes are not known."""
        if self.genomes is None or not any(self.genomes):
            return None
        numbers: dict[tuple[bool, str], int] = {}
        named = [(bool(genome), genome or contig) for genome, contig in zip(self.genomes, self.contigs, strict=True)]
        return np.array([numbers.setdefault(name, len(numbers)) for name in named], dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class ScoreTable:
    path: Path
    name: str
    """Name of the tool in results: our classifier's, or the file's."""
    scores: dict[str, float]
    """Score by id; NaN for no score."""
    lengths_nt: dict[str, int]
    """Nucleotides by id, if the table has them."""
    threshold: float | None
    """The threshold of our own classifier, or the default of a known tool; None if not known."""
    called: set[str]
    """Ids called viral by ``Tool.rule``."""
    ours: dict[str, Sequence[str]]
    """Call, evidence and viral hit by id, in a table of ours."""
    tool: Tool


@dataclass(frozen=True, kw_only=True)
class JoinedScores:
    """The scores of the contigs of a truth."""

    known: KnownContigs
    """With the table's lengths where the truth has none."""
    scores_C: DoubleArray
    """NaN: no score."""
    not_in_table: list[str]
    not_in_truth: int


def read_truth(path: Path) -> KnownContigs:
    """Read a table, tab-separated or CSV, plain or gzip."""
    table = DelimitedTable(path)
    problems = table.problems
    genome_place = table.find(*GENOME_COLUMNS)
    places = (table.column("contig"), table.column("label"), table.find("group"), table.find("length"), genome_place)
    lines: dict[str, int] = {}
    labels, groups, lengths, genomes = [], [], [], []
    for row in table.rows(*places):
        contig, label, group, length, genome = ("" if place is None else row.cells[place] for place in places)
        if is_new_id(contig, row, lines, problems):
            labels.append(_is_viral(label, row.line, problems))
            groups.append(group)
            lengths.append(_length_nt(length, row.line, problems))
            genomes.append(_RANGE.sub("", genome))
    problems.raise_if_any()
    if not lines:
        problems.refuse(None, "no contig after its header", "give it a line a contig")
    return KnownContigs(
        contigs=list(lines),
        is_virus_C=np.array(labels, dtype=bool),
        groups=groups,
        lengths_nt_C=np.array(lengths, dtype=np.int64),
        genomes=None if genome_place is None else genomes,
    )


def is_new_id(contig: str, row: Row, lines: dict[str, int], problems: TableProblems) -> bool:
    """Record an id's line; report a missing or repeated id."""
    if not contig:
        problems.note(row.line, "no id", "give every contig its id")
        return False
    if contig in lines:
        what = f"duplicate id, first at {problems.path}:{lines[contig]}"
        problems.note(row.line, what, "keep one line a contig", sequence_id=contig)
        return False
    lines[contig] = row.line
    return True


def _is_viral(label: str, line: int, problems: TableProblems) -> bool:
    is_viral = LABELS.get(label.lower())
    if is_viral is None:
        what = f"label {shown(label)!r} is not known" if label else "no label"
        problems.note(line, what, f"write one of {', '.join(LABELS)}")
    return bool(is_viral)


def _length_nt(text: str, line: int, problems: TableProblems) -> int:
    if not text:
        return UNKNOWN_NT
    length_nt = whole_number(text)
    if not length_nt:
        problems.note(
            line, f"length {shown(text)!r} is not a number of nucleotides", "write a whole number, or leave it empty"
        )
        return UNKNOWN_NT
    return length_nt


def read_scores(
    path: Path, *, id_column: str | None = None, score_column: str | None = None, by_contig: bool = False
) -> ScoreTable:
    """
    Read a table of scores, tab-separated or CSV, plain or gzip.

    Ours and those of known tools are read as they are; the columns of others are ``contig`` and ``score`` by default.
    Ids in a known tool's table, and with *by_contig* in any, are names up to the first blank, and parts of a contig
    count for it: the highest score, and any call.
    """
    manifest = _manifest_of(path)
    if manifest is not None:
        manifest.check_file(path)
        manifest.check_whole(path)
    table = DelimitedTable(path, unquoted_headers=(COLUMNS, SHORT_COLUMNS))
    problems = table.problems
    tool = tool_of(table, id_column, score_column)
    id_place = table.column(tool.id_column, "--id-column")
    places = [table.column(column, "--score-column") for column in tool.columns]
    length_place = table.find(tool.length_column)
    our_places = [table.column(one) for one in ("call", "evidence", "viral_hit")] if table.is_ours else []
    lines: dict[str, int] = {}
    scores: dict[str, float] = {}
    lengths: dict[str, int] = {}
    called: set[str] = set()
    ours: dict[str, Sequence[str]] = {}
    for row in table.rows(id_place, length_place, *places):
        cell = row.cells[id_place]
        name, contig, is_part = names_of(cell) if by_contig or tool.name else (cell, cell, False)
        length = "" if length_place is None else row.cells[length_place]
        if table.is_ours and not length and name in lines:
            continue  # a skipped record with the id of another one
        if not is_new_id(name, row, lines, problems):
            continue
        numbers = [_number(row, place, table, name) for place in places]
        score = tool.score(*numbers)
        scores[contig] = score if math.isnan(scores.get(contig, math.nan)) else max(scores[contig], score)
        our_cells = [row.cells[place] for place in our_places]
        is_viral = our_cells[0] == Call.VIRUS if our_cells else tool.is_viral(*numbers)
        if is_viral:
            called.add(contig)
        if our_cells and (is_viral or contig not in ours):
            ours[contig] = our_cells
        if length.isdecimal() and not is_part:
            lengths[contig] = _length_nt(length.lstrip("0"), row.line, problems)
    problems.raise_if_any()
    if not (lines or (by_contig and tool.lists_viruses)):
        problems.refuse(None, "no contig after its header", "give it a line a contig")
    stem = path.name.removesuffix(".gz").rpartition(".")[0] or path.name
    return ScoreTable(
        path=path,
        name=tool.name or (stem if manifest is None else str(manifest.models["classifier"]["name"])),
        scores=scores,
        lengths_nt=lengths,
        threshold=tool.threshold if manifest is None else float(manifest.output_settings["threshold"]),
        called=called,
        ours=ours,
        tool=tool,
    )


def join(table: ScoreTable, known: KnownContigs, truth: Path) -> JoinedScores:
    """Look up the score of every contig of the truth; raise if none is in the table or none has a score."""
    missing = [contig for contig in known.contigs if contig not in table.scores]
    if len(missing) == len(known):
        there, here = (printable(next(iter(ids))) for ids in (table.scores, known.contigs))
        what = f"none of its {len(table.scores):,} contigs (such as {there}) is in {truth} (such as {here})"
        remedy = "ids must match exactly: name the column of ids with --id-column"
        raise BadInputError([InputProblem(str(table.path), None, what, remedy)])
    scores_C = np.array([table.scores.get(contig, math.nan) for contig in known.contigs])
    if np.isnan(scores_C).all():
        what = "it has no score for any contig of the truth"
        raise BadInputError(
            [InputProblem(str(table.path), None, what, "name the column of scores with --score-column")]
        )
    lengths = [
        length or table.lengths_nt.get(contig, UNKNOWN_NT)
        for contig, length in zip(known.contigs, known.lengths_nt_C.tolist(), strict=True)
    ]
    return JoinedScores(
        known=replace(known, lengths_nt_C=np.array(lengths, dtype=np.int64)),
        scores_C=scores_C,
        not_in_table=missing,
        not_in_truth=len(table.scores) - (len(known) - len(missing)),
    )


def _number(row: Row, place: int, table: DelimitedTable, contig: str) -> float:
    """Return a number, NaN for an empty cell; report a text that is none."""
    text = row.cells[place]
    if text.lower() in _NO_SCORE:
        return math.nan
    try:
        number = float(text)
    except ValueError:
        number = math.inf
    if not abs(number) <= MOST_SCORE:
        what = f"{shown(table.columns[place])} {shown(text)!r} is not a number from -{MOST_SCORE:g} to {MOST_SCORE:g}"
        table.problems.note(row.line, what, "write a number, or leave it empty", sequence_id=contig)
    return number


def _manifest_of(path: Path) -> PredictionManifest | None:
    """Return the manifest of a finished prediction beside a table of ours; None if the table was copied elsewhere."""
    layout = PredictionLayout(path.parent)
    if path.name != layout.contigs.name or not layout.manifest.exists():
        return None
    return finished_manifest(layout)
