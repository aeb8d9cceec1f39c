"""
The rows of a run in the order of the input, written as one file or as shards.

Every row is written once, straight from where it lies; a few rows at a time are in memory, and some 50 bytes for each.
Copies of a sequence get the row of the one that was computed. Either form of a result appears in one step: a file when
it takes its name, shards when the index of their ids takes its own. The bytes follow from input, plan and form alone:
so a shard can be written by any host that finds in the shared folder which rows it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from virnucpro import durable
from virnucpro.pipeline import disk_space
from virnucpro.store import id_index, schema
from virnucpro.store.parts import RowWriter, SealedBlocks
from virnucpro.store.result_shards import forget_index, most_rows_of_shard, shard_bounds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from virnucpro.data.sequence_index import SequenceIndex
    from virnucpro.run_layout import RunLayout, ShardedLayout

    IntArray = np.ndarray[Any, np.dtype[np.int64]]
    BoolArray = np.ndarray[Any, np.dtype[np.bool_]]

_POSITIONS, _PLACES, _KEPT = "positions", "places", "kept_"
"""Names of files in which rows are written down."""
_STORED_AT_ONCE = 1 << 20
"""Rows whose places are written at a time."""


class ShardHosts(Protocol):
    """Something that has the shards of a result written on several hosts."""

    def write(self, rows: ResultRows, bounds: Sequence[range], paths: Sequence[Path]) -> dict[Path, str]:
        """Have shards with these rows under these names; return the hex sha256 of each."""
        ...


@dataclass(frozen=True)
class RowFiles:
    """
    Writes files of rows, from wherever the rows lie.

    Attributes:
        index: The input.
        sources: Checked parts and shards, none of which holds a block of another.
        starts: int64 (sources + 1,): number of the first row of each source over all of them, and that of all rows.
        hidden_dim: Width of a row.
        max_residues: Residues of a sequence that were embedded.
    """

    index: SequenceIndex
    sources: Sequence[SealedBlocks]
    starts: IntArray
    hidden_dim: int
    max_residues: int

    def bytes_at_most(self, positions: IntArray) -> int:
        """Return what a file of the sequences at these index positions takes at the most."""
        id_bytes = self.index.id_bytes_of(positions)
        return schema.bytes_at_most(len(positions), self.hidden_dim, id_bytes=id_bytes)

    def is_cut(self, positions: IntArray) -> BoolArray:
        """Return of which of the sequences the end was not embedded."""
        return np.asarray(self.index.lengths[positions] > self.max_residues)

    def ids(self, positions: IntArray) -> Iterator[list[str]]:
        """Yield the ids of the sequences, a bounded number at a time."""
        for start in range(0, len(positions), schema.IDS_PER_WRITE):
            yield self.index.sequence_ids(positions[start : start + schema.IDS_PER_WRITE])

    def write(self, path: Path, positions: IntArray, places: IntArray) -> None:
        """
        Write rows under a temporary name, then take the final one.

        Args:
            path: The final name.
            positions: int64 (rows,): index position of each row's sequence.
            places: int64 (rows,): number over all sources of the row that it is.

        Raises:
            OutputError: The system refused; *path* is as it was.
            SourceGoneError: A source is no longer there.
        """
        lengths, is_cut = self.index.lengths[positions], self.is_cut(positions)
        low_information = self.index.low_information[positions]
        with durable.replacing(path) as new:
            with schema.created(new, most_bytes=self.bytes_at_most(positions)) as file:
                ids = file.create_dataset(schema.SEQUENCE_IDS, (len(positions),), dtype=schema.UTF8, track_times=False)
                filled = 0
                for names in self.ids(positions):
                    ids[filled : filled + len(names)] = names
                    filled += len(names)
                if is_cut.any():
                    data = np.where(is_cut, lengths, 0).astype(np.int64)
                    file.create_dataset(schema.TRUNCATED_FROM, data=data, track_times=False)
                if low_information.any():
                    data = (low_information > 0).astype(np.uint8)
                    file.create_dataset(schema.LOW_INFORMATION, data=data, track_times=False)
                offset = schema.early_allocated(file, schema.EMBEDDINGS, (len(positions), self.hidden_dim))
            self._write_rows(RowWriter(new, offset, self.hidden_dim), places)

    def _write_rows(self, writer: RowWriter, places: IntArray) -> None:
        """Write the rows, source by source in the order in which they lie there."""
        in_order = np.argsort(places, kind="stable")
        places = places[in_order]
        of_sources = pairwise(np.searchsorted(places, self.starts).tolist())
        for source, start, (first, end) in zip(self.sources, self.starts.tolist(), of_sources, strict=False):
            targets = in_order[first:end]
            for some, rows in source.iter_rows_at(places[first:end] - start):
                by_target = np.argsort(targets[some], kind="stable")
                writer.write(targets[some][by_target], rows[by_target])


class ResultRows:
    """
    Which sequence each row of a result belongs to, and where its numbers are.

    Args:
        index: The input.
        sources: Checked parts and shards, none of which holds a block of another.
        hidden_dim: Width of a row, used where there is none.
        max_residues: Residues of a sequence that were embedded.

    Attributes:
        positions: int64 (num_rows,): index position of each row's sequence, in the order of the input.
        missing: int64 (num_missing,): those of the records that have no row, in the order of the input.
        hidden_dim: Width of a row.
        num_copies: Rows of sequences that are copies of another one.
        num_truncated: Rows whose sequence was cut.
    """

    def __init__(
        self, index: SequenceIndex, sources: list[SealedBlocks], *, hidden_dim: int, max_residues: int
    ) -> None:
        self.hidden_dim = max((source.hidden_dim for source in sources), default=hidden_dim)
        starts = np.cumsum([0, *(len(source.positions) for source in sources)])
        self._files = RowFiles(index, sources, starts, self.hidden_dim, max_residues)
        self._place = np.full(len(index), -1, dtype=np.int64)  # of a computed sequence: its row, over all sources
        for source, start in zip(sources, starts.tolist(), strict=False):
            self._place[source.positions] = np.arange(start, start + len(source.positions))
        in_order = index.in_input_order()
        present = self._place[index.representatives[in_order]] >= 0
        self.positions: IntArray = in_order[present]
        self.missing: IntArray = in_order[~present]
        self.num_copies = len(self.positions) - int(starts[-1])
        self.num_truncated = int(self._files.is_cut(self.positions).sum())

    def __len__(self) -> int:
        return len(self.positions)

    def write_single(self, path: Path, layout: RunLayout) -> None:
        """
        Write all rows into one file.

        Raises:
            OutputError: The system refused; *path* is as it was.
        """
        self._write(path, range(len(self)), layout)

    def write_sharded(
        self, result: ShardedLayout, layout: RunLayout, *, hosts: ShardHosts | None = None
    ) -> dict[Path, str]:
        """
        Write the rows into shards, and their index last.

        Args:
            result: Names of the shards.
            layout: The run's folder.
            hosts: Who writes the shards; None for this process.

        Returns:
            The hex sha256 of those shards whose writer has told it.

        Raises:
            OutputError: The system refused; there is no index then.
        """
        rows_per_shard = most_rows_of_shard(self.hidden_dim)
        bounds = shard_bounds(len(self), rows_per_shard=rows_per_shard)
        paths = [result.shard(number, len(bounds)) for number in range(len(bounds))]
        forget_index(result)
        for path in result.shards():
            if path not in paths:
                durable.remove(path)
        digests: dict[Path, str] = {}
        if hosts is None:
            for path, rows in zip(paths, bounds, strict=True):
                self._write(path, rows, layout)
        else:
            most_bytes = self._files.bytes_at_most(self.positions) + len(bounds) * schema.OVERHEAD_BYTES
            disk_space.give_way_to_result(layout, most_bytes)
            digests = hosts.write(self, bounds, paths)
        disk_space.give_way_to_result(layout, id_index.bytes_at_most(len(self), len(bounds)))
        id_index.write_id_index(
            result.index,
            self._id_hashes(),
            hidden_dim=self.hidden_dim,
            rows_per_shard=rows_per_shard,
            shard_bytes=[path.stat().st_size for path in paths],
        )
        return digests

    def store(self, folder: Path) -> dict[str, Any]:
        """
        Write down where every row is, for ``StoredRows`` on other hosts: 16 bytes a row.

        Args:
            folder: Where; exists.

        Returns:
            What else ``StoredRows`` needs, ready for JSON.

        Raises:
            OutputError: The system refused.
        """
        with durable.replacing(folder / _POSITIONS) as positions, durable.replacing(folder / _PLACES) as places:
            for start in range(0, len(self), _STORED_AT_ONCE):
                rows = range(start, min(start + _STORED_AT_ONCE, len(self)))
                positions.write(self.positions[rows.start : rows.stop].astype("<i8").tobytes())
                places.write(self._places(rows).astype("<i8").tobytes())
        sources = []
        for number, source in enumerate(self._files.sources):
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
            "max_residues": self._files.max_residues,
            "starts": self._files.starts.tolist(),
            "sources": sources,
        }

    def _id_hashes(self) -> id_index.HashArray:
        hashes = np.empty(len(self), dtype=np.uint64)
        filled = 0
        for names in self._files.ids(self.positions):
            hashes[filled : filled + len(names)] = id_index.id_hashes(names)
            filled += len(names)
        return hashes

    def _places(self, rows: range) -> IntArray:
        return self._place[self._files.index.representatives[self.positions[rows.start : rows.stop]]]

    def _write(self, path: Path, rows: range, layout: RunLayout) -> None:
        positions = self.positions[rows.start : rows.stop]
        disk_space.give_way_to_result(layout, self._files.bytes_at_most(positions))
        self._files.write(path, positions, self._places(rows))


class StoredRows:
    """
    The rows of a result as ``ResultRows.store`` wrote them down: what is needed of them is read when it is.

    Args:
        folder: Where they are written down.
        about: What ``store`` returned.
        index: The input.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any], index: SequenceIndex) -> None:
        self._positions = _mapped(folder / _POSITIONS, about["num_rows"])
        self._places = _mapped(folder / _PLACES, about["num_rows"])
        sources = [_restored(source, folder / f"{_KEPT}{number}") for number, source in enumerate(about["sources"])]
        starts = np.array(about["starts"], dtype=np.int64)
        self._files = RowFiles(index, sources, starts, about["hidden_dim"], about["max_residues"])

    def write(self, path: Path, rows: range) -> None:
        """
        Write neighbouring rows into a file.

        Raises:
            OutputError: The system refused; *path* is as it was.
            SourceGoneError: A part or shard is no longer there.
        """
        positions, places = (np.array(column[rows.start : rows.stop]) for column in (self._positions, self._places))
        self._files.write(path, positions, places)


def _mapped(path: Path, num_rows: int) -> IntArray:
    return np.memmap(path, dtype="<i8", mode="r", shape=(num_rows,)) if num_rows else np.empty(0, np.int64)


def _restored(about: Mapping[str, Any], kept: Path) -> SealedBlocks:
    """Return a source of which rows can be read; which blocks it holds is nobody's business any more."""
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
