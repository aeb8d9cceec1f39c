"""
The table of contigs: its first rows, which need no script, and the data of all, which the page's script searches.

The data are the columns of ``contigs.tsv`` as texts, so what the script exports has the same lines. A column in which
few texts recur is a list of these and the place of each row's text among them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from virnucpro.report.html import Html, counted, data_block, element, nucleotides, probability, terms, whole
from virnucpro.report.prediction.plots import CALL_CLASSES
from virnucpro.report.prediction.summary import GROUPS
from virnucpro.store.contig_table import COLUMNS, Call, texts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from virnucpro.report.prediction.summary import ContigLine, Summary

ROWS_AT_FIRST = 50
_MOST_RECURRING = 1000
_EXPLAINED = {
    "P(virus)": "the score, to rank by",
    "Posterior": "P(virus) for the share of viruses in this sample",
    "FDR": "expected share of others among all with this score or a higher one",
    "Highest": "the highest P(virus) of any of its reading frames",
    "Viral chunks": "chunks that are viral by their reading frames, of those with an open one",
    "Frame support": "share of its open reading frames with P(virus) above 0.5",
    "Viral regions": "stretches of viral chunks, in contigs of 10 kb or more",
}


class _Column(NamedTuple):
    """A column as it is shown; the page's script shows it alike."""

    title: str
    key: str
    """Column of the data."""
    kind: str
    """How a text of it is shown: name, bar, call, length, probability, percent, chunks, count or text."""

    @property
    def is_number(self) -> bool:
        return self.kind not in {"name", "call", "text"}


def contig_section(summary: Summary) -> Html:
    if not summary.table:
        return Html()
    many, contigs = summary.sequences, summary.table
    listed = summary.groups[Call.VIRUS].contigs if summary.has_only_viral else summary.contigs
    reach = f"Find and the filters reach all {whole(listed)} {many}{' called viral' * summary.has_only_viral}."
    if (beyond := listed - len(contigs)) > 0:
        reach = (
            f"Find and the filters reach the {whole(len(contigs))} {many} with the highest P(virus), of "
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
    first = f"The first {whole(ROWS_AT_FIRST)} of " if len(contigs) > ROWS_AT_FIRST else ""
    return element(
        "section",
        element("h2", many.capitalize()),
        element("p", f"{reach} {_held(summary)}", class_="note"),
        _controls(contigs, summary),
        element("p", f"{first}{counted(len(contigs), summary.sequence)}", id="count", class_="count", role="status"),
        element("p", "The table scrolls sideways.", class_="hint"),
        element(
            "div",
            _table(contigs[:ROWS_AT_FIRST], columns),
            class_="wide",
            tabindex="0",
            role="region",
            aria_label=f"Table of {many}",
        ),
        element(
            "p",
            element("button", "Show more", type="button", id="more"),
            element("button", "Save as TSV", type="button", id="export"),
            class_="more needs-script",
        ),
        element("details", element("summary", "What the columns are"), terms(_explained(columns).items())),
        data_block(data, id="contigs"),
    )


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
        _Column("P(virus)", "score", "bar"),
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
    if any(_reason(contig) for contig in summary.table):
        columns.append(_Column("Reason", "why", "text"))
    return columns


def _explained(columns: Sequence[_Column]) -> dict[str, str]:
    shown = {column.title for column in columns}
    return {name: what for name, what in _EXPLAINED.items() if name in shown}


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


def _controls(contigs: Iterable[ContigLine], summary: Summary) -> Html:
    groups = dict.fromkeys(GROUPS, 0)
    for contig in contigs:
        groups[contig.group] += 1
    options = [element("option", f"{call} ({whole(n)})", value=call) for call, n in groups.items() if n]
    search = element("input", id="filter-text", type="search", placeholder="name or reason", autocomplete="off")
    choice = element(
        "select", element("option", "every call", value=""), *options, id="filter-call", autocomplete="off"
    )
    limits = [
        element(
            "label",
            shown,
            element(
                "input",
                id=f"filter-{key}-{end}",
                type="number",
                min=0,
                max=most,
                step="any",
                aria_label=f"{what} {end}",
            ),
        )
        for shown, what, key, end, most in (
            ("Length from (nt)", "Length in nt", "length", "from", None),
            ("to", "Length in nt", "length", "to", None),
            ("P(virus) from", "P(virus)", "score", "from", 1),
            ("to", "P(virus)", "score", "to", 1),
        )
    ]
    return element(
        "div",
        element("label", f"Find a {summary.sequence}", search),
        element("label", "Call", choice),
        element("div", *limits[:2], class_="range"),
        element("div", *limits[2:], class_="range"),
        class_="controls",
        role="search",
    )


def _table(contigs: Sequence[ContigLine], columns: Sequence[_Column]) -> Html:
    header = [
        element(
            "th",
            element("button", column.title, type="button"),
            scope="col",
            class_="number" if column.is_number else None,
            aria_sort="descending" if column.key == "score" else None,
        )
        for column in columns
    ]
    data = dict(_texts(contigs))
    rows = [
        element(
            "tr",
            *(_cell(column, {name: values[row] for name, values in data.items()}) for column in columns),
            class_=CALL_CLASSES[contig.group],
        )
        for row, contig in enumerate(contigs)
    ]
    return element("table", element("thead", element("tr", *header)), element("tbody", *rows), class_="contigs")


def _cell(column: _Column, row: Mapping[str, str]) -> Html:
    text = row[column.key]
    if column.kind == "name":
        return element("td", element("bdi", text), class_="name")
    if column.kind == "call":
        return element("td", swatch(row["group"]), text, class_="call")
    if column.kind == "text":
        return element("td", text, class_="reason")
    if not text or (column.kind == "chunks" and row["open_chunks"] == "0"):
        return element("td", class_="number")
    if column.kind == "bar":
        bar = element("span", probability(float(text)), class_="p", style=f"--p:{float(text):.3f}")
        return element("td", bar, class_="number")
    shown = {
        "length": lambda: nucleotides(int(text)),
        "probability": lambda: probability(float(text)),
        "percent": lambda: f"{float(text):.0%}",
        "chunks": lambda: f"{text} of {row['open_chunks']}",
        "count": lambda: text,
    }
    return element("td", shown[column.kind](), class_="number")


def swatch(call: str) -> Html:
    return element("span", class_=f"swatch {CALL_CLASSES[call]}", aria_hidden="true")


def _reason(contig: ContigLine) -> str:
    """Return the reason, unless the call already says it."""
    found = contig.found
    is_between = found.call == Call.UNDECIDED and found.score is not None and found.frames != 0
    return "" if is_between or found.call in {Call.NO_OPEN_FRAME, Call.TOO_SHORT} else found.reason
