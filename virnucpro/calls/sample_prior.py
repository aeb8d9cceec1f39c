"""
The share of viruses in a sample, estimated from its scores, and what follows from it for each score.

A contig model's P(virus) s is calibrated for as many viral as non-viral contigs. If a share p of the contigs is viral,
Bayes' rule gives the posterior p s / (p s + (1 - p)(1 - s)). The share is the one of greatest likelihood, the fixed
point of the EM algorithm of Saerens, Latinne and Decaestecker 2002 ("Adjusting the outputs of a classifier to new a
priori probabilities"): the log-likelihood, sum of log(p s + (1 - p)(1 - s)), is concave in p, so bisection of its slope
finds the same value. The interval is of the likelihood ratio, which covers the drawing of the sample, and as much wider
as calibration is wrong on other kinds of genomes (``_CALIBRATION``).

Scores are counted in bins, which makes memory independent of their number, and results of their order. Legend: B bins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from virnucpro.calls.frame_rules import probability

if TYPE_CHECKING:
    from collections.abc import Callable

    from virnucpro.arrays import DoubleArray, FloatArray, IntArray

_BINS_PER_UNIT = 100
_MOST_LOG_ODDS = 20.0
"""Float32 has no P below 1 with larger log-odds than 17."""
_SCORES_AT_ONCE = 1 << 20
_HALF_CHI_SQUARE = 1.920729
"""Half the 95 % quantile of chi-square with one degree of freedom."""
_HALVINGS = 60
_CALIBRATION = 0.4
"""Error of the share in samples of known share, in log-odds (``benchmarks/samples.py``)."""


_STEPS = np.arange(-_MOST_LOG_ODDS * _BINS_PER_UNIT, _MOST_LOG_ODDS * _BINS_PER_UNIT + 1)
_EDGES = probability(_STEPS / _BINS_PER_UNIT)
"""Bin b holds the scores from edge b - 1 to below edge b."""
_MIDDLES_B = probability((np.append(_STEPS, _STEPS[-1] + 1) - 0.5) / _BINS_PER_UNIT)


@dataclass(frozen=True)
class SamplePrior:
    """The share of viruses in a sample, and the expected false discovery rate at each score."""

    share: float
    """Of the contigs with a score, from 0 to 1."""
    interval: tuple[float, float] | None
    """95 % interval; None for a share that the user gave."""
    counts_B: IntArray
    """int64 (B,): contigs by score, as ``count_scores`` returns them."""

    def posteriors(self, scores: DoubleArray) -> DoubleArray:
        """Return P(virus) in this sample of contigs with these *scores*, float64 (contigs,); NaN stays NaN."""
        return _moved(scores, self.share)

    def score_of(self, posterior: float) -> float:
        return float(_moved(np.array(posterior), 1 - self.share))

    def fdrs(self, scores: DoubleArray) -> DoubleArray:
        """Return the expected share of non-viral contigs at or above each score; NaN where there is no contig."""
        fdrs: DoubleArray = self._fdr_of_bins[np.searchsorted(_EDGES, scores, side="right")]
        return np.where(np.isnan(scores), np.nan, fdrs)

    def fdr(self, score: float) -> float | None:
        """Return the expected share of non-viral contigs at or above *score*; None where there is no contig."""
        fdr = float(self.fdrs(np.array(score)))
        return None if math.isnan(fdr) else fdr

    def lowest_score(self, most_fdr: float) -> float | None:
        """Return the lowest score with an expected false discovery rate of at most *most_fdr*; None if none has."""
        good = np.flatnonzero((self._fdr_of_bins <= most_fdr) & (self.counts_B > 0))
        if not len(good):
            return None
        return float(_EDGES[good[0] - 1]) if good[0] else 0.0

    @cached_property
    def _fdr_of_bins(self) -> DoubleArray:
        """Expected false discovery rate from the lower edge of each bin up; NaN where there is no contig."""
        viral_B, other_B = self.share * _MIDDLES_B, (1 - self.share) * (1 - _MIDDLES_B)
        others_B = self.counts_B * other_B / (viral_B + other_B)
        above_B, others_above_B = (np.cumsum(of[::-1])[::-1] for of in (self.counts_B, others_B))
        fdr_B: DoubleArray = np.full(len(above_B), np.nan)
        np.divide(others_above_B, above_B, out=fdr_B, where=above_B > 0)
        return fdr_B


def count_scores(scores: FloatArray) -> IntArray:
    """Count *scores*, float32 (contigs,), in bins of log-odds, int64 (B,); NaN, of contigs without one, are ignored."""
    counts_B = np.zeros(len(_MIDDLES_B), dtype=np.int64)
    for start in range(0, len(scores), _SCORES_AT_ONCE):
        some = scores[start : start + _SCORES_AT_ONCE].astype(np.float64)
        bins = np.searchsorted(_EDGES, some[~np.isnan(some)], side="right")
        counts_B += np.bincount(bins, minlength=len(counts_B))
    return counts_B


def estimate_prior(counts_B: IntArray) -> SamplePrior:
    """Return the share of viruses of greatest likelihood, with its 95 % interval; there must be a score."""
    used = np.flatnonzero(counts_B)
    contigs, s = counts_B[used], _MIDDLES_B[used]

    def likelihood(share: float) -> float:
        return float(contigs @ np.log(share * s + (1 - share) * (1 - s)))

    def slope(share: float) -> float:
        return float(contigs @ ((2 * s - 1) / (share * s + (1 - share) * (1 - s))))

    share = _crossing(slope, 0.0, 1.0)
    least = likelihood(share) - _HALF_CHI_SQUARE
    low = 0.0 if likelihood(0.0) >= least else _crossing(lambda p: least - likelihood(p), 0.0, share)
    high = 1.0 if likelihood(1.0) >= least else _crossing(lambda p: likelihood(p) - least, share, 1.0)
    low, high = _moved(np.array([low, high]), probability(np.array([-_CALIBRATION, _CALIBRATION])))
    return SamplePrior(share, (float(low), float(high)), counts_B)


LEAST_VIRAL_SCORE = 0.1
"""No contig with a lower score is called viral, however many viruses there seem to be: where half of all contigs are
viral, nine in ten with this score are not, and a share near one is within the errors of the calibration."""


class CallLimits(NamedTuple):
    """The scores at which calls change; in between is undecided."""

    virus_from: float
    """Least score of a viral contig; infinity: none is viral."""
    not_virus_below: float


def call_limits(sample: SamplePrior | None, threshold: float, *, fdr: float | None = None) -> CallLimits:
    """
    Return the limits of the calls in a sample.

    Args:
        sample: None: its share of viruses is not known, so scores stand for posteriors, and *fdr* has no effect.
        threshold: Least posterior of a viral contig; below the smaller of it and its complement, a contig is not viral.
        fdr: Most expected false discovery rate of viral calls, in place of the threshold.
    """
    lower = min(threshold, 1 - threshold)
    if sample is None:
        return CallLimits(threshold, lower)
    lowest = sample.score_of(threshold) if fdr is None else sample.lowest_score(fdr)
    virus_from = math.inf if lowest is None else max(lowest, LEAST_VIRAL_SCORE)
    return CallLimits(virus_from, min(virus_from, sample.score_of(lower)))


def _crossing(falling: Callable[[float], float], low: float, high: float) -> float:
    """Return where a *falling* function crosses zero, or the end of the range that is nearer to it."""
    if falling(low) <= 0:
        return low
    if falling(high) >= 0:
        return high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return (low + high) / 2


def _moved(p: DoubleArray, share: float | DoubleArray) -> DoubleArray:
    """Move probabilities from the prior of one half to *share*."""
    viral, other = share * p, (1 - share) * (1 - p)
    moved: DoubleArray = np.full(p.shape, 0.5)
    np.divide(viral, viral + other, out=moved, where=viral + other != 0)
    return moved
