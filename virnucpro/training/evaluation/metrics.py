"""
Measures of scores on contigs of known label, and their bootstrap intervals.

Contigs are counted by distinct score once, so ties count as ties in every measure and a bootstrap sample costs no
sorting. NaN is "no score": such contigs rank below all others and are never called. A measure without meaning on the
given contigs, such as AUROC where all are viral, is NaN. Legend: C contigs; U distinct scores, lowest first, "no score"
before them; G genomes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from virnucpro.arrays import BoolArray, DoubleArray, IntArray

FALSE_POSITIVE_SHARE = 0.01
"""Share of the non-viral contigs that a strict threshold lets pass at most."""
CALIBRATION_BINS = 10
"""Bins of equal numbers of contigs."""
GROUP_CALIBRATION_BINS = 5
"""
Bins of a group. By chance alone, perfectly calibrated scores of 25 viral and 281 other contigs, weighted half and half,
have an error of 0.06 in five bins and 0.10 in ten (normal log-odds, 1.5 standard deviations apart).
"""
BOOTSTRAP_SAMPLES = 1000
_INTERVAL_PERCENTILES = (2.5, 97.5)
_NORMAL_95 = 1.959963984540054
"""97.5th percentile of the standard normal distribution."""


@dataclass(frozen=True)
class Interval:
    """A measure on all contigs, and its 95 % interval; NaN without meaning."""

    value: float
    low: float
    """2.5th percentile of the bootstrap samples; *high* is the 97.5th."""
    high: float


@dataclass(frozen=True)
class CalibrationBin:
    """Contigs with similar scores."""

    contigs: int
    mean_score: float
    viral_share: float
    low: float
    """*low* and *high*: Wilson 95 % interval of *viral_share*, wide where contigs are few or all alike."""
    high: float


class ScoreCounts:
    """
    Viral and other contigs at each distinct score, from which all measures are computed.

    *scores_U*, float64, ascends; the first one is NaN and stands for contigs without a score. Some measures take a
    *prevalence*, the share of viral contigs in the population that is asked about, above 0 and below 1: the classes are
    then weighted to it, as King and Zeng weight a sample by outcome (Logistic Regression in Rare Events Data,
    Political Analysis 9:137-163, 2001). None: as counted.
    """

    def __init__(self, scores_U: DoubleArray, viral_U: IntArray, others_U: IntArray) -> None:
        self.scores_U = scores_U
        self.viral_U = viral_U
        self.others_U = others_U
        self.viral = int(viral_U.sum())
        self.others = int(others_U.sum())

    def auroc(self) -> float:
        """Return the probability that a viral contig scores above another, ties counting half; NaN for one class."""
        if not (self.viral and self.others):
            return np.nan
        others_below_U = np.cumsum(self.others_U) - self.others_U
        return float((self.viral_U * (others_below_U + self.others_U / 2)).sum() / self.viral / self.others)

    def auprc(self, prevalence: float | None = None) -> float:
        """Return the average precision: each score's precision, weighted by the recall it adds; NaN for one class."""
        if not (self.viral and self.others):
            return np.nan
        viral_from_U, others_from_U = self.from_score_up()
        called_U = viral_from_U + others_from_U * weight_of_others(self.viral, self.others, prevalence)
        called_U[called_U == 0] = 1  # by none of a bootstrap sample: adds nothing
        return float((viral_from_U / called_U * self.viral_U).sum() / self.viral)

    def f1(self, threshold: float, prevalence: float | None = None) -> float:
        """Return the F1 of calling viral from *threshold* up; NaN without viral contigs, or without a threshold."""
        if np.isnan(threshold) or not self.viral:
            return np.nan
        viral_called, others_called = self.called(threshold)
        others_called *= weight_of_others(self.viral, self.others, prevalence)
        return 2 * viral_called / (viral_called + others_called + self.viral)

    def precision(self, threshold: float, prevalence: float | None = None) -> float:
        """Return the share of viral ones among contigs from *threshold* up; NaN for one class, or if none is called."""
        if np.isnan(threshold) or not (self.viral and self.others):
            return np.nan
        viral_called, others_called = self.called(threshold)
        others_called *= weight_of_others(self.viral, self.others, prevalence)
        return viral_called / (viral_called + others_called) if viral_called + others_called else np.nan

    def called(self, threshold: float) -> tuple[float, float]:
        """Return the numbers of viral and of other contigs that score from *threshold* up."""
        called_U = self.scores_U >= threshold
        return int(self.viral_U[called_U].sum()), int(self.others_U[called_U].sum())

    def recall(self, threshold: float) -> float:
        """Return the share of viral contigs that score from *threshold* up; NaN without any, or without a threshold."""
        return np.nan if np.isnan(threshold) or not self.viral else self.called(threshold)[0] / self.viral

    def false_positive_share(self, threshold: float) -> float:
        """Return the share of other contigs that score from *threshold* up; NaN without any, or without a threshold."""
        return np.nan if np.isnan(threshold) or not self.others else self.called(threshold)[1] / self.others

    def strict_threshold(self, share: float = FALSE_POSITIVE_SHARE) -> float:
        """Return the lowest threshold that at most *share* of the other contigs reach; NaN without other contigs."""
        if not self.others:
            return np.nan
        _, others_from_U = self.from_score_up()
        allowed = int(share * self.others + 1e-9)  # 0.29 * 100 is a little less than 29
        too_low = np.flatnonzero(others_from_U > allowed)
        highest = self.scores_U[too_low[-1]] if len(too_low) else np.nan
        return -np.inf if np.isnan(highest) else float(np.nextafter(highest, np.inf))

    def strict_recall(self, share: float = FALSE_POSITIVE_SHARE) -> float:
        """Return the share of viral contigs that reach that threshold; NaN for one class."""
        return self.recall(self.strict_threshold(share)) if self.viral and self.others else np.nan

    def calibration_bins(self) -> list[CalibrationBin]:
        """
        Return the reliability curve over bins of equal numbers of contigs, lowest scores first.

        Contigs without a score are skipped; those of one score stay in one bin (by their middle), and bins left empty
        are not returned.
        """
        sums = self._bin_sums()
        return [
            CalibrationBin(int(contigs), float(score / contigs), float(viral / contigs), *_wilson(viral, contigs))
            for contigs, score, viral in zip(*sums, strict=True)
            if contigs
        ]

    def calibration_error(self, prevalence: float | None = None, bins: int = CALIBRATION_BINS) -> float:
        """
        Return the mean distance between score and share of viral contigs over bins of equal weight.

        NaN without scores; with a prevalence, also if contigs of one class only have scores.
        """
        if prevalence is not None and not (self.viral_U[1:].any() and self.others_U[1:].any()):
            return np.nan
        contigs_B, scores_B, viral_B = self._bin_sums(prevalence, bins)
        return float(np.abs(scores_B - viral_B).sum() / contigs_B.sum()) if contigs_B.sum() else np.nan

    def _bin_sums(
        self, prevalence: float | None = None, bins: int = CALIBRATION_BINS
    ) -> tuple[DoubleArray, DoubleArray, DoubleArray]:
        """Return contigs, sum of scores and viral contigs of each bin, other contigs weighted."""
        scores_U, viral_U, others_U = self.scores_U[1:], self.viral_U[1:], self.others_U[1:]
        contigs_U = viral_U + others_U * weight_of_others(int(viral_U.sum()), int(others_U.sum()), prevalence)
        middles_U = np.cumsum(contigs_U) - contigs_U / 2
        bins_U = (bins * middles_U / (contigs_U.sum() or 1)).astype(np.int64)
        # a score without contigs may fall past the last bin, and adds nothing
        bins_U = np.minimum(bins_U, bins - 1)
        contigs_B, scores_B, viral_B = (
            np.bincount(bins_U, weights=weights_U, minlength=bins).astype(np.float64, copy=False)
            for weights_U in (contigs_U, contigs_U * scores_U, viral_U)
        )
        return contigs_B, scores_B, viral_B

    def from_score_up(self) -> tuple[IntArray, IntArray]:
        """Return viral and other contigs from each score up."""
        return np.cumsum(self.viral_U[::-1])[::-1], np.cumsum(self.others_U[::-1])[::-1]


