"""
The sections with the result: the answer, the plots, tracks of long contigs, and the table of contigs.

The table is complete and in order without scripts; the page's script sorts and filters it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from virnucpro.data.reading.input_files import input_name
from virnucpro.errors import printable
from virnucpro.report.html import (
    Html,
    counted,
    cut,
    element,
    joined,
    nucleotides,
    percent,
    plot_place,
    probability,
    terms,
    whole,
)
from virnucpro.report.prediction import wording
from virnucpro.report.prediction.plots import CALL_CLASSES, SHADED_REGIONS, longest_regions
from virnucpro.report.prediction.summary import GROUPS, SURE_FROM
from virnucpro.store.contig_table import Call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from virnucpro.report.prediction.summary import ContigLine, Region, Summary, Track

HISTOGRAM = "score-histogram"
SCATTER = "length-against-score"
_SHOWN_INPUTS = 3
_SHOWN_NOTES = 20
_NAMED_REGIONS = 4
ROWS_AT_FIRST = 50
_EXPLAINED = {
    "P(virus)": "the score, to rank by",
    "Posterior": "P(virus) for the share of viruses in this sample",
    "FDR": "expected share of others among all with this score or a higher one",
    "Highest": "the highest P(virus) of any of its reading frames",
    "Viral chunks": "chunks that are viral by their reading frames, of those with an open one",
    "Frame support": "share of its open reading frames with P(virus) above 0.5",
    "Viral regions": "stretches of viral chunks, in contigs of 10 kb or more",
}

_OF_SAMPLE = ("Posterior", "FDR")
"""Columns where the share of viruses is known."""
_OF_FRAMES = ("Highest", "Viral chunks", "Frame support")
"""Columns where contigs are embedded."""


def heading(summary: Summary) -> Html:
    manifest = summary.manifest
    inputs = [input_name(str(item["path"])).rpartition("/")[2] for item in manifest.inputs]
    named = ", ".join(printable(name) for name in inputs[:_SHOWN_INPUTS])
    more = f" and {counted(len(inputs) - _SHOWN_INPUTS, 'more file')}" if len(inputs) > _SHOWN_INPUTS else ""
    classifier = manifest.models["classifier"]["name"]
    about = [f"{named}{more}", f"classifier {printable(classifier)}", manifest.started[:10]]
    return joined(
        element("h1", wording.lead(summary).removesuffix(".")),
        element("p", " \u00b7 ".join(filter(None, about)), class_="about"),
    )


def overview(summary: Summary) -> Html:
    warning = wording.missing(summary)
    notes = [printable(note) for note in summary.manifest.notes]
    shown = [element("li", note) for note in notes[:_SHOWN_NOTES]]
    if len(notes) > _SHOWN_NOTES:
        shown.append(element("li", f"{whole(len(notes) - _SHOWN_NOTES)} more notes are in run.json."))
    content = joined(
        element("p", " ".join(wording.details(summary))) if summary.scored else Html(),
        element("p", warning, class_="warning") if warning else Html(),
        _shares(summary) if summary.contigs else Html(),
        _key_figures(summary) if summary.scored else Html(),
        element("ul", *shown, class_="notes") if shown else Html(),
    )
    return element("section", content, aria_label="Overview") if content else Html()


def _shares(summary: Summary) -> Html:
    present = [(call, group) for call in GROUPS if (group := summary.groups[call]).contigs]
    bar = [
        element(
            "span", class_=CALL_CLASSES[call], style=f"flex-grow:{group.contigs}", title=f"{call}: {group.contigs:,}"
        )
        for call, group in present
    ]
    legend = [
        element(
            "li",
            swatch(call),
            f"{call}\u00a0",
            element("b", whole(group.contigs)),
            f" ({percent(group.contigs, summary.contigs)})",
        )
        for call, group in present
    ]
    return joined(element("div", *bar, class_="shares", aria_hidden="true"), element("ul", *legend, class_="legend"))


def _key_figures(summary: Summary) -> Html:
    viral = summary.groups[Call.VIRUS]
    if not viral.contigs and not summary.regions:
        return Html()
    figures = [
        (whole(summary.sure[least]), f"viral with P(virus) \u2265\u00a0{least}") for least in reversed(SURE_FROM)
    ]
    figures.append((nucleotides(viral.nt), f"in viral {summary.sequences}"))
    sample = summary.sample_record
    if sample.share is not None:
        how = "as given" if sample.interval is None else "estimated"
        figures.append((f"{sample.share:.2%}", f"share of viruses, {how}"))
    if viral.contigs and sample.fdr is not None:
        figures.append((f"{sample.fdr:.2%}", f"expected false discovery rate of the viral {summary.sequences}"))
    if summary.long_contigs:
        figures.append((whole(summary.regions), f"viral regions in long {summary.sequences}"))
    return element(
        "ul", *(element("li", element("b", n), element("span", what)) for n, what in figures), class_="figures"
    )


def distributions(summary: Summary, thresholds: Sequence[float]) -> Html:
    if not summary.scored:
        return Html()
    lines = " and ".join(f"{threshold:g}" for threshold in thresholds)
    dotted = f"dotted: the {'threshold' if len(thresholds) == 1 else 'thresholds'} {lines}"
    one = f"viral {summary.sequence}" if summary.has_only_viral else summary.sequence
    count = f"All {counted(summary.scored, one)} with a score" if summary.scored > 1 else f"The one {one} with a score"
    shown = len(summary.sample)
    sample = (
        f"Each point is a {one}."
        if shown == summary.scored
        else f"Each point is a {one}: {whole(shown)} of {whole(summary.scored)}, {_sampled(summary)}."
    )
    return element(
        "section",
        element("h2", "Scores"),
        element("p", wording.scores(summary), class_="note"),
        element(
            "div",
            plot_place(HISTOGRAM, "Distribution of P(virus)", f"{count}; {dotted}.", _scale_button()),
            plot_place(SCATTER, f"Length and P(virus) of {summary.sequences}", f"{sample} {dotted.capitalize()}."),
            class_="pair",
        ),
    )


def _sampled(summary: Summary) -> str:
    viral, shown = summary.groups[Call.VIRUS].contigs, sum(contig.found.call == Call.VIRUS for contig in summary.sample)
    if not viral:
        return "drawn evenly"
    which = "all that are called viral" if viral == shown else f"{whole(shown)} of the {whole(viral)} called viral"
    return f"{which}, and {whole(len(summary.sample) - shown)} of the others, drawn evenly"


def _scale_button() -> Html:
    return element(
        "button",
        "log counts",
        type="button",
        class_="scale needs-script",
        data_plot=HISTOGRAM,
        aria_pressed="false",
    )


def tracks(summary: Summary) -> Html:
    if not summary.contigs:
        return Html()
    parts = [
        element("h2", f"Along the long {summary.sequences}"),
        element("p", wording.regions(summary), class_="note"),
    ]
    if summary.regions:
        parts.append(element("p", wording.tracks(summary), class_="note"))
    groups = [
        (summary.viral_tracks, "called viral, the highest scores"),
        (
            summary.other_tracks,
            "not called viral, but with viral regions: a provirus, or a virus that the score missed",
        ),
    ]
    for shown, what in groups:
        if shown:
            parts.append(element("h3", f"{counted(len(shown), summary.sequence)} {what}", class_="of-tracks"))
            parts += [_track(track, track_name(track)) for track in shown]
    return element("section", *parts, class_="tracks")


def track_name(track: Track) -> str:
    """Return the id of the track's plot, which holds no text from input."""
    return f"track-{track.contig.number}"


