"""``report.html``: one file of bounded size that needs neither network nor other files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from virnucpro import durable
from virnucpro.report.figures import COLOURS
from virnucpro.report.html import joined
from virnucpro.report.html_page import fill_page
from virnucpro.report.prediction import plots, provenance, sections, wording
from virnucpro.report.prediction.contig_table import contig_table
from virnucpro.report.prediction.summary import summarise

if TYPE_CHECKING:
    from pathlib import Path

    import plotly.graph_objects as go

    from virnucpro.report.prediction.summary import Summary
    from virnucpro.run_layout import PredictionLayout
    from virnucpro.store.manifest import PredictionManifest


def write_report(layout: PredictionLayout) -> Path:
    """Write the report of a complete prediction; return its path."""
    durable.write_bytes(layout.report, make_page(layout, summarise(layout)).encode("utf-8", "backslashreplace"))
    return layout.report


def make_page(layout: PredictionLayout, summary: Summary) -> str:
    thresholds = _thresholds(summary.manifest)
    body = joined(
        sections.overview(summary),
        sections.distributions(summary, thresholds),
        sections.tracks(summary),
        contig_table(summary),
        provenance.left_out(summary),
        provenance.how_it_was_made(summary),
    )
    return fill_page(
        title=f"VirNucPro: {wording.lead(summary)}",
        heading=sections.heading(summary),
        sections=body,
        footer=provenance.footer(layout),
        figures=_figures(summary, thresholds),
        colours=COLOURS,
    )


def _figures(summary: Summary, thresholds: list[float]) -> dict[str, go.Figure]:
    """Return every figure by the id of its element."""
    figures = {}
    if summary.scored:
        figures[sections.HISTOGRAM] = plots.score_histogram(summary, thresholds)
        figures[sections.SCATTER] = plots.length_against_score(summary, thresholds)
    for track in [*summary.viral_tracks, *summary.other_tracks]:
        lines = thresholds if summary.has_contig_model else [0.5]  # there, chunks are viral by their frames
        figures[sections.track_name(track)] = plots.track_plot(track, lines)
    return figures


def _thresholds(manifest: PredictionManifest) -> list[float]:
    """Return the scores at which calls change: the threshold and, if undecided ones exist, the lower end of theirs."""
    threshold = float(manifest.output_settings["threshold"])
    return sorted({min(threshold, round(1 - threshold, 12)), threshold})
