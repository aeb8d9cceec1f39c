"""The scores written by ``contig_scores``, read batch by batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from virnucpro.calls.viral_regions import LONG_CONTIG_NT
from virnucpro.data.frames import chunks_per_contig
from virnucpro.errors import ResultError

if TYPE_CHECKING:
    from pathlib import Path

    from virnucpro.calls.frame_order import ContigBatch, FrameOrder
    from virnucpro.run_layout import PredictionLayout

    FloatArray = np.ndarray[Any, np.dtype[np.float32]]


class ScoresOfBatch(NamedTuple):
    """The contig model's scores of a batch of contigs."""

    contigs: FloatArray
    """float32 (contigs,): NaN without a score."""
    windows: FloatArray
    """float32 (chunks of its long contigs,): likewise."""


class ModelScores:
    """The contig model's scores, batch by batch."""

    def __init__(self, order: FrameOrder, layout: PredictionLayout) -> None:
        lengths = order.index.lengths
        long_contigs = lengths[: np.count_nonzero(lengths[:] >= LONG_CONTIG_NT)]  # the longest come first
        num_windows = int(chunks_per_contig(long_contigs, order.chunk_nt, order.min_nt).sum())
        self._contigs = _map(layout.contig_scores, len(order.index))
        self._windows = _map(layout.window_scores, num_windows)
        self._next_contig = self._next_window = 0

    def of(self, batch: ContigBatch) -> ScoresOfBatch:
        """Return the scores of the next batch."""
        contig, window = self._next_contig, self._next_window
        self._next_contig += len(batch.contig_ids)
        self._next_window += int(batch.chunks_per_contig[batch.lengths_nt >= LONG_CONTIG_NT].sum())
        return ScoresOfBatch(
            np.array(self._contigs[contig : self._next_contig]), np.array(self._windows[window : self._next_window])
        )


def _map(path: Path, expected: int) -> FloatArray:
    """Map float32 (expected,)."""
    found = path.stat().st_size
    if found != 4 * expected:
        raise ResultError(path, f"has {found} bytes, {expected} scores take {4 * expected}")
    return np.memmap(path, np.float32, "r") if expected else np.empty(0, dtype=np.float32)