def _track(track: Track, name: str) -> Html:
    contig = track.contig
    facts = [nucleotides(contig.length_nt), contig.found.call]
    if contig.found.score is not None:
        facts.append(f"P(virus) {probability(contig.found.score)}")
    if contig.regions:
        named = longest_regions(contig, _NAMED_REGIONS)
        which = (
            "viral" if len(named) == len(contig.regions) else f"longest of {whole(len(contig.regions))} viral regions:"
        )
        facts.append(f"{which} {_places(named)}")
    if len(contig.regions) > SHADED_REGIONS:
        facts.append(f"the {SHADED_REGIONS} longest regions are shaded")
    if track.window_nt:
        facts.append(f"means over {nucleotides(track.window_nt)}")
    return element(
        "figure",
        element("h4", swatch(contig.group), element("bdi", cut(contig.found.contig))),
        element("figcaption", " \u00b7 ".join(facts)),
        element("div", id=name, class_="plot", role="img", aria_label=f"P(virus) along {cut(contig.found.contig)}"),
        class_="track",
    )


def _places(regions: Iterable[Region]) -> str:
    """Return 1-based, inclusive positions."""
    return ", ".join(f"{region.start + 1:,}\u2013{region.end:,}" for region in regions)


def swatch(call: str) -> Html:
    return element("span", class_=f"swatch {CALL_CLASSES[call]}", aria_hidden="true")


def contig_table(summary: Summary) -> Html:
    if not summary.table:
        return Html()
    contigs = summary.table
    title = element("h2", summary.sequences.capitalize())
    listed = summary.groups[Call.VIRUS].contigs if summary.has_only_viral else summary.contigs
    if len(contigs) < listed:
        text = (
            f"The {whole(len(contigs))} {summary.sequences} with the highest P(virus), of {whole(listed)}. "
            "All of them are in contigs.tsv."
        )
        title = joined(title, element("p", text, class_="note"))
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
            _table(contigs, summary),
            class_="wide",
            tabindex="0",
            role="region",
            aria_label="Table of contigs",
        ),
        element("p", element("button", "Show all", type="button", id="more"), class_="more needs-script"),
        element("details", element("summary", "What the columns are"), terms(_explained(summary).items())),
    )


def _explained(summary: Summary) -> dict[str, str]:
    absent = {*(_OF_SAMPLE if summary.sample_record.share is None else ())}
    absent |= {*(() if summary.manifest.has_frames else _OF_FRAMES)}
    return {name: what for name, what in _EXPLAINED.items() if name not in absent}


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


def _table(contigs: list[ContigLine], summary: Summary) -> Html:
    columns: list[tuple[str, bool, Callable[[ContigLine], Html]]] = [
        (summary.sequence.capitalize(), False, lambda c: element("td", element("bdi", c.found.contig), class_="name")),
        ("P(virus)", True, _score),
        ("Call", False, lambda c: element("td", swatch(c.group), c.found.call, class_="call")),
        ("Length", True, lambda c: _number(c.found.length, nucleotides(c.length_nt))),
    ]
    if summary.manifest.has_frames:
        columns += [
            ("Highest", True, lambda c: _number(c.found.max_score, probability(c.found.max_score or 0))),
            ("Viral chunks", True, _viral_chunks),
            ("Frame support", True, lambda c: _number(c.found.frame_support, f"{c.found.frame_support or 0:.0%}")),
        ]
    if summary.sample_record.share is not None:
        columns[2:2] = [
            ("Posterior", True, lambda c: _number(c.found.posterior, probability(c.found.posterior or 0))),
            ("FDR", True, lambda c: _number(c.found.fdr, probability(c.found.fdr or 0))),
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
    is_between = found.call == Call.UNDECIDED and found.score is not None and found.frames != 0
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
