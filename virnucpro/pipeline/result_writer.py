"""
The rows of a run in the order of the input, written as one file or as shards.

Every row is written once, straight from where it lies; a few rows at a time are in memory, and some 50 bytes for each.
Copies of a sequence get the row of the one that was computed. Either form of a result appears in one step: a file when
it takes its name, shards when the index of their ids takes its own. The bytes follow from input, plan and form alone.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from virnucpro import durable
from virnucpro.pipeline import disk_space
from virnucpro.store import id_index, schema
from virnucpro.store.parts import RowWriter
from virnucpro.store.result_shards import forget_index, most_rows_of_shard, shard_bounds

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from virnucpro.data.sequence_index import SequenceIndex
    from virnucpro.run_layout import RunLayout, ShardedLayout
    from virnucpro.store.parts import SealedBlocks

    IntArray = np.ndarray[Any, np.dtype[np.int64]]
    BoolArray = np.ndarray[Any, np.dtype[np.bool_]]


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
        self._index = index
        self._sources = sources
        self._max_residues = max_residues
        self.hidden_dim = max((source.hidden_dim for source in sources), default=hidden_dim)
        self._starts = np.cumsum([0, *(len(source.positions) for source in sources)])
        self._place = np.full(len(index), -1, dtype=np.int64)  # of a computed sequence: its row, over all sources
        for source, start in zip(sources, self._starts.tolist(), strict=False):
            self._place[source.positions] = np.arange(start, start + len(source.positions))
        in_order = index.in_input_order()
        present = self._place[index.representatives[in_order]] >= 0
        self.positions: IntArray = in_order[present]
        self.missing: IntArray = in_order[~present]
        self.num_copies = len(self.positions) - int(self._starts[-1])
        self.num_truncated = int(self._is_cut(self.positions).sum())

    def __len__(self) -> int:
        return len(self.positions)

    def write_single(self, path: Path, layout: RunLayout) -> None:
        """
        Write all rows into one file.

        Raises:
            OutputError: The system refused; *path* is as it was.
        """
        self._write(path, range(len(self)), layout)

    def write_sharded(self, result: ShardedLayout, layout: RunLayout) -> None:
        """
        Write the rows into shards, and their index last.

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
        for path, rows in zip(paths, bounds, strict=True):
            self._write(path, rows, layout)
        disk_space.give_way_to_result(layout, id_index.bytes_at_most(len(self), len(bounds)))
        id_index.write_id_index(
            result.index,
            self._id_hashes(),
            hidden_dim=self.hidden_dim,
            rows_per_shard=rows_per_shard,
            shard_bytes=[path.stat().st_size for path in paths],
        )

    def _id_hashes(self) -> id_index.HashArray:
        hashes = np.empty(len(self), dtype=np.uint64)
        filled = 0
        for names in self._ids(self.positions):
            hashes[filled : filled + len(names)] = id_index.id_hashes(names)
            filled += len(names)
        return hashes

    def _ids(self, positions: IntArray) -> Iterator[list[str]]:
        for start in range(0, len(positions), schema.IDS_PER_WRITE):
            yield self._index.sequence_ids(positions[start : start + schema.IDS_PER_WRITE])

    def _is_cut(self, positions: IntArray) -> BoolArray:
        return np.asarray(self._index.lengths[positions] > self._max_residues)

    def _write(self, path: Path, rows: range, layout: RunLayout) -> None:
        """Write neighbouring rows under a temporary name, then take the final one."""
        positions = self.positions[rows.start : rows.stop]
        lengths, is_cut = self._index.lengths[positions], self._is_cut(positions)
        low_information = self._index.low_information[positions]
        most_bytes = schema.bytes_at_most(len(positions), self.hidden_dim, id_bytes=self._index.id_bytes_of(positions))
        disk_space.give_way_to_result(layout, most_bytes)
        with durable.replacing(path) as new:
            with schema.created(new, most_bytes=most_bytes) as file:
                ids = file.create_dataset(schema.SEQUENCE_IDS, (len(positions),), dtype=schema.UTF8, track_times=False)
                filled = 0
                for names in self._ids(positions):
                    ids[filled : filled + len(names)] = names
                    filled += len(names)
                if is_cut.any():
                    data = np.where(is_cut, lengths, 0).astype(np.int64)
                    file.create_dataset(schema.TRUNCATED_FROM, data=data, track_times=False)
                if low_information.any():
                    data = (low_information > 0).astype(np.uint8)
                    file.create_dataset(schema.LOW_INFORMATION, data=data, track_times=False)
                offset = schema.early_allocated(file, schema.EMBEDDINGS, (len(positions), self.hidden_dim))
            self._write_rows(RowWriter(new, offset, self.hidden_dim), positions)

    def _write_rows(self, writer: RowWriter, positions: IntArray) -> None:
        """Write the rows of *positions*, source by source in the order in which they lie there."""
        places = self._place[self._index.representatives[positions]]
        in_order = np.argsort(places, kind="stable")
        places = places[in_order]
        of_sources = pairwise(np.searchsorted(places, self._starts).tolist())
        for source, start, (first, end) in zip(self._sources, self._starts.tolist(), of_sources, strict=False):
            targets = in_order[first:end]
            for some, rows in source.iter_rows_at(places[first:end] - start):
                by_target = np.argsort(targets[some], kind="stable")
                writer.write(targets[some][by_target], rows[by_target])