class RankedContigs:
    """Contigs sorted once, then counted for every bootstrap sample; NaN is no score."""

    def __init__(self, scores_C: DoubleArray, is_virus_C: BoolArray) -> None:
        scored_C = ~np.isnan(scores_C)
        distinct, places = np.unique(scores_C[scored_C], return_inverse=True)
        self.scores_U = np.append(np.nan, distinct)
        self.places_C = np.zeros(len(scores_C), dtype=np.int64)
        self.places_C[scored_C] = places + 1
        self.is_virus_C = is_virus_C

    def counts(self, drawn: IntArray | None = None) -> ScoreCounts:
        """Return the counts of all contigs, or of a sample: positions, some of them more than once."""
        places = self.places_C if drawn is None else self.places_C[drawn]
        is_virus = self.is_virus_C if drawn is None else self.is_virus_C[drawn]
        viral_U, others_U = (np.bincount(places[mine], minlength=len(self.scores_U)) for mine in (is_virus, ~is_virus))
        return ScoreCounts(self.scores_U, viral_U, others_U)


def counts_of(scores_C: DoubleArray, is_virus_C: BoolArray) -> ScoreCounts:
    """Return the counts of contigs that are ranked once."""
    return RankedContigs(scores_C, is_virus_C).counts()


def weight_of_others(viral: int, others: int, prevalence: float | None) -> float:
    """Return the weight of each contig that is not viral, where a viral one weighs 1, at that share of viral ones."""
    return 1.0 if prevalence is None or not others else viral / others * (1 - prevalence) / prevalence


