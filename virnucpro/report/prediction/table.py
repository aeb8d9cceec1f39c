"""
The table of contigs: its first rows, which need no script, and the data of all, which the page's script searches.

The data are the columns of ``contigs.tsv`` as texts, so what the script exports has the same lines. A column in which
few texts recur is a list of these and the place of each row's text among them.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from virnucpro.calls.topology import Topology
from virnucpro.report.formats import nucleotides, probability, whole
from virnucpro.report.prediction.plots import CALL_CLASSES
from virnucpro.report.prediction.summary import GROUPS
from virnucpro.report.prediction.wording import evidence
from virnucpro.store.contig_table import COLUMNS, Call, texts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from virnucpro.report.prediction.summary import ContigLine, Summary

ROWS_AT_FIRST = 50
_LINEAR = str(Topology.LINEAR)
_MOST_RECURRING = 1000
_EXPLAINED = {
    "Score": "the probability that it is viral, to rank by",
    "Posterior": "the score, given the share of viruses in this sample",
    "FDR": "expected share of others among all with this score or a higher one",
    "Highest": "the highest score of any of its reading frames",
    "Viral chunks": "chunks that are viral by their reading frames, of those with an open one",
    "Frame support": "share of its open reading frames with a score above 0.5",
    "Viral regions": "stretches of viral chunks, in contigs of 10 kb or more",
    "Topology": "whether the ends are exact repeats of each other, as of circular or packaged genomes",
    "Why": "what the score rests on: a protein of a known genome is no taxonomy",
}


class _Column(NamedTuple):
    """A column as it is shown; the page's script shows it alike."""

    title: str
    key: str
    kind: str
    """How a text of it is shown: name, bar, call, length, probability, percent, chunks, count or text."""

    @property
    def is_number(self) -> bool:
        return self.kind not in {"name", "call", "text"}


def table_values(summary: Summary) -> dict[str, Any]:
    """Return what the template's section of contigs shows."""
    many, contigs = summary.sequences, summary.table
    listed = summary.groups[Call.VIRUS].contigs if summary.has_only_viral else summary.contigs
    reach = f"Find and the filters reach all {whole(listed)} {many}{' called viral' * summary.has_only_viral}."
    if (beyond := listed - len(contigs)) > 0:
        reach = (
            f"Find and the filters reach the {whole(len(contigs))} {many} with the highest score, of "
            f"{whole(listed)}. The other {whole(beyond)} are in contigs.tsv only."
        )
    columns = _columns(summary)
    shown = {track.contig.number for track in [*summary.viral_tracks, *summary.other_tracks]}
    data = {
        "columns": {name: _packed(column) for name, column in _texts(contigs)},
        "shown": columns,
        "classes": CALL_CLASSES,
        "records": summary.records,
        "numbers": {
            place: c.number for place, c in enumerate(contigs) if c.number in summary.records or c.number in shown
        },
        "noun": [summary.sequence, many],
        "beyond": beyond,
        "exported": COLUMNS,
        "rows": ROWS_AT_FIRST,
        "total": len(contigs),
    }
    groups = Counter(contig.group for contig in contigs)
    values = dict(_texts(contigs[:ROWS_AT_FIRST]))
    rows = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    return {
        "reach": f"{reach} {_held(summary)}",
        "calls": {call: groups[call] for call in GROUPS if groups[call]},
        "first": f"The first {whole(ROWS_AT_FIRST)} of " if len(contigs) > ROWS_AT_FIRST else "",
        "rows": [(row, [(column.kind, _shown(column, row)) for column in columns]) for row in rows],
        "explained": {c.title: _EXPLAINED[c.title] for c in columns if c.title in _EXPLAINED},
        "data": data,
    }


def _held(summary: Summary) -> str:
    """Return which sequences can be copied from the page."""
    viral, held = summary.groups[Call.VIRUS].contigs, len(summary.records)
    if not viral:
        return ""
    if held == viral:
        return f"Copy takes the sequence of a {summary.sequence} called viral."
    return (
        f"Copy takes the sequence of {whole(held)} of the {whole(viral)} {summary.sequences} called viral: this page "
        "has room for no more; viral.fasta has all."
    )


def _columns(summary: Summary) -> list[_Column]:
    columns = [
        _Column(summary.sequence.capitalize(), "contig", "name"),
        _Column("Score", "score", "bar"),
        _Column("Call", "call", "call"),
        _Column("Length", "length", "length"),
    ]
    if summary.sample_record.share is not None:
        columns += [_Column("Posterior", "posterior", "probability"), _Column("FDR", "fdr", "probability")]
    if summary.manifest.has_frames:
        columns += [
            _Column("Highest", "max_score", "probability"),
            _Column("Viral chunks", "viral_chunks", "chunks"),
            _Column("Frame support", "frame_support", "percent"),
        ]
    if any(contig.regions for contig in summary.table):
        columns.append(_Column("Viral regions", "regions", "count"))
    if any(contig.found.topology not in {"", _LINEAR} for contig in summary.table):
        columns.append(_Column("Topology", "topology", "text"))
    if any(_reason(contig) for contig in summary.table):
        columns.append(_Column("Why", "why", "text"))
    return columns


def _texts(contigs: Sequence[ContigLine]) -> Iterator[tuple[str, list[str]]]:
    """Yield the columns of ``contigs.tsv``, and those of the page alone, one at a time."""
    for place, name in enumerate(COLUMNS):
        yield name, texts(contig.found[place] for contig in contigs)
    yield "group", [contig.group for contig in contigs]
    yield "regions", texts(len(contig.regions) or None for contig in contigs)
    yield "why", [_reason(contig) for contig in contigs]


def _packed(column: Sequence[str]) -> dict[str, Any]:
    """Return the texts of a column: in a row, or those that recur and the place of each row's text, if not the only."""
    recurring = {text: place for place, text in enumerate(dict.fromkeys(column))}
    if len(recurring) == 1:
        return {"of": list(recurring)}
    if len(recurring) <= min(_MOST_RECURRING, len(column) // 4):
        return {"of": list(recurring), "at": [recurring[text] for text in column]}
    return {"texts": "\n".join(column)}


def _shown(column: _Column, row: Mapping[str, str]) -> str:
    text = row[column.key]
    if not text or (column.kind == "chunks" and row["open_chunks"] == "0"):
        return ""
    shown = {
        "bar": lambda: probability(float(text)),
        "length": lambda: nucleotides(int(text)),
        "probability": lambda: probability(float(text)),
        "percent": lambda: f"{float(text):.0%}",
        "chunks": lambda: f"{text} of {row['open_chunks']}",
    }
    return shown[column.kind]() if column.kind in shown else text


def _reason(contig: ContigLine) -> str:
    """Return what the score rests on, or why there is none, unless the call already says it."""
    found = contig.found
    is_between = found.call == Call.UNDECIDED and found.score is not None and found.frames != 0
    is_said = is_between or found.call in {Call.NO_OPEN_FRAME, Call.TOO_SHORT}
    return "; ".join(filter(None, ["" if is_said else found.reason, evidence(found)]))
