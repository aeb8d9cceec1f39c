"""Scores of chunks from the scores of their frames."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    IntArray = np.ndarray[Any, np.dtype[np.int64]]
    FloatArray = np.ndarray[Any, np.dtype[np.float32]]
    BoolArray = np.ndarray[Any, np.dtype[np.bool_]]


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
