"""
From the scores of a contig's frames to the contig's own score, the P(virus) that contigs are ranked and called by.

The rule: a contig's log-odds of being viral are the mean of the log-odds of its open frames, times the root of their
number, and the score is the probability that belongs to them. So a contig of one frame scores as that frame does, and
each further frame of the same opinion makes it surer, as in Stouffer's way of combining tests. From 16 frames on the
factor stays 4: what the classifier gets wrong it gets wrong for the whole of a genome, so that thousands of frames are
not thousands of opinions. Chunks without an open frame have no say, nor have frames without a score.

It is for classifiers without a contig model, such as the published ones. It was chosen among nine by 600 contigs of the
first bundled classifier: rules that grow surer with the number of frames were better than plain means, which were
better than what looks at the highest frame of a chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    FloatArray = np.ndarray[Any, np.dtype[np.float32]]
    DoubleArray = np.ndarray[Any, np.dtype[np.float64]]
    IntArray = np.ndarray[Any, np.dtype[np.int64]]

RULE = "frames' mean log-odds times the root of their number, at most 4"
"""What cards call the rule."""

MOST_FRAMES = 16
"""Frames after which further ones make a score no surer."""
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
    means, counts = mean_by_group(log_odds(p_virus), frames_per_contig(frames_per_chunk, chunks_per_contig))
    return probability(means * np.sqrt(np.minimum(counts, MOST_FRAMES)))


def frames_per_contig(frames_per_chunk: IntArray, chunks_per_contig: IntArray) -> IntArray:
    """Return the open frames of each contig, int64 (contigs,)."""
    ends: IntArray = np.append(0, np.cumsum(frames_per_chunk))[np.append(0, np.cumsum(chunks_per_contig))]
    return ends[1:] - ends[:-1]


def log_odds(p_virus: FloatArray) -> DoubleArray:
    """Return the natural log-odds of each probability, within the bounds; NaN stays NaN."""
    bounded = np.clip(p_virus.astype(np.float64), LEAST_PROBABILITY, 1 - LEAST_PROBABILITY)
    return np.log(bounded) - np.log1p(-bounded)


def probability(log_odds_of_virus: DoubleArray) -> DoubleArray:
    """Return the probability of each log-odds; NaN stays NaN."""
    return 1 / (1 + np.exp(-log_odds_of_virus))


def mean_by_group(values: DoubleArray, sizes: IntArray) -> tuple[DoubleArray, IntArray]:
    """
    Return the mean of neighbouring values, group by group.

    Args:
        values: float64 (values,); NaN is left out.
        sizes: int64 (groups,): values of each group, which follow each other.

    Returns:
        float64 (groups,): NaN where a group has no value; and int64 (groups,): how many it has.
    """
    groups = np.repeat(np.arange(len(sizes)), sizes)
    there = ~np.isnan(values)
    sums = np.bincount(groups[there], weights=values[there], minlength=len(sizes))
    counts = np.bincount(groups[there], minlength=len(sizes))
    means = np.full(len(sizes), np.nan)
    np.divide(sums, counts, out=means, where=counts > 0)
    return means, counts
