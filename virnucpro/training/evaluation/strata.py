"""
Measures of a table of scores on contigs of known label: overall, by length and by group, ready for JSON.

A stratum is measured by itself: its recall at 1 % false positives counts its own contigs. The results at the one
threshold of all contigs stand beside. A group of one label is measured against all contigs of the other label, without
calibration, which would describe the mixture. NaN, for a contig without a score, ranks below all others and is never
called. Legend: C contigs.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from virnucpro.training.evaluation.metrics import BOOTSTRAP_SAMPLES, Interval, RankedContigs, bootstrap, counts_of
from virnucpro.training.evaluation.tables import UNKNOWN_NT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virnucpro.arrays import BoolArray, DoubleArray
    from virnucpro.training.evaluation.metrics import CalibrationBin, ScoreCounts
    from virnucpro.training.evaluation.tables import KnownContigs

LENGTH_EDGES_NT = (500, 1000, 1999)
"""Upper ends of all length classes but the last."""
MOST_GROUPS = 100
"""At most so many groups are measured: the largest."""
CURVE_POINTS = 400
"""At most so many points in a curve."""
HISTOGRAM_BINS = 40
_DIGITS = 6


@dataclass(frozen=True, kw_only=True)
class Stratum:
    """Measures on some of the contigs; None where a measure has no meaning."""

    contigs: int
    """Contigs of the stratum itself."""
    viral: int
    """Viral contigs that were measured."""
    others: int
    """Other contigs that were measured."""
    compared_with: str | None
    """The contigs added because the stratum has one label only."""
    without_score: int
    """Contigs of the stratum itself that have no score."""
    auroc: Interval | None
    auprc: Interval | None
    """Average precision."""
    f1: Interval | None
    """At the threshold."""
    recall_at_1_percent_false_positives: Interval | None
    """At the lowest threshold that at most 1 % of the others measured here reach."""
    calibration_error: Interval | None
    """Expected calibration error over ten bins of equal numbers of contigs."""
    recall: float | None
    """Share of the viral contigs that reach the threshold."""
    false_positive_share: float | None
    """Share of the others that reach the threshold."""
    recall_at_strict_threshold: float | None
    """Share of the viral contigs that reach the evaluation's strict threshold."""
    false_positive_share_at_strict_threshold: float | None
    """Share of the others that reach it."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Measures of one table of scores."""

    threshold: float | None
    """Contigs are called viral from this score up; None: no threshold is known."""
    strict_threshold: float | None
    """Lowest threshold that at most 1 % of all contigs that are not viral reach."""
    overall: Stratum
    by_length: dict[str, Stratum]
    """By length class; empty ones are missing."""
    by_group: dict[str, Stratum]
    """By group, in alphabetical order."""
    calibration: list[CalibrationBin] | None
    """Reliability curve; None if scores are no probabilities."""
    roc: list[tuple[float, float]]
    """Share of others and of viral contigs called, from the strictest threshold to the loosest."""
    precision_recall: list[tuple[float, float]]
    """Recall and precision at falling thresholds."""
    histogram: dict[str, list[float]]
    """``edges`` of equal steps, and how many ``viral`` and ``others`` score in each."""
    notes: list[str] = field(default_factory=list)
    """What the user should know, a sentence each."""
    bootstrap_samples: int
    seed: int

    def to_json(self) -> dict[str, Any]:
        """Return plain data, numbers with six digits, None for measures without meaning."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain


def evaluate(
    scores_C: DoubleArray,
    known: KnownContigs,
    *,
    threshold: float | None = 0.5,
    length_edges_nt: Sequence[int] = LENGTH_EDGES_NT,
    bootstrap_samples: int = BOOTSTRAP_SAMPLES,
    seed: int = 1,
) -> Evaluation:
    """
    Return the measures of scores, with 95 % bootstrap intervals.

    Args:
        scores_C: float64 (C,): finite, the higher the more viral; NaN for no score.
        known: The contigs' labels, in the same order.
        threshold: Score from which a contig is called viral; None skips what needs one.
        length_edges_nt: Upper ends of all length classes but the last, ascending.
        bootstrap_samples: Samples of each interval.
        seed: Seed of the samples.
    """
    assert len(scores_C) == len(known) > 0
    is_virus_C = known.is_virus_C
    scored_C = scores_C[~np.isnan(scores_C)]
    are_probabilities = bool(len(scored_C)) and scored_C.min() >= 0 and scored_C.max() <= 1
    counts = counts_of(scores_C, is_virus_C)
    meter = _Meter(
        scores_C=scores_C,
        is_virus_C=is_virus_C,
        threshold=math.nan if threshold is None else threshold,
        strict_threshold=counts.strict_threshold(),
        are_probabilities=are_probabilities,
        bootstrap_samples=bootstrap_samples,
        seed=seed,
    )
    of_lengths = length_classes(known.lengths_nt_C, length_edges_nt)
    largest = [group for group, _ in Counter(filter(None, known.groups)).most_common(MOST_GROUPS)]
    groups_C = np.array(known.groups, dtype=object)
    roc, precision_recall = _curves(counts)
    notes = _notes(known, scores_C, are_probabilities=are_probabilities, threshold=threshold)
    return Evaluation(
        threshold=threshold,
        strict_threshold=_or_none(meter.strict_threshold),
        overall=meter.measure(np.ones(len(known), dtype=bool)),
        by_length={name: meter.measure(mine_C) for name, mine_C in of_lengths.items()},
        by_group={group: meter.measure(groups_C == group, against_others=True) for group in sorted(largest)},
        calibration=counts.calibration_bins() if are_probabilities else None,
        roc=_thinned(roc),
        precision_recall=_thinned(precision_recall),
        histogram=_histogram(scored_C, is_virus_C[~np.isnan(scores_C)], are_probabilities=are_probabilities),
        notes=notes,
        bootstrap_samples=bootstrap_samples,
        seed=seed,
    )


def length_classes(lengths_nt_C: Any, edges_nt: Sequence[int] = LENGTH_EDGES_NT) -> dict[str, BoolArray]:
    """Return the contigs of each non-empty length class; those of unknown length are in none."""
    bounds = [*pairwise([0, *edges_nt]), (edges_nt[-1], None)] if edges_nt else [(0, None)]
    classes = {}
    for below, most in bounds:
        mine_C = (lengths_nt_C > max(below, UNKNOWN_NT)) & (True if most is None else lengths_nt_C <= most)
        if mine_C.any():
            classes[_length_class(below, most)] = mine_C
    return classes


def _length_class(below: int, most: int | None) -> str:
    if most is None:
        return f"{below + 1:,} nt and more" if below else "all lengths"
    return f"{below + 1:,} to {most:,} nt" if below else f"up to {most:,} nt"


@dataclass(frozen=True, kw_only=True)
class _Meter:
    """What the measures of all strata share."""

    scores_C: DoubleArray
    is_virus_C: BoolArray
    threshold: float
    """NaN: not known."""
    strict_threshold: float
    are_probabilities: bool
    bootstrap_samples: int
    seed: int

    def measure(self, mine_C: BoolArray, *, against_others: bool = False) -> Stratum:
        """Measure some contigs; with *against_others*, contigs of one label against all of the other."""
        compared_with, measured_C = None, mine_C
        labels = set(self.is_virus_C[mine_C].tolist())
        if against_others and len(labels) == 1:
            is_viral = labels.pop()
            compared_with = "all contigs that are not viral" if is_viral else "all viral contigs"
            measured_C = mine_C | (self.is_virus_C != is_viral)
        ranked = RankedContigs(self.scores_C[measured_C], self.is_virus_C[measured_C])
        is_calibrated = self.are_probabilities and compared_with is None

        def measures(drawn: Any) -> dict[str, float]:
            counts = ranked.counts(drawn)
            return {
                "auroc": counts.auroc(),
                "auprc": counts.auprc(),
                "f1": counts.f1(self.threshold),
                "recall_at_1_percent_false_positives": counts.strict_recall(),
                "calibration_error": counts.calibration_error() if is_calibrated else math.nan,
            }

        found = bootstrap(measures, ranked.is_virus_C, seed=self.seed, samples=self.bootstrap_samples)
        counts = ranked.counts()
        at, strict = self.threshold, self.strict_threshold
        return Stratum(
            contigs=int(mine_C.sum()),
            viral=counts.viral,
            others=counts.others,
            compared_with=compared_with,
            without_score=int(np.isnan(self.scores_C[mine_C]).sum()),
            **{name: None if math.isnan(one.value) else one for name, one in found.items()},
            recall=_or_none(counts.recall(at)),
            false_positive_share=_or_none(counts.false_positive_share(at)),
            recall_at_strict_threshold=_or_none(counts.recall(strict)),
            false_positive_share_at_strict_threshold=_or_none(counts.false_positive_share(strict)),
        )


def _notes(
    known: KnownContigs, scores_C: DoubleArray, *, are_probabilities: bool, threshold: float | None
) -> list[str]:
    notes = []
    without = int(np.isnan(scores_C).sum())
    if without:
        text = f"without a score: {without:,} of {len(known):,} contigs, which rank below all others and are not called"
        notes.append(f"{text}{', and calibration is measured without them' if are_probabilities else ''}")
    viral = int(known.is_virus_C.sum())
    if viral in {0, len(known)}:
        which = "viral" if viral else "not viral"
        notes.append(f"all contigs are {which}: what compares the two kinds cannot be measured")
    if not are_probabilities and without < len(known):
        notes.append("scores are not all between 0 and 1, so they are no probabilities: calibration is left out")
    if threshold is None:
        notes.append("no threshold is known: F1, recall and false positives at it are left out (--threshold)")
    unknown = int((known.lengths_nt_C == UNKNOWN_NT).sum())
    if unknown:
        notes.append(f"of unknown length, and in no length class: {unknown:,} of {len(known):,} contigs")
    num_groups = len(set(filter(None, known.groups)))
    if num_groups > MOST_GROUPS:
        notes.append(f"the {MOST_GROUPS} largest of {num_groups:,} groups are measured")
    elif not num_groups:
        notes.append("the truth has no groups")
    return notes


def _curves(counts: ScoreCounts) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return the ROC (share of others and of viral contigs called) and recall and precision, strictest first."""
    if not (counts.viral and counts.others):
        return [], []
    viral_U, others_U = (called_U[::-1] for called_U in counts.from_score_up())
    called = viral_U + others_U > 0
    recall, share_U = viral_U / counts.viral, others_U / counts.others
    precision = viral_U[called] / (viral_U + others_U)[called]
    roc = [(0.0, 0.0), *zip(share_U.tolist(), recall.tolist(), strict=True)]
    return roc, list(zip(recall[called].tolist(), precision.tolist(), strict=True))


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


def _histogram(scored_C: DoubleArray, is_virus_C: BoolArray, *, are_probabilities: bool) -> dict[str, list[float]]:
    if not len(scored_C):
        return {"edges": [], "viral": [], "others": []}
    limits = (0.0, 1.0) if are_probabilities else (float(scored_C.min()), float(scored_C.max()))
    edges = np.histogram_bin_edges(scored_C, HISTOGRAM_BINS, limits)
    viral, others = (np.histogram(scored_C[mine], edges)[0] for mine in (is_virus_C, ~is_virus_C))
    return {"edges": edges.tolist(), "viral": viral.tolist(), "others": others.tolist()}


def _or_none(number: float) -> float | None:
    return float(number) if math.isfinite(number) else None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return round(value, _DIGITS) if math.isfinite(value) else None
    return value
