"""
A result in one Apache Parquet file: ``id``, and ``embedding``, a list of float32 of fixed size.

Equal rows give equal bytes for the same pyarrow: nothing is compressed, and no date is written. A row group has the
rows of a shard, at most 1 GiB; one at a time is in memory while it is written or read by id. A file of which no
``run.json`` has the sha256 is read in a child process first: some damage makes pyarrow abort.
"""

from __future__ import annotations

import importlib
import io
import os
import threading
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from virnucpro import durable
from virnucpro.errors import ConfigurationError, ResultError, printable
from virnucpro.in_child import read_in_child
from virnucpro.store import schema
from virnucpro.store.manifest import is_recorded
from virnucpro.store.results.hdf5 import most_rows_of_shard, shard_bounds
from virnucpro.store.results.result import IdOrder, Result, RowNumbers, check_finite, check_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from virnucpro.arrays import FloatArray, IntArray
    from virnucpro.store.results.result import ExpectedRows, Hosts, NewRows


ID, EMBEDDING = "id", "embedding"
_GROUP_BYTES = 1 << 12
"""Most bytes of a row group in the footer."""
_READ_BYTES = 1 << 20


class ParquetFile(Result):
    suffix = ".parquet"

    @classmethod
    def require(cls) -> None:
        if find_spec("pyarrow") is None:
            raise ConfigurationError("result form parquet needs pyarrow: pip install 'virnucpro[parquet]'")

    @staticmethod
    def bytes_at_most(num_rows: int, hidden_dim: int, *, id_bytes: int) -> int:
        groups = len(shard_bounds(num_rows, rows_per_shard=most_rows_of_shard(hidden_dim)))
        # a value has a bit that says whether a list begins; pages have heads, ids their lengths
        row_bytes = hidden_dim * 4 + hidden_dim // 4 + 64
        return num_rows * row_bytes + id_bytes + groups * _GROUP_BYTES + schema.OVERHEAD_BYTES

    def write(
        self,
        rows: NewRows,
        *,
        give_way: Callable[[int], None],
        hosts: Hosts | None = None,  # noqa: ARG002  one file has one writer
    ) -> dict[Path, str]:
        most_bytes = self.bytes_at_most(len(rows), rows.hidden_dim, id_bytes=rows.id_bytes)
        give_way(most_bytes)
        with durable.replacing(self.path) as new:
            new.reserve(most_bytes)
            with _writing(new, rows.hidden_dim) as write_group:
                for bounds in shard_bounds(len(rows), rows_per_shard=most_rows_of_shard(rows.hidden_dim)):
                    if len(bounds):
                        write_group(rows.subset(bounds))
        return {}

    def validate(self, expected: ExpectedRows, *, hosts: Hosts | None = None) -> None:  # noqa: ARG002
        self.check_bytes(self.path, expected)
        file = _OpenFile(self.path, is_known=expected.files is not None)
        try:
            check_rows(file.num_rows, expected.num_rows, self.path)
            order = IdOrder(expected)
            for names in file.iter_ids():
                order.check(names, self.path)
            first = 0
            for rows in file.iter_rows():
                check_finite(rows, first, len(rows), self.path)
                first += len(rows)
            check_rows(first, expected.num_rows, self.path)
        finally:
            file.close()

    def open(self) -> _ParquetRows:
        return _ParquetRows(self.path)


def _arrow() -> Any:
    """Return pyarrow, an optional extra that takes long to import."""
    ParquetFile.require()
    return importlib.import_module("pyarrow")


def _parquet() -> Any:
    return importlib.import_module("pyarrow.parquet")


def _schema(hidden_dim: int) -> Any:
    arrow = _arrow()
    numbers = arrow.list_(arrow.field("element", arrow.float32(), nullable=False), hidden_dim)
    return arrow.schema(
        [arrow.field(ID, arrow.string(), nullable=False), arrow.field(EMBEDDING, numbers, nullable=False)]
    )


@contextmanager
def _writing(new: durable.NewFile, hidden_dim: int) -> Iterator[Callable[[NewRows], None]]:
    """Yield what writes a row group; ends the file when the block ends well."""
    arrow, columns = _arrow(), _schema(hidden_dim)

    def write_group(rows: NewRows) -> None:
        numbers = np.empty((len(rows), hidden_dim), dtype="<f4")
        for targets, some in rows.iter_rows():
            numbers[targets] = some
        kind, step = columns.field(EMBEDDING).type, schema.rows_at_once(hidden_dim)
        pieces = [numbers[start : start + step].reshape(-1) for start in range(0, len(rows), step)]
        lists = [arrow.FixedSizeListArray.from_arrays(arrow.array(piece), type=kind) for piece in pieces]
        ids = arrow.array([name for names in rows.iter_ids() for name in names], arrow.string())
        table = arrow.Table.from_arrays([ids, arrow.chunked_array(lists, type=kind)], schema=columns)
        writer.write_table(table, row_group_size=len(rows))

    with parquet_writer(
        new,
        columns,
        version="2.6",
        compression="none",
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
    ) as writer:
        yield write_group


@contextmanager
def parquet_writer(file: durable.NewFile, columns: Any, **options: Any) -> Iterator[Any]:
    """Yield pyarrow's writer of *file*, whose space may be reserved; ends the file when the block ends well."""
    sink = _Sink(file)
    writer = _parquet().ParquetWriter(_arrow().PythonFile(sink, mode="w"), columns, **options)
    try:
        yield writer
        writer.close()
    except BaseException:
        writer.is_open, sink.is_over = False, True  # else pyarrow writes a footer when the writer is collected
        raise
    os.ftruncate(file.fileno(), sink.num_bytes)