def bootstrap(
    measures: Callable[[IntArray], Mapping[str, float]],
    is_virus_C: BoolArray,
    *,
    genomes_C: IntArray | None = None,
    seed: int,
    samples: int = BOOTSTRAP_SAMPLES,
) -> dict[str, Interval]:
    """
    Return each measure on all contigs, with the 2.5th and 97.5th percentiles of its bootstrap samples.

    Genomes are drawn with replacement, each with all its contigs (the cluster bootstrap: Field and Welsh, Bootstrapping
    clustered data, J. R. Stat. Soc. B 69:369-390, 2007). *genomes_C* numbers each contig's genome; without it, and in a
    class of one genome, which could not vary, contigs are drawn. Those of viral and of other contigs are drawn
    separately, so every sample has as many of each as the input. *measures* takes positions of contigs (int64, some
    more than once) and returns values by name; two scores of the same contigs are compared by a measure that is their
    difference. Samples in which a measure is NaN are skipped.
    """
    random = np.random.default_rng(seed)
    contigs = np.arange(len(is_virus_C))
    of_genomes = contigs if genomes_C is None else genomes_C
    classes = [_Genomes(mine, of_genomes[mine]) for mine in (contigs[is_virus_C], contigs[~is_virus_C])]
    values = measures(contigs)
    drawn: dict[str, list[float]] = {name: [] for name in values}
    for _ in range(samples):
        for name, value in measures(np.concatenate([one.draw(random) for one in classes])).items():
            drawn[name].append(value)
    found = {name: [value for value in drawn[name] if not np.isnan(value)] for name in values}
    ends = {name: np.percentile(found[name] or [np.nan], _INTERVAL_PERCENTILES) for name in values}
    return {name: Interval(float(value), *map(float, ends[name])) for name, value in values.items()}


class _Genomes:
    """Positions of the contigs of one class, genome by genome."""

    def __init__(self, contigs_C: IntArray, genomes_C: IntArray) -> None:
        if len(np.unique(genomes_C)) == 1:
            genomes_C = contigs_C
        self.contigs_C = contigs_C[np.argsort(genomes_C, kind="stable")]
        _, self.contigs_G = np.unique(genomes_C, return_counts=True)
        self.starts_G = np.cumsum(self.contigs_G) - self.contigs_G

    def draw(self, random: np.random.Generator) -> IntArray:
        """Return the contigs of as many genomes as there are, drawn with replacement."""
        if not len(self.contigs_G):
            return self.contigs_C
        drawn = random.integers(0, len(self.contigs_G), len(self.contigs_G))
        counts = self.contigs_G[drawn]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        positions: IntArray = self.contigs_C[np.repeat(self.starts_G[drawn], counts) + within]
        return positions


def _wilson(successes: float, trials: float) -> tuple[float, float]:
    """Return the Wilson score interval of a share."""
    share, square = successes / trials, _NORMAL_95**2
    middle = (share + square / (2 * trials)) / (1 + square / trials)
    half = _NORMAL_95 / (1 + square / trials) * np.sqrt(share * (1 - share) / trials + square / (4 * trials**2))
    return max(0.0, float(middle - half)), min(1.0, float(middle + half))
