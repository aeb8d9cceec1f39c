"""
The plots of a report: scores, lengths, and scores and genes along a contig.

Calls differ in shape as well as in colour.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from virnucpro.calls.viral_regions import NEUTRAL_P
from virnucpro.report.figure import Axis, Figure, count_axis, length_axis, position_axis, share_axis
from virnucpro.report.formats import cut, nucleotides, probability
from virnucpro.report.prediction.summary import NO_SCORE, SCORE_BINS
from virnucpro.store.contig_table import Call

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virnucpro.report.prediction.summary import ContigLine, Region, Summary, Track
    from virnucpro.report.prediction.viral_records import Gene


CALL_COLOURS = {Call.VIRUS: "virus", Call.NOT_VIRUS: "not-virus", Call.UNDECIDED: "undecided", NO_SCORE: "no-score"}
CALL_CLASSES = {**CALL_COLOURS, Call.TOO_SHORT: "no-score too-short"}
"""Too short: hatched in the colour of no score."""

SHADED_REGIONS = 300
"""At most so many regions are shaded in a track: the longest."""

_SHAPES = {Call.VIRUS: "round", Call.UNDECIDED: "square", Call.NOT_VIRUS: "ring"}
_DRAWN = (Call.NOT_VIRUS, Call.UNDECIDED, Call.VIRUS)
"""The most important is drawn last."""
_LOG_FROM = 20
"""From this ratio of the highest bar to the highest viral one on, counts start on a log scale."""
_STRAND_Y = {False: (-0.26, -0.12), True: (-0.46, -0.32)}
"""Whether on the reverse strand -> lower and upper edge of genes below the track."""
_BOTTOM_Y = -0.52
_TRACK_PX, _GENES_PX = 110, 56


def score_histogram(summary: Summary, thresholds: Sequence[float], *, is_log: bool) -> Figure:
    step = 1 / SCORE_BINS
    groups = {call: summary.groups[call].bins for call in _DRAWN if any(summary.groups[call].bins)}
    heights = [sum(bins) for bins in zip(*groups.values(), strict=True)]
    counts = count_axis(f"{summary.sequences}{', log scale' if is_log else ''}", max(heights), is_log=is_log)
    figure = Figure(share_axis(f"score of the {summary.sequence}"), counts)
    below = [0] * SCORE_BINS
    for call, bins in groups.items():
        edges = [((n + 0.04) * step, (n + 0.96) * step) for n in range(SCORE_BINS)]
        bars = [
            ((x0, low or counts.low), (x1, low + n)) for (x0, x1), low, n in zip(edges, below, bins, strict=True) if n
        ]
        figure.boxes(CALL_COLOURS[call], bars)
        below = [low + n for low, n in zip(below, bins, strict=True)]
    for call in reversed(groups):
        figure.legend(f"bar {CALL_COLOURS[call]}", call)
    for number, height in enumerate(heights):
        if height:
            each = ", ".join(f"{bins[number]:,} {call}" for call, bins in groups.items() if bins[number])
            edge = number * step
            figure.tip(edge + step / 2, height, f"score {edge:.3g}\u2013{edge + step:.3g}: {each}")
    for threshold in thresholds:
        figure.dotted_at_x(threshold)
    return figure


def starts_on_log_scale(summary: Summary) -> bool:
    """Return whether the bars of viral contigs would else be too low to be seen."""
    viral = max(summary.groups[Call.VIRUS].bins)
    return bool(viral) and max(max(summary.groups[call].bins) for call in _DRAWN) > _LOG_FROM * viral


def length_against_score(summary: Summary, thresholds: Sequence[float]) -> Figure:
    lengths = [contig.length_nt for contig in summary.sample] or [100, 10_000]
    axis = length_axis(f"{summary.sequence} length (nt, log scale)", min(lengths), max(lengths))
    figure = Figure(axis, share_axis(f"score of the {summary.sequence}", -0.03, 1.03))
    for threshold in thresholds:
        figure.dotted_at_y(threshold)
    by_call = {call: [contig for contig in summary.sample if contig.found.call == call] for call in _DRAWN}
    for call, contigs in by_call.items():
        figure.dots(CALL_COLOURS[call], ((c.length_nt, c.found.score or 0.0) for c in contigs), _SHAPES[call])
    for call in reversed(_DRAWN):
        if by_call[call]:
            figure.legend(f"dots {_SHAPES[call]} {CALL_COLOURS[call]}", call)
        for contig in by_call[call]:
            score = contig.found.score or 0.0
            name, length = cut(contig.found.contig, 80), nucleotides(contig.length_nt)
            figure.tip(contig.length_nt, score, f"{name}: {length}, score {probability(score)}, {call}")
    return figure


def along_contig(track: Track, genes: Sequence[Gene]) -> Figure:
    """Return the scores along a contig, where it has a track that varies, and its genes as arrows below."""
    length_nt = track.contig.length_nt or 1
    has_line = bool(track.steps) and not track.is_even
    y = Axis(
        "score" if has_line else "",
        _BOTTOM_Y if genes else 0,
        1.02 if has_line else 0,
        [(0, "0"), (0.5, "0.5"), (1, "1")] if has_line else [],
    )
    height_px = (_TRACK_PX if has_line else 0) + (_GENES_PX if genes else 0)
    figure = Figure(position_axis("position in the contig", length_nt), y, height_px)
    if has_line:
        shaded = longest_regions(track.contig, SHADED_REGIONS)
        figure.boxes("region", (((region.start, 0), (region.end, 1)) for region in shaded))
        figure.dotted_at_y(NEUTRAL_P)
        figure.lines("curve ink", _runs(track))
        for step in track.steps:
            said = f"{step.start + 1:,}\u2013{step.end:,}: score {probability(step.p_virus)}"
            figure.tip((step.start + step.end) / 2, step.p_virus, said)
    figure.shapes("bar gene", (_arrow(gene, length_nt) for gene in genes))
    for gene in genes:
        figure.tip((gene.start + gene.end) / 2, sum(_STRAND_Y[gene.is_reverse]) / 2, gene.said())
    return figure


def _runs(track: Track) -> list[list[tuple[float, float]]]:
    """Return the line of a track, in parts where there are chunks without a score."""
    runs: list[list[tuple[float, float]]] = []
    end = None
    for step in track.steps:
        if step.start != end:
            runs.append([])
        runs[-1] += [(step.start, step.p_virus), (step.end, step.p_virus)]
        end = step.end
    return runs


def _arrow(gene: Gene, length_nt: int) -> list[tuple[float, float]]:
    low, high = _STRAND_Y[gene.is_reverse]
    tip, tail = (gene.start, gene.end) if gene.is_reverse else (gene.end, gene.start)
    neck = tip + (1 if gene.is_reverse else -1) * min(gene.end - gene.start, 0.008 * length_nt)
    return [(tail, low), (neck, low), (tip, (low + high) / 2), (neck, high), (tail, high)]


def longest_regions(contig: ContigLine, most: int) -> list[Region]:
    """Return at most *most* viral regions, the longest, in the order of the sequence."""
    return sorted(sorted(contig.regions, key=lambda region: region.start - region.end)[:most])
