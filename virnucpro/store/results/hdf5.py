"""
A result in HDF5: ``embeddings`` and ``sequence_ids``, contiguous and without dates, in one file or in shards.

Shards are files of neighbouring rows in a folder, with one index of their ids. They follow from the number of rows and
their width alone. The index is written after every shard and removed before any of them, so that a folder without it
holds no result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from virnucpro import durable
from virnucpro.errors import ResultError
from virnucpro.run_layout import ShardedLayout
from virnucpro.store import schema
from virnucpro.store.manifest import is_recorded
from virnucpro.store.results import id_index
from virnucpro.store.results.id_index import IdIndex, id_hashes
from virnucpro.store.results.result import IdOrder, Result, RowNumbers, check_finite, check_rows
from virnucpro.store.results.sharded_rows import ShardedRows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from virnucpro.arrays import FloatArray, IntArray
    from virnucpro.store.results.id_index import HashArray
    from virnucpro.store.results.result import ExpectedRows, Hosts, NewRows

SHARD_BYTES = 1 << 30
"""Most bytes of embeddings in a shard: rows arrive in any order and are sorted by the page cache, which must hold a
shard, and object stores take no more than 5 GB at once."""
SHARD_ROWS = 1 << 20


class SingleFile(Result):
    suffix = ".h5"

    @staticmethod
    def bytes_at_most(num_rows: int, hidden_dim: int, *, id_bytes: int) -> int:
        return schema.bytes_at_most(num_rows, hidden_dim, id_bytes=id_bytes)

    def write(
        self,
        rows: NewRows,
        *,
        give_way: Callable[[int], None],
        hosts: Hosts | None = None,  # noqa: ARG002  one file has one writer
    ) -> dict[Path, str]:
        give_way(schema.bytes_at_most(len(rows), rows.hidden_dim, id_bytes=rows.id_bytes))
        write_file(self.path, rows)
        return {}

    def validate(self, expected: ExpectedRows, *, hosts: Hosts | None = None) -> None:  # noqa: ARG002
        self.check_bytes(self.path, expected)
        for _ in check_file(self.path, expected.num_rows, IdOrder(expected), is_known=expected.files is not None):
            pass

    def open(self) -> _FileRows:
        return _FileRows(self.path)


def write_file(path: Path, rows: NewRows) -> None:
    """Write rows into one HDF5 file, which takes its name when it is whole; SourceGoneError where a source is gone."""
    truncated_from, low_information = rows.truncated_from(), rows.low_information()
    most_bytes = schema.bytes_at_most(len(rows), rows.hidden_dim, id_bytes=rows.id_bytes)
    with durable.replacing(path) as new:
        with schema.created(new, most_bytes=most_bytes) as file:
            schema.write_ids(file, len(rows), rows.iter_ids())
            if truncated_from.any():
                file.create_dataset(schema.TRUNCATED_FROM, data=truncated_from, track_times=False)
            if low_information.any():
                data = low_information.astype(np.uint8)
                file.create_dataset(schema.LOW_INFORMATION, data=data, track_times=False)
            offset = schema.early_allocated(file, schema.EMBEDDINGS, (len(rows), rows.hidden_dim))
        for numbers, some in rows.iter_rows():
            schema.write_rows(new, offset, rows.hidden_dim, numbers, some)


def check_file(path: Path, expected_rows: int, order: IdOrder, *, is_known: bool) -> Iterator[list[str]]:
    """Check one HDF5 file of rows with the next ids of *order*, and yield its ids; else ResultError."""
    with schema.open_checked(path, is_known=is_known) as file, schema.damage_named(path):
        rows = schema.embeddings_of(file, path)
        check_rows(rows.shape[0], expected_rows, path)
        for names in schema.iter_sequence_ids(file, path):
            order.check(names, path)
            yield names
        step = schema.rows_at_once(rows.shape[1])
        for start in range(0, rows.shape[0], step):
            check_finite(rows[start : start + step], start, step, path)


class _FileRows(RowNumbers):
    def __init__(self, path: Path) -> None:
        self._file, self._rows = schema.open_embeddings(path, is_known=is_recorded(path))
        self._path = path
        try:
            super().__init__(tuple(n for names in schema.iter_sequence_ids(self._file, path) for n in names), path)
        except ResultError:
            self._file.close()
            raise

    @property
    def hidden_dim(self) -> int:
        return int(self._rows.shape[1])

    def read(self, rows: slice | IntArray) -> FloatArray:
        is_nothing = not isinstance(rows, slice) and not len(rows)
        with schema.damage_named(self._path):
            found: FloatArray = self._rows[:0] if is_nothing else self._rows[rows]
        return found

    def close(self) -> None:
        self._file.close()


def most_rows_of_shard(hidden_dim: int) -> int:
    """Return the rows of every shard but the last, for rows of *hidden_dim* numbers."""
    return max(1, min(SHARD_ROWS, SHARD_BYTES // max(1, hidden_dim * 4)))


def shard_bounds(num_rows: int, *, rows_per_shard: int) -> list[range]:
    """Return which rows each shard has; a result without rows has one shard without rows."""
    starts = range(0, max(1, num_rows), rows_per_shard)
    return [range(first, min(first + rows_per_shard, num_rows)) for first in starts]


class Shards(Result):
    """A folder of shards and their index."""

    suffix = ""
    has_many_files = True

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.layout = ShardedLayout(path)

    @classmethod
    def is_at(cls, path: Path) -> bool:
        return path.is_dir()

    @staticmethod
    def bytes_at_most(num_rows: int, hidden_dim: int, *, id_bytes: int) -> int:
        num_shards = len(shard_bounds(num_rows, rows_per_shard=most_rows_of_shard(hidden_dim)))
        in_shards = schema.bytes_at_most(num_rows, hidden_dim, id_bytes=id_bytes) + num_shards * schema.OVERHEAD_BYTES
        return in_shards + id_index.bytes_at_most(num_rows, num_shards)

    @property
    def proof(self) -> Path:
        return self.layout.index

    def files(self) -> list[Path]:
        return [*self.layout.shards(), *super().files()]

    def write(self, rows: NewRows, *, give_way: Callable[[int], None], hosts: Hosts | None = None) -> dict[Path, str]:
        rows_per_shard = most_rows_of_shard(rows.hidden_dim)
        bounds = shard_bounds(len(rows), rows_per_shard=rows_per_shard)
        paths = [self.layout.shard(number, len(bounds)) for number in range(len(bounds))]
        self._remove_index()
        for path in self.layout.shards():
            if path not in paths:
                durable.remove(path)
        digests: dict[Path, str] = {}
        if hosts is None:
            for path, shard in zip(paths, map(rows.subset, bounds), strict=True):
                give_way(schema.bytes_at_most(len(shard), shard.hidden_dim, id_bytes=shard.id_bytes))
                write_file(path, shard)
        else:
            most_bytes = schema.bytes_at_most(len(rows), rows.hidden_dim, id_bytes=rows.id_bytes)
            give_way(most_bytes + len(bounds) * schema.OVERHEAD_BYTES)
            digests = hosts.write(rows, bounds, paths)
        give_way(id_index.bytes_at_most(len(rows), len(bounds)))
        id_index.write_id_index(
            self.layout.index,
            _hashes(rows.iter_ids(), len(rows)),
            hidden_dim=rows.hidden_dim,
            rows_per_shard=rows_per_shard,
            shard_bytes=[path.stat().st_size for path in paths],
        )
        return digests

    def validate(self, expected: ExpectedRows, *, hosts: Hosts | None = None) -> None:
        self.check_bytes(self.proof, expected)
        ids = IdIndex(self.proof)
        try:
            check_rows(ids.num_rows, expected.num_rows, self.proof)
            if hosts is not None and expected.is_complete and expected.files is not None:
                hosts.validate(ShardProof(self, expected, rows_per_shard=ids.rows_per_shard))
                ids.check(_hashes(expected.iter_ids(), expected.num_rows))
                return
            order = IdOrder(expected)
            bounds = shard_bounds(expected.num_rows, rows_per_shard=ids.rows_per_shard)

            def checked() -> Iterable[list[str]]:
                for number, rows in enumerate(bounds):
                    shard = self.layout.shard(number, len(bounds))
                    self.check_bytes(shard, expected)
                    yield from check_file(shard, len(rows), order, is_known=expected.files is not None)

            ids.check(_hashes(checked(), expected.num_rows))
        finally:
            ids.close()

    def open(self) -> ShardedRows:
        return ShardedRows(self.layout)

    def remove(self) -> None:
        """Remove index and shards, whole or not, and nothing else that may be in the folder."""
        if not self.path.is_dir():
            return
        durable.remove_strays(self.path)
        self._remove_index()
        for path in self.layout.shards():
            durable.remove(path)
        durable.remove_empty(self.path)

    def remove_unfinished(self) -> None:
        if not self.proof.exists():
            self.remove()

    def _remove_index(self) -> None:
        if self.proof.exists():
            durable.remove(self.proof)
            with durable.writing(self.proof):
                durable.sync_folder(self.path)


class ShardProof:
    """The proof of a complete sharded result, shard by shard, in any order and on any host."""

    def __init__(self, result: Shards, expected: ExpectedRows, *, rows_per_shard: int) -> None:
        self.result = result
        self.expected = expected
        self.rows_per_shard = rows_per_shard
        self._bounds = shard_bounds(expected.num_rows, rows_per_shard=rows_per_shard)

    def __len__(self) -> int:
        return len(self._bounds)

    def check(self, number: int) -> None:
        """Raise ``ResultError`` unless bytes, shape, ids and their order hold and all numbers are finite."""
        rows = self._bounds[number]
        shard = self.result.layout.shard(number, len(self._bounds))
        self.result.check_bytes(shard, self.expected)
        for _ in check_file(shard, len(rows), IdOrder(self.expected, rows), is_known=self.expected.files is not None):
            pass


def _hashes(ids: Iterable[list[str]], num_rows: int) -> HashArray:
    """Return the hash of each id: uint64 (num_rows,)."""
    hashes = np.empty(num_rows, dtype=np.uint64)
    filled = 0
    for names in ids:
        hashes[filled : filled + len(names)] = id_hashes(names)
        filled += len(names)
    return hashes
