"""The table of contigs: complete and in order without scripts; the page's script sorts and filters it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from virnucpro.report.html import Html, element, joined, nucleotides, probability, whole
from virnucpro.report.prediction.contig_lines import GROUPS
from virnucpro.report.prediction.plots import CALL_CLASSES
from virnucpro.report.prediction.sections import swatch
from virnucpro.store.contig_table import Call

if TYPE_CHECKING:
    from collections.abc import Callable

    from virnucpro.report.prediction.contig_lines import ContigLine
    from virnucpro.report.prediction.summary import Summary

ROWS_AT_FIRST = 50
"""Rows that are shown at first."""

_EXPLAINED = {
    "P(virus)": "the score, to rank by",
    "Highest": "the highest P(virus) of any of its reading frames",
    "Viral chunks": "chunks that are viral by their reading frames, of those with an open one",
    "Frame support": "share of its open reading frames with P(virus) above 0.5",
    "Viral regions": "runs of viral chunks, in contigs of 10 kb or more",
}


def contig_table(summary: Summary) -> Html:
    """Return the section with the contigs of the highest scores."""
    if not summary.table:
        return Html()
    contigs = summary.table
    title = element("h2", summary.sequences.capitalize())
    if len(contigs) < summary.contigs:
        text = (
            f"The {whole(len(contigs))} {summary.sequences} with the highest P(virus), of {whole(summary.contigs)}. "
            "All of them are in contigs.tsv."
        )
        title = joined(title, element("p", text, class_="note"))
    terms = [joined(element("dt", name), element("dd", text)) for name, text in _EXPLAINED.items()]
    return element(
        "section",
        title,
        _controls(contigs),
        element(
            "p",
            f"{whole(len(contigs))} {summary.sequences}",
            id="count",
            class_="count",
            aria_live="polite",
            data_counted=summary.sequences,
        ),
        element(
            "div",
            _table(contigs, summary.sequence),
            class_="wide",
            tabindex="0",
            role="region",
            aria_label="Table of contigs",
        ),
        element("p", element("button", "Show all", type="button", id="more"), class_="more needs-script"),
        element("details", element("summary", "What the columns are"), element("dl", *terms)),
    )


def _controls(contigs: list[ContigLine]) -> Html:
    groups = [(call, sum(contig.group == call for contig in contigs)) for call in GROUPS]
    options = [element("option", f"{call} ({whole(n)})", value=call) for call, n in groups if n]
    search = element("input", id="filter-text", type="search", placeholder="name or reason", autocomplete="off")
    choice = element(
        "select", element("option", "every call", value=""), *options, id="filter-call", autocomplete="off"
    )
    return element(
        "div",
        element("label", "Find", search),
        element("label", "Call", choice),
        class_="controls",
        role="search",
    )


def _table(contigs: list[ContigLine], sequence: str) -> Html:
    columns: list[tuple[str, bool, Callable[[ContigLine], Html]]] = [
        (sequence.capitalize(), False, lambda c: element("td", element("bdi", c.found.contig), class_="name")),
        ("P(virus)", True, _score),
        ("Call", False, lambda c: element("td", swatch(c.group), c.found.call, class_="call")),
        ("Length", True, lambda c: _number(c.found.length, nucleotides(c.length_nt))),
        ("Highest", True, lambda c: _number(c.found.max_score, probability(c.found.max_score or 0))),
        ("Viral chunks", True, _viral_chunks),
        ("Frame support", True, lambda c: _number(c.found.frame_support, f"{c.found.frame_support or 0:.0%}")),
    ]
    if any(contig.regions for contig in contigs):
        columns.append(("Viral regions", True, lambda c: _number(len(c.regions) or None, str(len(c.regions)))))
    if any(_reason(contig) for contig in contigs):
        columns.append(("Reason", False, lambda c: element("td", _reason(c), class_="reason")))
    header = [
        element(
            "th",
            element("button", name, type="button"),
            scope="col",
            class_="number" if is_number else None,
            aria_sort="descending" if name == "P(virus)" else None,
        )
        for name, is_number, _ in columns
    ]
    rows = [
        element(
            "tr",
            *(cell(contig) for _, _, cell in columns),
            data_call=contig.group,
            class_=CALL_CLASSES[contig.group],
            hidden="" if number >= ROWS_AT_FIRST else None,
        )
        for number, contig in enumerate(contigs)
    ]
    head, body = element("thead", element("tr", *header)), element("tbody", *rows)
    return element("table", head, body, class_="contigs", data_rows_at_first=ROWS_AT_FIRST)


def _reason(contig: ContigLine) -> str:
    """Return the reason, unless the call already says it."""
    found = contig.found
    is_between = found.call == Call.UNDECIDED and found.score is not None and found.frames
    return "" if is_between or found.call in {Call.NO_OPEN_FRAME, Call.TOO_SHORT} else found.reason


def _number(value: float | None, shown: str) -> Html:
    """Return a cell that sorts by *value*; an empty one for None."""
    if value is None:
        return element("td", class_="number")
    return element("td", shown, class_="number", data_v=value)


def _viral_chunks(contig: ContigLine) -> Html:
    found = contig.found
    return _number(found.viral_chunks if found.open_chunks else None, f"{found.viral_chunks} of {found.open_chunks}")


def _score(contig: ContigLine) -> Html:
    if contig.found.score is None:
        return element("td", class_="number")
    shown = probability(contig.found.score)
    return element("td", shown, class_="number p", data_v=contig.found.score, style=f"--p:{contig.found.score:.3f}")
