"""
Scores of chunks and, for classifiers without a contig model, of contigs, from the scores of their frames.

A contig's log-odds are the mean log-odds of its open frames times the root of their number, as in Stouffer's method:
one frame scores as itself, and each agreeing frame adds certainty. From 16 frames on the factor stays 4, because errors
of a classifier hold for a whole genome: thousands of frames are not independent. Chunks without an open frame and
frames without a score are ignored.

Chosen among nine rules on 600 contigs of the first bundled classifier: rules that grow surer with the number of frames
beat plain means, which beat rules on the highest frame of a chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from virnucpro.arrays import BoolArray, DoubleArray, FloatArray, IntArray

MOST_FRAMES = 16
"""Further frames do not make a score surer."""
LEAST_PROBABILITY = 1e-6
"""Bound of a frame's P and of its complement: float32 may round to 1."""


class ChunkScores(NamedTuple):
    max_p_virus: FloatArray
    """float32 (chunks,): highest P(virus) of a chunk's frames; NaN where none has a score."""
    is_viral: BoolArray
    """bool (chunks,): whether it is at least the highest P(other), the original program's rule."""

    @property
    def is_scored(self) -> BoolArray:
        """Whether a frame has a score, bool (chunks,)."""
        scored: BoolArray = ~np.isnan(self.max_p_virus)
        return scored

    @classmethod
    def of(cls, scores: FloatArray, frames_per_chunk: IntArray) -> ChunkScores:
        """
        Return the scores of the chunks of some frames.

        Args:
            scores: float32 (frames, 2): P(other) and P(virus), NaN for a frame without an embedding.
            frames_per_chunk: int64 (chunks,).
        """
        highest = np.full((len(frames_per_chunk), 2), np.nan, dtype=np.float32)
        has_frames = frames_per_chunk > 0
        if has_frames.any():
            starts = (np.cumsum(frames_per_chunk) - frames_per_chunk)[has_frames]
            highest[has_frames] = np.fmax.reduceat(scores, starts, axis=0)
        return cls(highest[:, 1], highest[:, 1] >= highest[:, 0])


def score_contigs(p_virus: FloatArray, frames_per_chunk: IntArray, chunks_per_contig: IntArray) -> DoubleArray:
    """
    Return P(virus) of each contig, float64 (contigs,); NaN without a scored frame.

    Args:
        p_virus: float32 (frames,): P(virus) of each open frame, in order of chunks and contigs; NaN where unknown.
        frames_per_chunk: int64 (chunks,).
        chunks_per_contig: int64 (contigs,).
    """
    means, counts = mean_by_group(log_odds(p_virus), frames_per_contig(frames_per_chunk, chunks_per_contig))
    return probability(means * np.sqrt(np.minimum(counts, MOST_FRAMES)))


def frames_per_contig(frames_per_chunk: IntArray, chunks_per_contig: IntArray) -> IntArray:
    """Return the open frames of each contig, int64 (contigs,)."""
    ends: IntArray = np.append(0, np.cumsum(frames_per_chunk))[np.append(0, np.cumsum(chunks_per_contig))]
    return ends[1:] - ends[:-1]


def log_odds(p_virus: FloatArray) -> DoubleArray:
    """Return the natural log-odds of each probability, bounded by ``LEAST_PROBABILITY``; NaN stays NaN."""
    bounded = np.clip(p_virus.astype(np.float64), LEAST_PROBABILITY, 1 - LEAST_PROBABILITY)
    return np.log(bounded) - np.log1p(-bounded)


def probability(log_odds_of_virus: DoubleArray) -> DoubleArray:
    """Return the probability of each log-odds; NaN stays NaN."""
    return 1 / (1 + np.exp(-log_odds_of_virus))


def mean_by_group(values: DoubleArray, sizes: IntArray) -> tuple[DoubleArray, IntArray]:
    """
    Return the mean (NaN when empty) and the number of values of each group, ignoring NaN.

    Args:
        values: float64 (values,), group after group.
        sizes: int64 (groups,): values of each group.
    """
    groups = np.repeat(np.arange(len(sizes)), sizes)
    there = ~np.isnan(values)
    sums = np.bincount(groups[there], weights=values[there], minlength=len(sizes))
    counts = np.bincount(groups[there], minlength=len(sizes))
    means = np.full(len(sizes), np.nan)
    np.divide(sums, counts, out=means, where=counts > 0)
    return means, counts
