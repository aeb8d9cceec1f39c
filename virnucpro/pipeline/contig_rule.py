"""
From the scores of a contig's frames to the contig's own score, the P(virus) that contigs are ranked and called by.

The rule: a chunk's log-odds of being viral are the mean of those of its open frames, a contig's are the mean of those
of its chunks, and the score is the probability that belongs to them. Chunks without an open frame have no say, nor have
frames without a score.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    FloatArray = np.ndarray[Any, np.dtype[np.float32]]
    DoubleArray = np.ndarray[Any, np.dtype[np.float64]]
    IntArray = np.ndarray[Any, np.dtype[np.int64]]

RULE = "mean log-odds of chunks"
"""What cards call the rule."""

LEAST_PROBABILITY = 1e-6
"""A frame's P is taken to be at least this and at the most one minus it: float32 may say 1."""


def score_contigs(p_virus: FloatArray, frames_per_chunk: IntArray, chunks_per_contig: IntArray) -> DoubleArray:
    """
    Score contigs.

    Args:
        p_virus: float32 (frames,): P(virus) of each open frame, chunk by chunk, contig by contig; NaN where unknown.
        frames_per_chunk: int64 (chunks,): open frames of each chunk.
        chunks_per_contig: int64 (contigs,): chunks of each contig.

    Returns:
        float64 (contigs,): P(virus) of each contig; NaN where no frame of it has a score.
    """
    log_odds_of_chunks = mean_by_group(log_odds(p_virus), frames_per_chunk)
    return probability(mean_by_group(log_odds_of_chunks, chunks_per_contig))


def log_odds(p_virus: FloatArray) -> DoubleArray:
    """Return the natural log-odds of each probability, within the bounds; NaN stays NaN."""
    bounded = np.clip(p_virus.astype(np.float64), LEAST_PROBABILITY, 1 - LEAST_PROBABILITY)
    return np.log(bounded) - np.log1p(-bounded)


def probability(log_odds_of_virus: DoubleArray) -> DoubleArray:
    """Return the probability of each log-odds; NaN stays NaN."""
    return 1 / (1 + np.exp(-log_odds_of_virus))


def mean_by_group(values: DoubleArray, sizes: IntArray) -> DoubleArray:
    """
    Return the mean of neighbouring values, group by group.

    Args:
        values: float64 (values,); NaN is left out.
        sizes: int64 (groups,): values of each group, which follow each other.

    Returns:
        float64 (groups,): NaN where a group has no value.
    """
    groups = np.repeat(np.arange(len(sizes)), sizes)
    there = ~np.isnan(values)
    sums = np.bincount(groups[there], weights=values[there], minlength=len(sizes))
    counts = np.bincount(groups[there], minlength=len(sizes))
    means = np.full(len(sizes), np.nan)
    np.divide(sums, counts, out=means, where=counts > 0)
    return means
