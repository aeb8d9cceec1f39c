"""
The rows of a run in the order of the input, read from the checked parts and shards of its ranks.

Every row is read once, straight from where it lies; a few rows at a time are in memory, and some 50 bytes for each.
Copies of a sequence get the row of the one that was computed. The rows can be stored as 16 bytes each, from which any
host that sees the folder reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from virnucpro import durable
from virnucpro.store import schema
from virnucpro.store.parts import SealedBlocks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from virnucpro.data.sequence_index import SequenceIndex

    FloatArray = np.ndarray[Any, np.dtype[np.float32]]
    IntArray = np.ndarray[Any, np.dtype[np.int64]]
    BoolArray = np.ndarray[Any, np.dtype[np.bool_]]

_POSITIONS, _PLACES, _KEPT = "positions", "places", "kept_"
"""Names of stored files."""
_STORED_AT_ONCE = 1 << 20
"""Rows stored at a time."""


@dataclass(frozen=True)
class ResultRows:
    """Which sequence each row belongs to, and where its numbers are."""

    index: SequenceIndex
    sources: Sequence[SealedBlocks]
    """Checked parts and shards, no block in two of them."""
    starts: IntArray
    """int64 (sources + 1,): number of the first row of each source over all of them, and that of all rows."""
    positions: IntArray
    """int64 (rows,): index position of each row's sequence."""
    places: IntArray
    """int64 (rows,): number of each row over all sources."""
    hidden_dim: int
    max_residues: int
    """Residues of a sequence that were embedded."""

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def id_bytes(self) -> int:
        return self.index.id_bytes_of(self.positions)

    def subset(self, rows: range) -> ResultRows:
        """Return neighbouring rows."""
        some = slice(rows.start, rows.stop)
        return replace(self, positions=np.array(self.positions[some]), places=np.array(self.places[some]))

    def iter_ids(self) -> Iterator[list[str]]:
        """Yield the ids in order, a bounded number at a time."""
        for start in range(0, len(self), schema.IDS_PER_WRITE):
            yield self.index.sequence_ids(self.positions[start : start + schema.IDS_PER_WRITE])

    def truncated_from(self) -> IntArray:
        """Return int64 (rows,): residues of each truncated sequence, 0 where it is whole."""
        lengths = self.index.lengths[self.positions]
        return np.where(lengths > self.max_residues, lengths, 0).astype(np.int64)

    def low_information(self) -> BoolArray:
        """Return bool (rows,): True for sequences of unknown residues or nucleotides only."""
        return np.asarray(self.index.low_information[self.positions] > 0)

    def iter_rows(self) -> Iterator[tuple[IntArray, FloatArray]]:
        """
        Yield ascending row numbers and their rows, source by source in the order in which they lie there.

        Raises:
            SourceGoneError: A source is no longer there.
        """
        in_order = np.argsort(self.places, kind="stable")
        places = self.places[in_order]
        of_sources = pairwise(np.searchsorted(places, self.starts).tolist())
        for source, start, (first, end) in zip(self.sources, self.starts.tolist(), of_sources, strict=False):
            targets = in_order[first:end]
            for some, rows in source.iter_rows_at(places[first:end] - start):
                by_target = np.argsort(targets[some], kind="stable")
                yield targets[some][by_target], rows[by_target]

    def store(self, folder: Path) -> dict[str, Any]:
        """
        Write to *folder* where every row is, 16 bytes a row; return the rest of it, ready for JSON.

        Raises:
            OutputError: The system refused.
        """
        with durable.replacing(folder / _POSITIONS) as positions, durable.replacing(folder / _PLACES) as places:
            for start in range(0, len(self), _STORED_AT_ONCE):
                some = slice(start, start + _STORED_AT_ONCE)
                positions.write(self.positions[some].astype("<i8").tobytes())
                places.write(self.places[some].astype("<i8").tobytes())
        sources = []
        for number, source in enumerate(self.sources):
            if source.kept_rows is not None:
                durable.write_bytes(folder / f"{_KEPT}{number}", np.packbits(source.kept_rows).tobytes())
            sources.append(
                {
                    "path": str(source.path),
                    "offset_bytes": source.offset_bytes,
                    "hidden_dim": source.hidden_dim,
                    "seal": source.seal.hex(),
                    "kept_of": None if source.kept_rows is None else len(source.kept_rows),
                }
            )
        return {
            "num_rows": len(self),
            "hidden_dim": self.hidden_dim,
            "max_residues": self.max_residues,
            "starts": self.starts.tolist(),
            "sources": sources,
        }

    @classmethod
    def stored(cls, folder: Path, about: Mapping[str, Any], index: SequenceIndex) -> Self:
        """Return rows that ``store`` wrote to *folder*; *about* is what it returned. Arrays stay on disk."""
        return cls(
            index=index,
            sources=[_restored(source, folder / f"{_KEPT}{number}") for number, source in enumerate(about["sources"])],
            starts=np.array(about["starts"], dtype=np.int64),
            positions=_mapped(folder / _POSITIONS, about["num_rows"]),
            places=_mapped(folder / _PLACES, about["num_rows"]),
            hidden_dim=about["hidden_dim"],
            max_residues=about["max_residues"],
        )


def rows_of_parts(
    index: SequenceIndex, sources: Sequence[SealedBlocks], *, hidden_dim: int, max_residues: int
) -> tuple[ResultRows, IntArray]:
    """
    Return every row that the sources have, and the records without one, both in the order of the input.

    Args:
        index: The input.
        sources: Checked parts and shards, no block in two of them.
        hidden_dim: Width of a row, used where there is none.
        max_residues: Residues of a sequence that were embedded.
    """
    starts = np.cumsum([0, *(len(source.positions) for source in sources)])
    place = np.full(len(index), -1, dtype=np.int64)  # of a computed sequence: its row, over all sources
    for source, start in zip(sources, starts.tolist(), strict=False):
        place[source.positions] = np.arange(start, start + len(source.positions))
    in_order = index.in_input_order()
    places = place[index.representatives[in_order]]
    present = places >= 0
    rows = ResultRows(
        index=index,
        sources=sources,
        starts=starts,
        positions=in_order[present],
        places=places[present],
        hidden_dim=max((source.hidden_dim for source in sources), default=hidden_dim),
        max_residues=max_residues,
    )
    return rows, in_order[~present]


def _mapped(path: Path, num_rows: int) -> IntArray:
    return np.memmap(path, dtype="<i8", mode="r", shape=(num_rows,)) if num_rows else np.empty(0, np.int64)


def _restored(about: Mapping[str, Any], kept: Path) -> SealedBlocks:
    """Return a source whose rows can be read; which blocks it holds is no longer needed."""
    kept_of = about["kept_of"]
    return SealedBlocks(
        path=Path(about["path"]),
        plan_fingerprint="",
        blocks=np.empty((0, 3), np.int64),
        positions=np.empty(0, np.int64),
        hidden_dim=about["hidden_dim"],
        offset_bytes=about["offset_bytes"],
        seal=bytes.fromhex(about["seal"]),
        kept_rows=None
        if kept_of is None
        else np.unpackbits(np.frombuffer(kept.read_bytes(), np.uint8), count=kept_of).astype(np.bool_),
    )
