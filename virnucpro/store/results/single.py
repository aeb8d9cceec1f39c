"""A result in one HDF5 file: ``embeddings`` and ``sequence_ids``, contiguous and without dates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from virnucpro import durable
from virnucpro.errors import ResultError
from virnucpro.store import schema
from virnucpro.store.parts import RowWriter
from virnucpro.store.results.result import IdOrder, Result, RowNumbers, check_finite, check_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from virnucpro.store.results.result import ExpectedRows, Hosts, NewRows

    FloatArray = np.ndarray[Any, np.dtype[np.float32]]
    IntArray = np.ndarray[Any, np.dtype[np.int64]]


class SingleFile(Result):
    """One HDF5 file."""

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
        for _ in check_file(self.path, expected.num_rows, IdOrder(expected)):
            pass

    def open(self) -> _FileRows:
        return _FileRows(self.path)


def write_file(path: Path, rows: NewRows) -> None:
    """
    Write rows into one HDF5 file, which takes its name when it is whole.

    Raises:
        OutputError: The system refused; *path* is as it was.
        SourceGoneError: A part or shard of a rank is no longer there.
    """
    truncated_from, low_information = rows.truncated_from(), rows.low_information()
    most_bytes = schema.bytes_at_most(len(rows), rows.hidden_dim, id_bytes=rows.id_bytes)
    with durable.replacing(path) as new:
        with schema.created(new, most_bytes=most_bytes) as file:
            ids = file.create_dataset(schema.SEQUENCE_IDS, (len(rows),), dtype=schema.UTF8, track_times=False)
            filled = 0
            for names in rows.iter_ids():
                ids[filled : filled + len(names)] = names
                filled += len(names)
            if truncated_from.any():
                file.create_dataset(schema.TRUNCATED_FROM, data=truncated_from, track_times=False)
            if low_information.any():
                data = low_information.astype(np.uint8)
                file.create_dataset(schema.LOW_INFORMATION, data=data, track_times=False)
            offset = schema.early_allocated(file, schema.EMBEDDINGS, (len(rows), rows.hidden_dim))
        writer = RowWriter(new, offset, rows.hidden_dim)
        for numbers, some in rows.iter_rows():
            writer.write(numbers, some)


def check_file(path: Path, expected_rows: int, order: IdOrder) -> Iterator[list[str]]:
    """
    Check one HDF5 file of rows, whose ids are the next of *order*, and yield its ids.

    Raises:
        ResultError: The file is damaged or holds something else.
    """
    with schema.open_checked(path) as file:
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
        self._file, self._rows = schema.open_embeddings(path)
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
        found: FloatArray = self._rows[:0] if is_nothing else self._rows[rows]
        return found

    def close(self) -> None:
        self._file.close()
