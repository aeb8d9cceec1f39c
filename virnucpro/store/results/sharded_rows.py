"""
Reading a sharded result by id without holding the ids: ten million open in milliseconds.

An id is looked up in the index of ids, and compared with the one in the shard before its row is used. Shards are
opened when they are first read, some of them at a time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, overload

import numpy as np

from virnucpro.errors import ResultError
from virnucpro.store import schema
from virnucpro.store.manifest import is_recorded
from virnucpro.store.results.id_index import IdIndex

if TYPE_CHECKING:
    from pathlib import Path

    import h5py

    from virnucpro.arrays import FloatArray, IntArray
    from virnucpro.run_layout import ShardedLayout


MOST_OPEN_SHARDS = 128
"""Shards kept open; most systems allow a process 1,024 files."""
_NEAR_IDS = 128
"""Ids between two that are read rather than skipped: about what a second read costs."""


class ShardedRows:
    """The rows of a sharded result; safe from several threads. ``ResultError`` where what is read is damaged."""

    def __init__(self, layout: ShardedLayout) -> None:
        self._layout = layout
        is_recorded(layout.index, layout.folder.parent)
        self._index = IdIndex(layout.index)
        self._checked: set[int] = set()
        """Shards whose sha256 was compared, or that a child process has read."""
        self._open: OrderedDict[int, tuple[h5py.File, h5py.Dataset]] = OrderedDict()
        self._lock = threading.Lock()
        there = {path.name for path in layout.folder.iterdir()}
        for number in range(len(self._index.shard_bytes)):
            if self._path(number).name not in there:
                self.close()
                raise ResultError(self._path(number), "is missing")
        self.ids = ShardedIds(self)
        """Ids in the order of the rows, read on access."""

    @property
    def hidden_dim(self) -> int:
        return self._index.hidden_dim

    @property
    def num_rows(self) -> int:
        return self._index.num_rows

    def rows_of(self, sequence_ids: Sequence[str]) -> IntArray:
        candidates = [self._index.candidates(name) for name in sequence_ids]
        numbers = np.array(sorted({row for rows in candidates for row in rows}), dtype=np.int64)
        id_of = dict(zip(numbers.tolist(), self.ids_at(numbers), strict=True))
        found = np.empty(len(candidates), dtype=np.int64)
        for place, (name, rows) in enumerate(zip(sequence_ids, candidates, strict=True)):
            own = [row for row in rows if id_of[row] == name]
            if not own:
                raise KeyError(name)
            if len(own) > 1:
                raise ResultError(self._layout.folder, "an id has more than one row")
            found[place] = own[0]
        return found

    def __contains__(self, sequence_id: object) -> bool:
        try:
            return isinstance(sequence_id, str) and len(self.rows_of([sequence_id])) == 1
        except KeyError:
            return False

    def read(self, rows: slice | IntArray) -> FloatArray:
        numbers = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        found = np.empty((len(numbers), self.hidden_dim), dtype=np.float32)
        most_gap, most_rows = schema.gap_rows(self.hidden_dim), schema.rows_at_once(self.hidden_dim)
        filled = 0
        for shard, wanted in self._near_runs(numbers, most_gap=most_gap, most_rows=most_rows):
            with self._lock:
                rows_of_shard = self._opened(shard)[1]
                with schema.damage_named(self._path(shard)):
                    data = rows_of_shard[wanted[0] : wanted[-1] + 1]
            found[filled : filled + len(wanted)] = data[wanted - wanted[0]]
            filled += len(wanted)
        return found

    def ids_at(self, numbers: IntArray) -> list[str]:
        """Return the ids of rows by their ascending numbers."""
        found: list[str] = []
        for shard, wanted in self._near_runs(numbers, most_gap=_NEAR_IDS, most_rows=schema.IDS_PER_WRITE):
            span = slice(int(wanted[0]), int(wanted[-1]) + 1)
            with self._lock:
                names = schema.sequence_ids_in(self._opened(shard)[0], self._path(shard), span)
            found.extend(names[row] for row in (wanted - wanted[0]).tolist())
        return found

    def iter_ids(self) -> Iterator[str]:
        for shard in range(len(self._index.shard_bytes)):
            with closing(self._open_shard(shard)[0]) as file:
                for names in schema.iter_sequence_ids(file, self._path(shard)):
                    yield from names

    def close(self) -> None:
        with self._lock:
            self._index.close()
            while self._open:
                self._open.popitem()[1][0].close()

    def _near_runs(self, numbers: IntArray, *, most_gap: int, most_rows: int) -> Iterator[tuple[int, IntArray]]:
        """Yield a shard and some of its rows that are worth one read, for all of the ascending *numbers*."""
        step, start = self._index.rows_per_shard, 0
        while start < len(numbers):
            shard = int(numbers[start]) // step
            end = int(np.searchsorted(numbers, (shard + 1) * step))
            within = numbers[start:end] - shard * step
            for near in schema.near_runs(within, most_gap=most_gap, most_rows=most_rows):
                yield shard, within[near]
            start = end

    def _path(self, number: int) -> Path:
        return self._layout.shard(number, len(self._index.shard_bytes))

    def _opened(self, number: int) -> tuple[h5py.File, h5py.Dataset]:
        """Return an open shard and its rows; closes the least recently used one."""
        if number not in self._open:
            self._open[number] = self._open_shard(number)
            if len(self._open) > MOST_OPEN_SHARDS:
                self._open.popitem(last=False)[1][0].close()
        self._open.move_to_end(number)
        return self._open[number]

    def _open_shard(self, number: int) -> tuple[h5py.File, h5py.Dataset]:
        index, path = self._index, self._path(number)
        if index.is_closed:
            raise ValueError(f"{self._layout.folder} is closed")
        try:
            size_bytes = path.stat().st_size
        except OSError as error:
            raise ResultError(path, error.strerror or str(error)) from error
        if size_bytes != index.shard_bytes[number]:
            raise ResultError(path, f"damaged: has {size_bytes} bytes instead of {index.shard_bytes[number]}")
        is_known = number in self._checked or is_recorded(path, self._layout.folder.parent)
        file, rows = schema.open_embeddings(path, is_known=is_known)
        self._checked.add(number)
        first = number * index.rows_per_shard
        expected = (min(index.num_rows - first, index.rows_per_shard), index.hidden_dim)
        if rows.shape != expected:
            file.close()
            raise ResultError(path, f"has {rows.shape} numbers, expected {expected}")
        return file, rows


class ShardedIds(Sequence[str]):
    """The ids of a sharded result in the order of its rows, read on access."""

    def __init__(self, rows: ShardedRows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return self._rows.num_rows

    @overload
    def __getitem__(self, which: int) -> str: ...

    @overload
    def __getitem__(self, which: slice) -> tuple[str, ...]: ...

    def __getitem__(self, which: int | slice) -> str | tuple[str, ...]:
        chosen = range(len(self))[which]
        if isinstance(chosen, int):
            return self._rows.ids_at(np.array([chosen]))[0]
        ascending = chosen if chosen.step > 0 else chosen[::-1]
        names = self._rows.ids_at(np.array(ascending, dtype=np.int64))
        return tuple(names if chosen.step > 0 else reversed(names))

    def __iter__(self) -> Iterator[str]:
        return self._rows.iter_ids()

    def __contains__(self, sequence_id: object) -> bool:
        return sequence_id in self._rows
