"""
The plots of a report, in the colours of the light page.

Calls differ in symbol as well as in colour. Text from input reaches plotly as escaped hover text only.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from virnucpro.report.figure import axis, laid_out, line_at_x, line_at_y
from virnucpro.report.html import hover_text, nucleotides, probability
from virnucpro.report.html_page import colour
from virnucpro.report.prediction.summary import NO_SCORE, SCORE_BINS
from virnucpro.store.contig_table import Call

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virnucpro.report.figure import Figure
    from virnucpro.report.prediction.summary import ContigLine, Region, Summary, Track


CALL_COLOURS = {Call.VIRUS: "virus", Call.NOT_VIRUS: "not-virus", Call.UNDECIDED: "undecided", NO_SCORE: "no-score"}
CALL_CLASSES = {**CALL_COLOURS, Call.TOO_SHORT: "no-score too-short"}
"""Too short: hatched in the colour of no score."""

SHADED_REGIONS = 300
"""At most so many regions are shaded in a track: the longest."""

_SYMBOLS = {Call.VIRUS: "circle", Call.UNDECIDED: "diamond", Call.NOT_VIRUS: "circle-open"}
_DRAWN = (Call.NOT_VIRUS, Call.UNDECIDED, Call.VIRUS)
"""The most important is drawn last."""
_LOG_FROM = 20
"""From this ratio of the highest bar to the highest viral one on, counts start on a log scale."""


def score_histogram(summary: Summary, thresholds: Sequence[float]) -> Figure:
    step = 1 / SCORE_BINS
    edges = [number * step for number in range(SCORE_BINS)]
    bars = [
        {
            "type": "bar",
            "x": [edge + step / 2 for edge in edges],
            "y": summary.groups[call].bins,
            "width": step * 0.92,
            "name": call,
            "legendrank": len(_DRAWN) - _DRAWN.index(call),
            "marker": {"color": colour(CALL_COLOURS[call]), "line": {"width": 0}},
            "customdata": [f"{edge:.3g}\u2013{edge + step:.3g}" for edge in edges],
            "hovertemplate": f"P(virus) %{{customdata}}<br>{summary.sequences}, {call}: %{{y:,}}<extra></extra>",
        }
        for call in _DRAWN
        if any(summary.groups[call].bins)
    ]
    highest = max(max(group.bins) for group in summary.groups.values())
    steps = {"dtick": 1} if highest < 10 else {"tickformat": "~s"}  # no parts of contigs
    return laid_out(
        bars,
        height_px=340,
        xaxis=axis(f"P(virus) of the {summary.sequence}", range=[0, 1], dtick=0.2),
        yaxis=axis(summary.sequences, rangemode="tozero", type=_count_scale(summary), **steps),
        shapes=[line_at_x(threshold) for threshold in thresholds],
        barmode="stack",
        bargap=0,
    )


def length_against_score(summary: Summary, thresholds: Sequence[float]) -> Figure:
    points = []
    for call in _DRAWN:
        contigs = [contig for contig in summary.sample if contig.found.call == call]
        if contigs:
            trace = {
                "type": "scatter",
                "x": [contig.length_nt for contig in contigs],
                "y": [contig.found.score for contig in contigs],
                "mode": "markers",
                "name": call,
                "legendrank": len(_DRAWN) - _DRAWN.index(call),
                "marker": {
                    "color": colour(CALL_COLOURS[call]),
                    "symbol": _SYMBOLS[call],
                    "size": 7 if len(summary.sample) <= 1000 else 5,
                    "opacity": 0.75,
                },
                "text": [_hover(contig) for contig in contigs],
                "hovertemplate": f"%{{text}}, {call}<extra></extra>",
            }
            points.append(trace)
    lengths = [contig.length_nt or 1 for contig in summary.sample] or [100, 10_000]
    limits = [math.log10(min(lengths)) - 0.1, math.log10(max(lengths)) + 0.1]
    ticks = 1 if limits[1] - limits[0] > 1.6 else "D2"  # decades, or 1, 2 and 5 of each
    length = f"{summary.sequence} length (nt, log scale)"
    return laid_out(
        points,
        height_px=340,
        xaxis=axis(length, type="log", tickformat="~s", dtick=ticks, range=limits),
        yaxis=axis(f"P(virus) of the {summary.sequence}", range=[-0.03, 1.03], dtick=0.2),
        shapes=[line_at_y(threshold) for threshold in thresholds],
    )


def track_plot(track: Track, neutral_p: float) -> Figure:
    length_nt = track.contig.length_nt or 1
    unit, unit_nt = ("Mb", 1_000_000) if length_nt >= 1_000_000 else ("kb", 1_000)
    x: list[float | None] = []
    y: list[float | None] = []
    end = 0
    for step in track.steps:
        if step.start > end:
            x.append(None)
            y.append(None)
        x += [step.start / unit_nt, step.end / unit_nt]
        y += [round(step.p_virus, 4)] * 2
        end = step.end
    line = {
        "type": "scatter",
        "x": x,
        "y": y,
        "mode": "lines",
        "line": {"color": colour("ink"), "width": 1.6},
        "connectgaps": False,
        "hovertemplate": f"%{{x:,.1f}} {unit}: P(virus) %{{y:.3f}}<extra></extra>",
    }
    shaded = {"type": "rect", "layer": "below", "y0": 0, "y1": 1, "fillcolor": colour("region"), "line": {"width": 0}}
    regions = [
        {**shaded, "x0": region.start / unit_nt, "x1": region.end / unit_nt}
        for region in longest_regions(track.contig, SHADED_REGIONS)
    ]
    return laid_out(
        [line],
        height_px=170,
        xaxis=axis(f"position in the contig ({unit})", range=[0, length_nt / unit_nt], showgrid=False),
        yaxis=axis("P(virus)", range=[0, 1.02], tickvals=[0, 0.5, 1]),
        shapes=[*regions, line_at_y(neutral_p)],
        showlegend=False,
    )


def longest_regions(contig: ContigLine, most: int) -> list[Region]:
    """Return at most *most* viral regions, the longest, in the order of the sequence."""
    return sorted(sorted(contig.regions, key=lambda region: region.start - region.end)[:most])


def _count_scale(summary: Summary) -> str:
    """Return ``log`` where the bars of viral contigs would be too low to be seen."""
    viral = max(summary.groups[Call.VIRUS].bins)
    highest = max(max(summary.groups[call].bins) for call in _DRAWN)
    return "log" if viral and highest > _LOG_FROM * viral else "linear"


def _hover(contig: ContigLine) -> str:
    score = probability(contig.found.score or 0.0).replace("<", "&lt;").replace(">", "&gt;")
    return f"{hover_text(contig.found.contig)}<br>{nucleotides(contig.length_nt)}, P(virus) {score}"
