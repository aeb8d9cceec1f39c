"""``report.html``: the whole page as one file, which needs neither network nor other files; its size is bounded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from virnucpro import durable
from virnucpro.report import plots, provenance, sections, wording
from virnucpro.report.contig_table import contig_table
from virnucpro.report.html import joined
from virnucpro.report.html_page import fill_page
from virnucpro.report.summary import summarise

if TYPE_CHECKING:
    from pathlib import Path

    import plotly.graph_objects as go

    from virnucpro.report.summary import Summary
    from virnucpro.run_layout import PredictionLayout
    from virnucpro.store.manifest import PredictionManifest


def write_report(layout: PredictionLayout) -> Path:
    """
    Write the report of a finished identification; return where it is.

    Raises:
        ResultError: A file that it is made from is missing or cannot be read.
        OutputError: The report cannot be written.
    """
    durable.write_bytes(layout.report, make_page(layout, summarise(layout)).encode("utf-8", "backslashreplace"))
    return layout.report


def make_page(layout: PredictionLayout, summary: Summary) -> str:
    """Return the page."""
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
        colours=plots.COLOURS,
    )


def _figures(summary: Summary, thresholds: list[float]) -> dict[str, go.Figure]:
    """Return every figure by the name of its place."""
    figures = {}
    if summary.scored:
        figures[sections.HISTOGRAM] = plots.score_histogram(summary, thresholds)
        figures[sections.SCATTER] = plots.length_against_score(summary, thresholds)
    for track in [*summary.viral_tracks, *summary.other_tracks]:
        lines = thresholds if summary.has_contig_model else [0.5]  # there, chunks are viral by their frames
        figures[sections.track_name(track)] = plots.track_plot(track, lines)
    return figures


def _thresholds(manifest: PredictionManifest) -> list[float]:
    """Return where the calls change: at the threshold, and where a band without verdict lies below it, at its foot."""
    threshold = float(manifest.output_settings["threshold"])
    return sorted({min(threshold, round(1 - threshold, 12)), threshold})
