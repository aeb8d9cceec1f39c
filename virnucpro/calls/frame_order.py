"""
The frames of a prediction in input order, contig by contig and chunk by chunk, and the embeddings joined to them.

The order follows from the index of the contigs and one byte for each chunk of an embedded contig; no stage parses
another's output. Ids of frames are recomputed, and every id in a file of embeddings is compared with the expected one:
a run that lost sequences has fewer rows, a row under another id is never used, and surplus rows are an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from virnucpro.arrays import mapped
from virnucpro.data.frames import FRAMES, chunk_bounds, chunks_per_contig
from virnucpro.errors import ResultError
from virnucpro.store import schema

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from virnucpro.arrays import BoolArray, ByteArray, FloatArray, IntArray
    from virnucpro.data.sequence_index import SequenceIndex

CHUNKS_AT_ONCE = 1 << 15
"""Most chunks of a batch of several contigs."""
CONTIGS_AT_ONCE = 1 << 14
"""Most contigs of a batch."""

_FRAME_NAMES = [tuple(name for f, name in enumerate(FRAMES) if kept >> f & 1) for kept in range(1 << len(FRAMES))]
_FRAME_COUNTS = np.array([len(names) for names in _FRAME_NAMES], dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class ContigBatch:
    """Neighbouring contigs of the input and their chunks."""

    positions: IntArray
    """int64 (contigs,): in the contig index."""
    contig_ids: list[str]
    lengths_nt: IntArray
    chunks_per_contig: IntArray
    is_embedded: BoolArray
    """bool (contigs,): whether its frames are embedded."""
    kept_frames: ByteArray
    """uint8 (chunks,): one bit for each frame; 0 in contigs that are not embedded."""

    @property
    def frames_per_chunk(self) -> IntArray:
        """int64 (chunks,)."""
        counts: IntArray = _FRAME_COUNTS[self.kept_frames]
        return counts

    def open_chunk_ids(self) -> list[str]:
        return [
            f"{contig_id}_chunk_{number}"
            for contig_id, kept in self._kept_by_contig()
            for number, frames in enumerate(kept, start=1)
            if frames
        ]

    def frame_ids(self) -> list[str]:
        return [
            f"{contig_id}_chunk_{number}{name}"
            for contig_id, kept in self._kept_by_contig()
            for number, frames in enumerate(kept, start=1)
            if frames
            for name in _FRAME_NAMES[frames]
        ]

    def chunk_bounds(self, contig: int, chunk_nt: int) -> tuple[IntArray, IntArray]:
        """Return starts and ends of the chunks of a contig of the batch, 0-based nt."""
        bounds: tuple[IntArray, IntArray] = chunk_bounds(int(self.lengths_nt[contig]), chunk_nt)
        return bounds

    def _kept_by_contig(self) -> Iterator[tuple[str, list[int]]]:
        kept = self.kept_frames.tolist()
        end = 0
        for contig_id, num_chunks in zip(self.contig_ids, self.chunks_per_contig.tolist(), strict=True):
            start, end = end, end + num_chunks
            yield contig_id, kept[start:end]


class FrameOrder:
    """
    The contigs of a prediction in input order, with their chunks and kept frames.

    *open_frames*: file of ``write_fragments``, one byte a chunk; None where no contig is embedded. *is_embedded*: bool
    (contigs,), in input order; None where all are.
    """

    def __init__(
        self,
        index: SequenceIndex,
        open_frames: Path | None,
        *,
        chunk_nt: int,
        min_nt: int,
        is_embedded: BoolArray | None = None,
    ) -> None:
        self.index = index
        self.chunk_nt = chunk_nt
        self.min_nt = min_nt
        self._positions = index.in_input_order()
        self.is_embedded: BoolArray = (index.lengths[self._positions] >= min_nt) & (open_frames is not None)
        """bool (contigs,), in input order; not those that are too short for chunks."""
        if is_embedded is not None:
            self.is_embedded &= is_embedded
        self._kept: ByteArray = np.empty(0, np.uint8)
        if open_frames is None:
            return
        if num_bytes := open_frames.stat().st_size:
            self._kept = mapped(open_frames, np.uint8)
        num_chunks = sum(int(counts[embedded].sum()) for _, counts, embedded in self._pieces())
        if num_bytes != num_chunks:
            raise ResultError(open_frames, f"has {num_bytes} chunks, the embedded contigs have {num_chunks}")

    @property
    def num_frames(self) -> int:
        """Kept frames of all contigs."""
        pieces = range(0, len(self._kept), 1 << 24)
        return sum(int(_FRAME_COUNTS[self._kept[start : start + (1 << 24)]].sum()) for start in pieces)

    def batches(self) -> Iterator[ContigBatch]:
        """Yield all contigs, at most ``CHUNKS_AT_ONCE`` chunks at a time unless one contig has more."""
        first_kept = 0
        for positions, counts, is_embedded in self._pieces():
            ends = np.cumsum(counts)
            first = 0
            while first < len(positions):
                before = int(ends[first - 1]) if first else 0
                last = max(first + 1, int(np.searchsorted(ends, before + CHUNKS_AT_ONCE, side="right")))
                num_chunks = int(ends[last - 1]) - before
                chosen, embedded = positions[first:last], is_embedded[first:last]
                kept = np.zeros(num_chunks, dtype=np.uint8)
                is_kept = np.repeat(embedded, counts[first:last])
                next_kept = first_kept + int(np.count_nonzero(is_kept))
                kept[is_kept] = self._kept[first_kept:next_kept]
                yield ContigBatch(
                    positions=chosen,
                    contig_ids=self.index.sequence_ids(chosen),
                    lengths_nt=self.index.lengths[chosen],
                    chunks_per_contig=counts[first:last],
                    is_embedded=embedded,
                    kept_frames=kept,
                )
                first, first_kept = last, next_kept

    def _pieces(self) -> Iterator[tuple[IntArray, IntArray, BoolArray]]:
        """Yield positions, numbers of chunks, and what is embedded of some contigs at a time, in input order."""
        for start in range(0, len(self._positions), CONTIGS_AT_ONCE):
            some = slice(start, start + CONTIGS_AT_ONCE)
            counts = chunks_per_contig(self.index.lengths[self._positions[some]], self.chunk_nt, self.min_nt)
            yield self._positions[some], counts, self.is_embedded[some]


class RowStream:
    """The rows of one embeddings file in order; a context manager."""

    def __init__(self, path: Path) -> None:
        from virnucpro.store.manifest import is_recorded  # noqa: PLC0415  processes that score composition open no rows

        self.path = path
        self._file, self._rows = schema.open_embeddings(path, is_known=is_recorded(path))
        self._ids = schema.iter_sequence_ids(self._file, path)
        self._ahead: list[str] = []
        self._next_row = 0

    @property
    def hidden_dim(self) -> int:
        return int(self._rows.shape[1])

    def take(self, wanted: list[str]) -> tuple[BoolArray, FloatArray]:
        """Return which of the next frames have a row, bool (wanted,), and the rows, float32 (rows, hidden_dim)."""
        while len(self._ahead) < len(wanted) and (more := next(self._ids, None)) is not None:
            self._ahead.extend(more)
        ahead = self._ahead[: len(wanted)]
        if ahead == wanted:
            has_row = np.ones(len(wanted), dtype=np.bool_)
        else:
            coming = iter(ahead)
            upcoming = next(coming, None)
            has_row = np.zeros(len(wanted), dtype=np.bool_)
            for number, name in enumerate(wanted):
                if name == upcoming:
                    has_row[number] = True
                    upcoming = next(coming, None)
        taken = int(np.count_nonzero(has_row))
        del self._ahead[:taken]
        with schema.damage_named(self.path):
            rows: FloatArray = self._rows[self._next_row : self._next_row + taken]
        self._next_row += taken
        return has_row, rows

    def finish(self) -> None:
        """Check that every row was taken."""
        left = self._ahead or next(self._ids, [])
        if left:
            raise ResultError(self.path, f"has a row of {left[0]!r}, which is not the frame expected there")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def join(dna: RowStream, protein: RowStream, frame_ids: list[str]) -> tuple[BoolArray, FloatArray]:
    """
    Return the features of the next frames: DNA, then protein.

    Returns:
        bool (frames,): which frames have both rows; float32 (rows, DNA width + protein width).
    """
    has_dna, dna_rows = dna.take(frame_ids)
    has_protein, protein_rows = protein.take(frame_ids)
    has_both = has_dna & has_protein
    features = np.empty((int(has_both.sum()), dna.hidden_dim + protein.hidden_dim), dtype=np.float32)
    for has_row, rows, columns in (
        (has_dna, dna_rows, slice(0, dna.hidden_dim)),
        (has_protein, protein_rows, slice(dna.hidden_dim, None)),
    ):
        features[:, columns] = rows if len(rows) == len(features) else rows[has_both[has_row]]
    return has_both, features
