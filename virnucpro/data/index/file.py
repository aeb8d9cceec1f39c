"""
The file of a sequence index: columns end to end, read through a memory map, written whole or not at all.

Layout: a preamble (magic, version, sizes, checksums), the columns of ``COLUMNS``, the ids end to end in the order of
the input, the skipped records as lines of text, and a JSON text that describes the input files. Little-endian; 69 bytes
a record besides its id. This module knows the bytes of the file, not what the columns mean.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from virnucpro import durable
from virnucpro.errors import IndexFormatError
from virnucpro.run_folders import only_regular

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    Column = np.ndarray[Any, np.dtype[Any]]

MAGIC = b"VNPINDEX"
VERSION = 2
_PREAMBLE = struct.Struct("<8sIIQQQQ32s")
"""Magic, version, CRC-32 of the description, records, bytes of ids, of skipped records, of the description, sha256."""
_HASHED_BYTES_AT_ONCE = 1 << 24

COLUMNS = (
    ("offsets", "<i8", 1),
    ("record_bytes", "<i8", 1),
    ("lengths", "<i8", 1),
    ("input_rows", "<i8", 1),
    ("representatives", "<i8", 1),
    ("id_ends", "<i8", 1),
    ("sequence_hashes", "|u1", 16),
    ("file_numbers", "<u4", 1),
    ("low_information", "|u1", 1),
)
"""Name, dtype and width of each column, in the order of the file. ``id_ends`` is by row of the input, all others by
position in the sorted index."""


class MappedIndex(NamedTuple):
    columns: dict[str, Column]
    ids: memoryview
    """The ids in the order of the input, end to end, UTF-8."""
    skipped: memoryview
    """The skipped records, for ``read_skipped``."""
    description: dict[str, Any]
    sha256: str
    """Hex, of everything after the preamble, as the file states it."""
    mapping: mmap.mmap


def write_index(
    path: Path,
    num_records: int,
    columns: Mapping[str, Callable[[], Column]],
    ids: Iterable[bytes],
    skipped: Iterable[bytes],
    description: dict[str, Any],
) -> None:
    """
    Write an index file, whole or not at all.

    *columns*: each makes its column when it is written, so that one at a time is in memory. *ids* (in the order of the
    input) and *skipped* (text) come in pieces; *description* is ready for JSON.
    """
    digest = hashlib.sha256()
    text = json.dumps(description, sort_keys=True).encode("ascii")
    with durable.replacing(path) as file:
        file.write(bytes(_PREAMBLE.size))
        for name, dtype, width in COLUMNS:
            data = np.ascontiguousarray(columns[name](), dtype=dtype)
            assert data.size == num_records * width, name
            digest.update(data.data)
            file.write(data.data)
        sizes = []
        for pieces in (ids, skipped, [text]):
            sizes.append(0)
            for piece in pieces:
                digest.update(piece)
                sizes[-1] += file.write(piece)
        preamble = _PREAMBLE.pack(MAGIC, VERSION, zlib.crc32(text), num_records, *sizes, digest.digest())
        file.write_at(preamble, 0)


def map_index(path: Path) -> MappedIndex:
    """Map an index file; IndexFormatError where it is missing, of another version, or not of the stated size."""
    try:
        with open(path, "rb", opener=only_regular) as file:
            size = os.fstat(file.fileno()).st_size
            if size < _PREAMBLE.size:
                raise IndexFormatError(path, "truncated")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise IndexFormatError(path, error.strerror or str(error)) from error
    magic, version, checksum, num_records, id_bytes, skipped_bytes, text_bytes, digest = _PREAMBLE.unpack_from(mapped)
    if magic != MAGIC:
        raise IndexFormatError(path, "it does not start with an index's magic")
    if version != VERSION:
        raise IndexFormatError(path, f"version {version} instead of {VERSION}")
    columns: dict[str, Column] = {}
    at = _PREAMBLE.size
    record_bytes = sum(np.dtype(dtype).itemsize * width for _, dtype, width in COLUMNS)
    if size != at + num_records * record_bytes + id_bytes + skipped_bytes + text_bytes:
        raise IndexFormatError(path, f"{size} bytes do not match its header")
    for name, dtype, width in COLUMNS:
        column = np.frombuffer(mapped, dtype=dtype, count=num_records * width, offset=at)
        at += column.nbytes
        columns[name] = column if width == 1 else column.reshape(num_records, width)
    ids = memoryview(mapped)[at : at + id_bytes]
    skipped = memoryview(mapped)[at + id_bytes : size - text_bytes]
    text = mapped[size - text_bytes : size]
    if zlib.crc32(text) != checksum:
        raise IndexFormatError(path, "its description is damaged")
    return MappedIndex(columns, ids, skipped, json.loads(text), digest.hex(), mapped)


def content_is_intact(path: Path) -> bool:
    """Whether an index file is readable and has the sha256 that it states."""
    try:
        with open(path, "rb", opener=only_regular) as file:
            preamble = file.read(_PREAMBLE.size)
            digest = hashlib.sha256()
            while data := file.read(_HASHED_BYTES_AT_ONCE):
                digest.update(data)
    except OSError:
        return False
    return len(preamble) == _PREAMBLE.size and bool(_PREAMBLE.unpack(preamble)[-1] == digest.digest())
