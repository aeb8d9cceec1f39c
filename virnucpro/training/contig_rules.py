"""
The rules that a contig's score could be made by, and what each is worth on contigs of known kind.

Every rule takes what ``pipeline.contig_rule.score_contigs`` takes and gives a number between 0 and 1 a contig. A contig
without an open frame has no score; it counts as the least viral of all. Intervals are percentiles of 1,000 bootstrap
samples of the contigs, viral and other ones drawn apart. Legend: C contigs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from virnucpro.pipeline.contig_rule import (
    RULE,
    frames_per_contig,
    log_odds,
    mean_by_group,
    probability,
    score_contigs,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from virnucpro.pipeline.contig_rule import DoubleArray, FloatArray, IntArray

    BoolArray = np.ndarray[Any, np.dtype[np.bool_]]
    Rule = Callable[[FloatArray, IntArray, IntArray], DoubleArray]

LENGTH_CLASSES = {"300 to 500 nt": (300, 500), "800 to 1,000 nt": (501, 1000), "2,000 nt and more": (1001, 10**9)}
"""Nucleotides, both ends included, of the contigs that are told apart."""
FALSE_POSITIVE_SHARE = 0.01
BOOTSTRAP_SAMPLES = 1000


def _mean_of_probabilities(p_virus: FloatArray, frames: IntArray, chunks: IntArray) -> DoubleArray:
    return mean_by_group(p_virus.astype(np.float64), frames_per_contig(frames, chunks))[0]


def _mean_log_odds(p_virus: FloatArray, frames: IntArray, chunks: IntArray) -> DoubleArray:
    return probability(mean_by_group(log_odds(p_virus), frames_per_contig(frames, chunks))[0])


def _root_of_frames(p_virus: FloatArray, frames: IntArray, chunks: IntArray) -> DoubleArray:
    means, counts = mean_by_group(log_odds(p_virus), frames_per_contig(frames, chunks))
    return probability(means * np.sqrt(counts))


def _mean_log_odds_of_chunks(p_virus: FloatArray, frames: IntArray, chunks: IntArray) -> DoubleArray:
    return probability(mean_by_group(_chunk_log_odds(p_virus, frames), chunks)[0])


def _root_of_chunks(p_virus: FloatArray, frames: IntArray, chunks: IntArray) -> DoubleArray:
    means, counts = mean_by_group(_chunk_log_odds(p_virus, frames), chunks)
    return probability(means * np.sqrt(counts))


def _shrunken(p_virus: FloatArray, frames: IntArray, chunks: IntArray) -> DoubleArray:
    """The mean log-odds of chunks with one more chunk of no evidence."""
    means, counts = mean_by_group(_chunk_log_odds(p_virus, frames), chunks)
    return probability(means * counts / (counts + 1))


def _mean_of_highest(p_virus: FloatArray, frames: IntArray, chunks: IntArray) -> DoubleArray:
    return mean_by_group(_highest(p_virus, frames), chunks)[0]


def _share_of_viral_chunks(p_virus: FloatArray, frames: IntArray, chunks: IntArray) -> DoubleArray:
    """Of those with an open frame; one is viral when its highest P(virus) is not below its highest P(other)."""
    highest, highest_other = _highest(p_virus, frames), _highest(1 - p_virus, frames)
    viral = np.where(np.isnan(highest), np.nan, (highest >= highest_other).astype(np.float64))
    return mean_by_group(viral, chunks)[0]


def _chunk_log_odds(p_virus: FloatArray, frames: IntArray) -> DoubleArray:
    """Return the mean log-odds of each chunk's frames, float64 (chunks,)."""
    return mean_by_group(log_odds(p_virus), frames)[0]


def _highest(p_virus: FloatArray, frames: IntArray) -> DoubleArray:
    """Return the highest P of each chunk, float64 (chunks,); NaN where it has no frame with a score."""
    result = np.full(len(frames), -np.inf)
    np.fmax.at(result, np.repeat(np.arange(len(frames)), frames), p_virus)
    return np.where(np.isneginf(result), np.nan, result)


RULES: dict[str, Rule] = {
    RULE: score_contigs,
    "frames' mean log-odds times the root of their number": _root_of_frames,
    "frames' mean log-odds": _mean_log_odds,
    "frames' mean P": _mean_of_probabilities,
    "chunks' mean log-odds times the root of their number": _root_of_chunks,
    "chunks' mean log-odds times n / (n + 1)": _shrunken,
    "chunks' mean log-odds": _mean_log_odds_of_chunks,
    "chunks' mean highest P": _mean_of_highest,
    "share of viral chunks": _share_of_viral_chunks,
}
"""By name; the first one is the one in use."""


def auroc(scores_C: DoubleArray, is_virus_C: BoolArray) -> float:
    """Return the probability that a viral contig scores above another one, a tie counting half."""
    _, places, counts = np.unique(scores_C, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    viral, others = int(is_virus_C.sum()), int((~is_virus_C).sum())
    return float((ranks[is_virus_C].sum() - viral * (viral + 1) / 2) / (viral * others))


def threshold_at(scores_C: DoubleArray, is_virus_C: BoolArray, false_positive_share: float) -> float:
    """Return the lowest threshold from which up at most that share of the other contigs scores."""
    others = np.sort(scores_C[~is_virus_C])[::-1]
    allowed = int(false_positive_share * len(others))
    return float(np.nextafter(others[allowed], np.inf))


def recall_at(scores_C: DoubleArray, is_virus_C: BoolArray, false_positive_share: float) -> float:
    """Return the share of viral contigs that score from that threshold up."""
    return float((scores_C[is_virus_C] >= threshold_at(scores_C, is_virus_C, false_positive_share)).mean())


def ranked(scores_C: DoubleArray) -> DoubleArray:
    """Return the scores with those of contigs without an open frame below all others."""
    return np.where(np.isnan(scores_C), -1.0, scores_C)


def with_interval(measure: Callable[[IntArray], float], is_virus_C: BoolArray, *, seed: int) -> list[float]:
    """
    Measure something on all contigs, and how far chance may have moved it.

    Args:
        measure: Takes numbers of contigs, int64, some of them more than once.
        is_virus_C: What the contigs are.
        seed: Seed of the samples.

    Returns:
        The measure, and the 2.5 and 97.5 percentiles of its bootstrap samples.
    """
    random = np.random.default_rng(seed)
    viral, others = np.flatnonzero(is_virus_C), np.flatnonzero(~is_virus_C)
    samples = [
        measure(np.concatenate([random.choice(viral, len(viral)), random.choice(others, len(others))]))
        for _ in range(BOOTSTRAP_SAMPLES)
    ]
    low, high = np.percentile(samples, [2.5, 97.5])
    return [round(float(x), 4) for x in (measure(np.arange(len(is_virus_C))), low, high)]
