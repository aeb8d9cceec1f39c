"""
What the footer of a Parquet file states, read without pyarrow, which aborts the process on some damaged footers.

A footer is one struct in Thrift's compact protocol. Fields are known by their numbers in parquet.thrift of the format.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from virnucpro import durable
from virnucpro.errors import ResultError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    Fields = dict[int, Any]
    Kind = tuple[int, tuple[bytes, ...]]

_END = struct.Struct("<I4s")
"""Bytes of the footer, magic."""
_MAGIC = b"PAR1"
_MOST_FOOTER_BYTES = 16 << 20
"""Some 25,000 row groups of ours, or 25 TiB of rows."""
_MOST_DEPTH = 12

_FILE_FIELDS = {"version": 1, "schema": 2, "rows": 3, "groups": 4, "key_values": 5, "created_by": 6, "orders": 7}
_GROUP_FIELDS = {"columns": 1, "bytes": 2, "rows": 3, "offset": 5, "compressed_bytes": 6, "ordinal": 7}
_CHUNK_FIELDS = {"offset": 2, "about": 3}
_COLUMN_FIELDS = {
    "type": 1,
    "encodings": 2,
    "path": 3,
    "codec": 4,
    "values": 5,
    "bytes": 6,
    "compressed_bytes": 7,
    "first_page": 9,
    "encoding_stats": 13,
    "size_stats": 16,
}
_PLAIN, _RLE = 0, 3
"""Encodings of values and of levels in a file of ours; its codec is 0, uncompressed."""


@dataclass(frozen=True)
class Column:
    """One column of a row group."""

    num_values: int
    first_page: int
    """Byte of the file."""
    num_bytes: int


@dataclass(frozen=True)
class Group:
    """One row group."""

    num_rows: int
    columns: tuple[Column, ...]


def read_footer(path: Path, kinds: Sequence[Kind]) -> list[Group]:
    """
    Return the row groups of a file that is uncompressed and plainly encoded; each column's bytes are in the file once.

    *kinds*: number of the physical type, and path in the schema, of each column. ``ResultError`` where the file is of
    another kind.
    """
    try:
        with durable.regular_or_result_error(path) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            end = os.pread(file.fileno(), _END.size, max(0, size_bytes - _END.size))
            footer_bytes, magic = _END.unpack(end) if len(end) == _END.size else (0, b"")
            if magic != _MAGIC:
                raise ResultError(path, "damaged: does not end as a Parquet file does")
            start = size_bytes - _END.size - footer_bytes
            if footer_bytes > _MOST_FOOTER_BYTES or start < len(_MAGIC):
                raise ResultError(path, f"damaged: states a footer of {footer_bytes} bytes")
            data = os.pread(file.fileno(), footer_bytes, start)
    except FileNotFoundError as error:
        raise ResultError(path, "is missing") from error
    try:
        return _checked_groups(_Reader(data).whole(), start, kinds)
    except _RefusedError as error:
        raise ResultError(path, f"{error}: refused") from error
    except (IndexError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ResultError(path, "damaged: its footer is not that of a Parquet file") from error


class _RefusedError(Exception):
    """A footer that is readable and not one of ours."""


def _checked_groups(footer: Fields, end: int, kinds: Sequence[Kind]) -> list[Group]:
    _check_fields(footer, _FILE_FIELDS)
    groups, used = [], []
    for group in footer[_FILE_FIELDS["groups"]]:
        _check_fields(group, _GROUP_FIELDS)
        chunks = group[_GROUP_FIELDS["columns"]]
        if len(chunks) != len(kinds):
            raise _RefusedError(f"has {len(chunks)} columns, expected {len(kinds)}")
        columns = tuple(_checked_column(chunk, kind) for chunk, kind in zip(chunks, kinds, strict=True))
        groups.append(Group(_count(group[_GROUP_FIELDS["rows"]]), columns))
        used += [(column.first_page, column.first_page + column.num_bytes) for column in columns]
    at = len(_MAGIC)
    for first, after in sorted(used):
        if first < at or after > end:
            raise _RefusedError("states data that are not in the file")
        at = after
    if sum(group.num_rows for group in groups) != footer[_FILE_FIELDS["rows"]]:
        raise _RefusedError("has row groups that do not add up to its rows")
    return groups


def _checked_column(chunk: Fields, kind: Kind) -> Column:
    _check_fields(chunk, _CHUNK_FIELDS)
    about: Fields = chunk[_CHUNK_FIELDS["about"]]
    if (about[_COLUMN_FIELDS["type"]], about[_COLUMN_FIELDS["path"]]) != (kind[0], [*kind[1]]):
        raise _RefusedError(f"has other columns than {b'.'.join(kind[1]).decode()} of type {kind[0]} in its place")
    if about[_COLUMN_FIELDS["codec"]] != 0 or not {_PLAIN, _RLE}.issuperset(about[_COLUMN_FIELDS["encodings"]]):
        raise _RefusedError("is compressed or encoded, as no file of ours is")
    _check_fields(about, _COLUMN_FIELDS)
    if about[_COLUMN_FIELDS["bytes"]] != about[_COLUMN_FIELDS["compressed_bytes"]]:
        raise _RefusedError("is compressed")
    names = ("values", "first_page", "bytes")
    return Column(*(_count(about[_COLUMN_FIELDS[name]]) for name in names))


def _check_fields(fields: Fields, known: dict[str, int]) -> None:
    """Refuse what no file of ours has: encryption, other files, dictionaries, statistics, bloom filters."""
    if not fields.keys() <= set(known.values()):
        raise _RefusedError("has parts that no file of ours has")


def _count(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(number)
    return number


class _Reader:
    """Thrift's compact protocol; ``IndexError`` or ``ValueError`` where the bytes are not."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def whole(self) -> Fields:
        found = self._struct(0)
        if self._at != len(self._data):
            raise ValueError(self._at)
        return found

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _varint(self) -> int:
        found = shift = 0
        while shift < 64:
            byte = self._byte()
            found |= (byte & 0x7F) << shift
            if byte < 0x80:
                return found
            shift += 7
        raise ValueError(found)

    def _integer(self) -> int:
        number = self._varint()
        return (number >> 1) ^ -(number & 1)

    def _struct(self, depth: int) -> Fields:
        fields: Fields = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._integer()
            if number in fields:
                raise ValueError(number)
            fields[number] = self._value(head & 0x0F, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if depth > _MOST_DEPTH:
            raise ValueError(depth)
        match kind:
            case 1 | 2:
                return kind == 1
            case 3:
                return self._byte()
            case 4 | 5 | 6:
                return self._integer()
            case 7:
                return self._bytes(8)
            case 8:
                return self._bytes(self._varint())
            case 9 | 10:
                return self._list(depth + 1)
            case 12:
                return self._struct(depth + 1)
        raise ValueError(kind)

    def _list(self, depth: int) -> list[Any]:
        head = self._byte()
        size, kind = head >> 4 if head >> 4 < 15 else self._varint(), head & 0x0F
        if size > len(self._data) - self._at:
            raise ValueError(size)
        return [self._byte() == 1 if kind in (1, 2) else self._value(kind, depth) for _ in range(size)]

    def _bytes(self, size: int) -> bytes:
        if size > len(self._data) - self._at:
            raise ValueError(size)
        self._at += size
        return self._data[self._at - size : self._at]