class _Sink(io.RawIOBase):
    """A new file as pyarrow writes to one."""

    def __init__(self, file: durable.NewFile) -> None:
        super().__init__()
        self._file = file
        self.num_bytes = 0
        self.is_over = False

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        num_bytes = memoryview(data).nbytes
        if not self.is_over:
            self._file.write_at(data, self.num_bytes)
            self.num_bytes += num_bytes
        return num_bytes


class _OpenFile:
    """An open Parquet file of this form; ``ResultError`` where it is missing, damaged or another one."""

    def __init__(self, path: Path, *, is_known: bool) -> None:
        self.path = path
        try:
            durable.regular_or_result_error(path).close()
        except FileNotFoundError as error:
            raise ResultError(path, "is missing") from error
        _arrow()
        _parquet()  # which the child must not import
        if not is_known:
            read_in_child(path, _read_through)
        with self._damage_named():
            self._file = _parquet().ParquetFile(
                _arrow().OSFile(os.fspath(path)),
                pre_buffer=False,
                buffer_size=_READ_BYTES,
                page_checksum_verification=True,
            )
        try:
            with self._damage_named():
                self.hidden_dim = self._checked_width()
                about = self._file.metadata
                groups = [about.row_group(number) for number in range(about.num_row_groups)]
                self.starts: list[int] = np.cumsum([0, *(group.num_rows for group in groups)]).tolist()
                """Number of the first row of each row group, and of all rows."""
        except ResultError:
            self.close()
            raise

    @property
    def num_rows(self) -> int:
        return self.starts[-1]

    def iter_ids(self) -> Iterator[list[str]]:
        """Yield the ids in order, a bounded number at a time."""
        filled = 0
        with self._damage_named():
            for batch in self._file.iter_batches(schema.IDS_PER_WRITE, columns=[ID], use_threads=False):
                filled += batch.num_rows
                yield batch.column(0).to_pylist()
        check_rows(filled, self.num_rows, self.path)

    def iter_rows(self) -> Iterator[FloatArray]:
        """Yield the rows in order, a bounded number of bytes at a time."""
        step = schema.rows_at_once(self.hidden_dim)
        with self._damage_named():
            for batch in self._file.iter_batches(step, columns=[EMBEDDING], use_threads=False):
                yield self._numbers(batch.column(0))

    def group(self, number: int) -> FloatArray:
        """Return the rows of a row group, float32 (rows, hidden_dim)."""
        with self._damage_named():
            table = self._file.read_row_group(number, columns=[EMBEDDING], use_threads=False)
            rows = self._numbers(table.column(0).combine_chunks())
        check_rows(len(rows), self.starts[number + 1] - self.starts[number], self.path)
        return rows

    def close(self) -> None:
        self._file.close(force=True)

    def _numbers(self, lists: Any) -> FloatArray:
        found: FloatArray = lists.flatten().to_numpy().reshape(len(lists), self.hidden_dim)
        return found

    def _checked_width(self) -> int:
        columns = self._file.schema_arrow
        width = getattr(columns.types[1], "list_size", -1) if columns.names == [ID, EMBEDDING] else -1
        if width < 0 or not columns.equals(_schema(width)):
            found = printable(", ".join(f"{field.name}: {field.type}" for field in columns)[:200])
            wanted = f"{ID}: string and {EMBEDDING}: fixed_size_list of float32, neither with nulls"
            raise ResultError(self.path, f"has the columns {found}; expected {wanted}")
        about = self._file.metadata
        for column in (
            about.row_group(number).column(place) for number in range(about.num_row_groups) for place in (0, 1)
        ):
            if column.compression != "UNCOMPRESSED" or not {"PLAIN", "RLE"}.issuperset(column.encodings):
                raise ResultError(self.path, "is compressed or encoded, as no file of ours is: refused")
        return int(width)

    @contextmanager
    def _damage_named(self) -> Iterator[None]:
        try:
            yield
        except ResultError:
            raise
        except (_arrow().ArrowException, OSError, ValueError) as error:
            raise ResultError(self.path, f"damaged: Parquet cannot read it ({printable(str(error))})") from error


def _read_through(path: Path) -> None:
    """Read all that a reader may read."""
    file = _OpenFile(path, is_known=True)
    for _ in file.iter_ids():
        pass
    for number in range(len(file.starts) - 1):
        file.group(number)


class _ParquetRows(RowNumbers):
    """The rows of a Parquet file; the last row group read stays in memory. May be used from several threads."""

    def __init__(self, path: Path) -> None:
        self._file = _OpenFile(path, is_known=is_recorded(path))
        try:
            super().__init__(tuple(name for names in self._file.iter_ids() for name in names), path)
        except ResultError:
            self._file.close()
            raise
        self._lock = threading.Lock()
        self._read_last: tuple[int, FloatArray] | None = None
        self._is_closed = False

    @property
    def hidden_dim(self) -> int:
        return self._file.hidden_dim

    def read(self, rows: slice | IntArray) -> FloatArray:
        numbers = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        found = np.empty((len(numbers), self.hidden_dim), dtype=np.float32)
        bounds = np.searchsorted(numbers, self._file.starts).tolist()
        for group, (first, end) in enumerate(pairwise(bounds)):
            if first < end:
                found[first:end] = self._group(group)[numbers[first:end] - self._file.starts[group]]
        return found

    def _group(self, number: int) -> FloatArray:
        with self._lock:
            if self._is_closed:
                raise ValueError(f"{self._file.path} is closed")
            if self._read_last is None or self._read_last[0] != number:
                self._read_last = None  # before another one is read
                self._read_last = (number, self._file.group(number))
            return self._read_last[1]

    def close(self) -> None:
        with self._lock:
            self._is_closed, self._read_last = True, None
            self._file.close()
