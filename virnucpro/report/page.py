"""
``report.html``: the whole page as one file, which needs neither network nor other files.

plotly.js stands in it as the installed package has it. The page's policy lets only that script and ours run, by their
hashes, and no address be loaded; the size of the page is bounded whatever the input.
"""

from __future__ import annotations

import base64
import hashlib
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, Any

from plotly.offline import get_plotlyjs

from virnucpro import durable
from virnucpro.report import plots, provenance, sections, wording
from virnucpro.report.contig_table import contig_table
from virnucpro.report.html import joined, script_json
from virnucpro.report.summary import summarise

if TYPE_CHECKING:
    from pathlib import Path

    from virnucpro.report.summary import Summary
    from virnucpro.run_layout import PredictionLayout
    from virnucpro.store.prediction_manifest import PredictionManifest


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
    text = partial(_package_text, "virnucpro.report")
    plotly, script = _newlines(get_plotlyjs()), text("page.js")
    body = joined(
        sections.overview(summary),
        sections.distributions(summary, thresholds),
        sections.tracks(summary),
        contig_table(summary),
        provenance.left_out(summary),
        provenance.how_it_was_made(summary),
    )
    return Template(text("page.html")).substitute(
        policy=_policy(plotly, script),
        generator=f"virnucpro {version('virnucpro')}",
        title=joined(f"VirNucPro: {wording.lead(summary)}"),
        colours=_colour_rules(),
        style=text("page.css"),
        heading=sections.heading(summary),
        sections=body,
        footer=provenance.footer(layout),
        figures=script_json(_figures(summary, thresholds)),
        plotly=plotly,
        script=script,
    )


def _figures(summary: Summary, thresholds: list[float]) -> dict[str, Any]:
    """Return every figure by the name of its place, and dark colours by light ones."""
    figures = {}
    if summary.scored:
        figures[sections.HISTOGRAM] = plots.score_histogram(summary, thresholds)
        figures[sections.SCATTER] = plots.length_against_score(summary, thresholds)
    for track in [*summary.viral_tracks, *summary.other_tracks]:
        figures[sections.track_name(track)] = plots.track_plot(track)
    return {
        "figures": {name: figure.to_plotly_json() for name, figure in figures.items()},
        "dark": {colour.light: colour.dark for colour in plots.COLOURS.values()},
    }


def _thresholds(manifest: PredictionManifest) -> list[float]:
    """Return where the calls change: at the threshold, and where a band without verdict lies below it, at its foot."""
    threshold = float(manifest.output_settings["threshold"])
    return sorted({min(threshold, round(1 - threshold, 12)), threshold})


def _colour_rules() -> str:
    light = "".join(f"--{role}:{colour.light};" for role, colour in plots.COLOURS.items())
    dark = "".join(f"--{role}:{colour.dark};" for role, colour in plots.COLOURS.items())
    return (
        f":root{{color-scheme:light;{light}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root{{color-scheme:dark;{dark}}}}}"
    )


def _policy(*scripts: str) -> str:
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    sources = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {sources}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _package_text(package: str, name: str) -> str:
    return _newlines((files(package) / name).read_text(encoding="utf-8"))


def _newlines(text: str) -> str:
    """Return *text* with the line ends that a browser hashes."""
    return text.replace("\r\n", "\n").replace("\r", "\n")
