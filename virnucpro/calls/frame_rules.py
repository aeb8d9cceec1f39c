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
        """Return the scores of chunks from *scores*, float32 (frames, 2): P(other), P(virus), NaN for no embedding."""
        highest = np.full((len(frames_per_chunk), 2), np.nan, dtype=np.float32)
        has_frames = frames_per_chunk > 0
        if has_frames.any():
            starts = (np.cumsum(frames_per_chunk) - frames_per_chunk)[has_frames]
            highest[has_frames] = np.fmax.reduceat(scores, starts, axis=0)
        return cls(highest[:, 1], highest[:, 1] >= highest[:, 0])


def score_by_frames(p_virus: FloatArray, frames_per_contig: IntArray) -> DoubleArray:
    """Return P(virus) of each contig, float64, from its open frames, float32 (frames,); NaN without a scored frame."""
    bounded = np.clip(p_virus.astype(np.float64), LEAST_PROBABILITY, 1 - LEAST_PROBABILITY)
    log_odds = np.log(bounded) - np.log1p(-bounded)
    is_known, num_contigs = ~np.isnan(log_odds), len(frames_per_contig)
    contig_of_frame = np.repeat(np.arange(num_contigs), frames_per_contig)[is_known]
    sums = np.bincount(contig_of_frame, weights=log_odds[is_known], minlength=num_contigs)
    counts = np.bincount(contig_of_frame, minlength=num_contigs)
    means = np.full(num_contigs, np.nan)
    np.divide(sums, counts, out=means, where=counts > 0)
    return probability(means * np.sqrt(np.minimum(counts, MOST_FRAMES)))


def probability(log_odds_of_virus: DoubleArray) -> DoubleArray:
    """Return the probability of each log-odds; NaN stays NaN."""
    return 1 / (1 + np.exp(-log_odds_of_virus))
