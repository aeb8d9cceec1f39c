"""What the page of an evaluation draws: ROC, precision and recall, and the histogram of scores, in few points."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from virnucpro.training.evaluation.metrics import weight_of_others

if TYPE_CHECKING:
    from virnucpro.arrays import BoolArray, DoubleArray
    from virnucpro.training.evaluation.metrics import ScoreCounts

CURVE_POINTS = 400
"""At most so many points in a curve."""
HISTOGRAM_BINS = 40


def curves(
    counts: ScoreCounts, prevalence: float | None
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return the ROC (share of others and of viral contigs called) and recall and precision, strictest first."""
    if not (counts.viral and counts.others):
        return [], []
    viral_U, others_U = (called_U[::-1] for called_U in counts.from_score_up())
    called = viral_U + others_U > 0
    recall, share_U = viral_U / counts.viral, others_U / counts.others
    weighted_U = others_U * weight_of_others(counts.viral, counts.others, prevalence)
    precision = viral_U[called] / (viral_U + weighted_U)[called]
    roc = [(0.0, 0.0), *zip(share_U.tolist(), recall.tolist(), strict=True)]
    return _thinned(roc), _thinned(list(zip(recall[called].tolist(), precision.tolist(), strict=True)))


def histogram(scored_C: DoubleArray, is_virus_C: BoolArray, *, are_probabilities: bool) -> dict[str, list[float]]:
    if not len(scored_C):
        return {"edges": [], "viral": [], "others": []}
    limits = (0.0, 1.0) if are_probabilities else (float(scored_C.min()), float(scored_C.max()))
    edges = np.histogram_bin_edges(scored_C, HISTOGRAM_BINS, limits)
    viral, others = (np.histogram(scored_C[mine], edges)[0] for mine in (is_virus_C, ~is_virus_C))
    return {"edges": edges.tolist(), "viral": viral.tolist(), "others": others.tolist()}


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most ``CURVE_POINTS`` points, the ends among them, without those on a level or upright line."""
    corners = [
        point
        for number, point in enumerate(points)
        if number in {0, len(points) - 1}
        or not any(points[number - 1][axis] == point[axis] == points[number + 1][axis] for axis in (0, 1))
    ]
    if len(corners) <= CURVE_POINTS:
        return corners
    return [corners[number] for number in np.linspace(0, len(corners) - 1, CURVE_POINTS).astype(int).tolist()]
