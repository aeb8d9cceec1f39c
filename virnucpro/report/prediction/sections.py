"""The sections with the result: the answer, the plots, and what is along contigs."""

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
    whole,
)
from virnucpro.report.prediction import plots, wording
from virnucpro.report.prediction.plots import CALL_CLASSES, SHADED_REGIONS, longest_regions
from virnucpro.report.prediction.summary import GROUPS, SURE_FROM
from virnucpro.report.prediction.table import swatch
from virnucpro.report.prediction.viral_records import find_genes
from virnucpro.store.contig_table import Call

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from virnucpro.report.prediction.summary import Region, Summary, Track
    from virnucpro.report.prediction.viral_records import Gene

HISTOGRAM = "score-histogram"
SCATTER = "length-against-score"
_SHOWN_INPUTS = 3
_SHOWN_NOTES = 20
_NAMED_REGIONS = 4


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
    title, of_length = "Distribution of P(virus)", f"Length and P(virus) of {summary.sequences}"
    scatter = plots.length_against_score(summary, thresholds).drawn(SCATTER, of_length)
    return element(
        "section",
        element("h2", "Scores"),
        element("p", wording.scores(summary), class_="note"),
        element(
            "div",
            plot_place(title, f"{count}; {dotted}.", *_histograms(summary, thresholds, title)),
            plot_place(of_length, f"{sample} {dotted.capitalize()}.", scatter),
            class_="pair",
        ),
    )


def _histograms(summary: Summary, thresholds: Sequence[float], title: str) -> list[Html]:
    """Return the histogram with counts on a linear and on a log scale, and the button that exchanges them."""
    starts_log = plots.starts_on_log_scale(summary)
    drawn = [
        plots.score_histogram(summary, thresholds, is_log=is_log).drawn(name, title, is_hidden=is_log != starts_log)
        for name, is_log in ((HISTOGRAM, False), (f"{HISTOGRAM}-log", True))
    ]
    button = element(
        "button",
        "log counts",
        type="button",
        class_="scale needs-script",
        data_plot=HISTOGRAM,
        aria_pressed=str(starts_log).lower(),
    )
    return [*drawn, button]


def _sampled(summary: Summary) -> str:
    viral, shown = summary.groups[Call.VIRUS].contigs, sum(contig.found.call == Call.VIRUS for contig in summary.sample)
    if not viral:
        return "drawn evenly"
    which = "all that are called viral" if viral == shown else f"{whole(shown)} of the {whole(viral)} called viral"
    return f"{which}, and {whole(len(summary.sample) - shown)} of the others, drawn evenly"


def along_contigs(summary: Summary) -> Html:
    if not summary.contigs:
        return Html()
    many = summary.sequences
    parts = [element("h2", f"Along the {many}"), element("p", wording.regions(summary), class_="note")]
    if summary.viral_tracks or summary.other_tracks:
        parts.append(element("p", wording.tracks(summary), class_="note"))
    if summary.even_tracks:
        parts.append(element("p", wording.even_tracks(summary), class_="note"))
    for shown, what in (
        (summary.viral_tracks, "called viral, along which P(virus) varies"),
        (
            summary.other_tracks,
            "not called viral, but with viral regions: a provirus, or a virus that the score missed",
        ),
    ):
        if shown:
            parts.append(element("h3", f"{counted(len(shown), summary.sequence)} {what}", class_="of-tracks"))
            parts += [_track(summary, track, folded=False) for track in shown]
    if summary.gene_maps:
        one = summary.sequence if not summary.viral_tracks else f"more {summary.sequence}"
        title = f"Genes of {counted(len(summary.gene_maps), one)} called viral"
        parts.append(element("h3", title, class_="of-tracks"))
        folded = (_track(summary, track, folded=True) for track in summary.gene_maps)
        parts.append(element("div", *folded, class_="folded"))
    return element("section", *parts, class_="tracks")


def _track(summary: Summary, track: Track, *, folded: bool) -> Html:
    """Return P(virus) and genes along a contig; *folded* behind its name."""
    contig = track.contig
    record = summary.records.get(contig.number)
    genes = find_genes(record) if record else []
    name = joined(swatch(contig.group), element("bdi", cut(contig.found.contig)))
    drawn = plots.along_contig(track, genes)
    what = "P(virus) and genes" if genes else "P(virus)"
    plot = drawn.drawn(track_name(track), f"{what} along {cut(contig.found.contig)}") if drawn.height_px else Html()
    facts = element("p", " \u00b7 ".join(_facts(track, genes, is_known=bool(record))), class_="caption")
    copy = element("button", "Copy sequence", type="button", class_="copy needs-script", data_copy=contig.number)
    return element(
        "details" if folded else "div",
        element("summary", name, f" {nucleotides(contig.length_nt)}") if folded else element("h4", name),
        facts,
        plot,
        copy if record else Html(),
        class_="track",
    )


def _facts(track: Track, genes: Sequence[Gene], *, is_known: bool) -> list[str]:
    contig = track.contig
    facts = [nucleotides(contig.length_nt), contig.found.call]
    if contig.found.score is not None:
        facts.append(f"P(virus) {probability(contig.found.score)}")
    if track.steps and track.is_even:
        least, most = (probability(of(step.p_virus for step in track.steps)) for of in (min, max))
        facts.append(f"along it {least}" if least == most else f"along it {least} to {most}")
    if is_known:
        facts.append(counted(len(genes), "likely gene"))
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
    return facts


def track_name(track: Track) -> str:
    """Return the id of the track's plot, which holds no text from input."""
    return f"track-{track.contig.number}"


def _places(regions: Iterable[Region]) -> str:
    """Return 1-based, inclusive positions."""
    return ", ".join(f"{region.start + 1:,}\u2013{region.end:,}" for region in regions)
