"""
The index of a sharded result: from an id to its row, without an id in memory.

It is one file: a preamble, a JSON text about the shards, a directory, and a table of (hash of the id, row) sorted by
hash. The first bits of a hash are the number of its bucket in the table; the directory has the end of each bucket and
its checksum. Opening reads the directory, 12 bytes for up to 256 rows; finding an id reads one bucket, some 4 KiB.
The hash only narrows the search: callers compare the id in the shard, so that ids of the same hash do no harm.

Little-endian; 16 bytes a row, and the directory. The same ids and shards give the same bytes, and no byte is used
without a check of its checksum. This module knows hashes and rows, not HDF5.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from itertools import pairwise
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from virnucpro import durable
from virnucpro.errors import ResultError
from virnucpro.run_folders import only_regular, read_at

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from virnucpro.arrays import IntArray

    HashArray = np.ndarray[Any, np.dtype[np.uint64]]
    EntryArray = np.ndarray[Any, np.dtype[np.void]]

MAGIC = b"VNPIDIDX"
VERSION = 1
_PREAMBLE = struct.Struct("<8sIIQQ")
"""Magic, version, bits of the directory, rows, bytes of the description."""
_CHECKSUM = struct.Struct("<I")
"""CRC-32 of preamble, description and directory, in this order; written after the preamble."""
_BUCKET = np.dtype([("end", "<u8"), ("crc32", "<u4")])
"""Where a bucket of the table ends, in entries, and the CRC-32 of its bytes."""
_ENTRY = np.dtype([("hash", "<u8"), ("row", "<u8")])
_BUCKET_ENTRIES = 256
"""Most entries of a bucket on average."""
_BUCKETS_AT_ONCE = 4096
"""Buckets made or compared at a time, which bounds the memory of it."""
_NUMBERS = ("hidden_dim", "rows_per_shard")


def id_hash(sequence_id: str) -> bytes:
    return hashlib.blake2b(sequence_id.encode("utf-8"), digest_size=8).digest()


def id_hashes(sequence_ids: Iterable[str]) -> HashArray:
    """Return the hash of each id, uint64 (ids,)."""
    return np.frombuffer(b"".join(map(id_hash, sequence_ids)), dtype="<u8")


def bytes_at_most(num_rows: int, num_shards: int) -> int:
    """Return the most bytes that an index of *num_rows* ids in *num_shards* shards takes."""
    head_bytes = _PREAMBLE.size + _CHECKSUM.size + 256 + 24 * num_shards
    return head_bytes + (_BUCKET.itemsize << _directory_bits(num_rows)) + _ENTRY.itemsize * num_rows


def write_id_index(
    path: Path, hashes: HashArray, *, hidden_dim: int, rows_per_shard: int, shard_bytes: list[int]
) -> None:
    """Write the index of a complete result; *hashes*: uint64, of each id; *rows_per_shard*: of all but the last."""
    description = {"hidden_dim": hidden_dim, "rows_per_shard": rows_per_shard, "shard_bytes": shard_bytes}
    text = json.dumps(description, sort_keys=True).encode("ascii")
    order = np.argsort(hashes, kind="stable")
    bits = _directory_bits(len(hashes))
    directory = np.empty(1 << bits, dtype=_BUCKET)
    directory["end"] = _bucket_ends(hashes, order, bits)
    preamble = _PREAMBLE.pack(MAGIC, VERSION, bits, len(hashes), len(text))
    with durable.replacing(path) as file:
        file.write(bytes(len(preamble) + _CHECKSUM.size + len(text) + directory.nbytes))
        for buckets, entries in _table(hashes, order, directory["end"]):
            file.write(entries.tobytes())
            bounds = _bounds(directory["end"], buckets)
            directory["crc32"][buckets] = [
                zlib.crc32(entries[start - bounds[0] : end - bounds[0]].tobytes()) for start, end in pairwise(bounds)
            ]
        rest = text + directory.tobytes()
        file.write_at(preamble + _CHECKSUM.pack(zlib.crc32(preamble + rest)) + rest, 0)


class IdIndex:
    """An open index of ids, described as by ``write_id_index``; ``ResultError`` where it is missing or damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_rows: int
        try:
            self._file: BinaryIO = open(path, "rb", buffering=0, opener=only_regular)  # noqa: SIM115  until close
        except FileNotFoundError as error:
            raise ResultError(path, "is missing") from error
        except OSError as error:
            raise ResultError(path, error.strerror or str(error)) from error
        try:
            self._read_head()
        except BaseException:
            self.close()
            raise

    def _read_head(self) -> None:
        head_bytes = _PREAMBLE.size + _CHECKSUM.size
        preamble = self._pread(_PREAMBLE.size, 0)
        magic, version, bits, self.num_rows, text_bytes = _PREAMBLE.unpack(preamble)
        if magic != MAGIC or version != VERSION:
            raise ResultError(self.path, f"is no index of ids of version {VERSION}")
        size_bytes = os.fstat(self._file.fileno()).st_size
        rest_bytes = size_bytes - head_bytes - _ENTRY.itemsize * self.num_rows
        if bits != _directory_bits(self.num_rows) or rest_bytes != text_bytes + (_BUCKET.itemsize << bits):
            raise ResultError(self.path, f"damaged: {size_bytes} bytes are not what it says it has")
        (checksum,) = _CHECKSUM.unpack(self._pread(_CHECKSUM.size, _PREAMBLE.size))
        rest = self._pread(rest_bytes, head_bytes)
        if zlib.crc32(preamble + rest) != checksum:
            raise ResultError(self.path, "damaged: its directory does not match its checksum")
        self._bits = bits
        self._directory = np.frombuffer(rest, dtype=_BUCKET, offset=text_bytes)
        self._table_at = head_bytes + rest_bytes
        ends = self._directory["end"]
        if (ends[1:] < ends[:-1]).any() or ends[-1] != self.num_rows:
            raise ResultError(self.path, "its directory is not that of its table")
        self._describe(rest[:text_bytes])

    def _describe(self, text: bytes) -> None:
        try:
            description = json.loads(text)
            self.hidden_dim, self.rows_per_shard = (int(description[name]) for name in _NUMBERS)
            self.shard_bytes = [int(item) for item in description["shard_bytes"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ResultError(self.path, f"does not describe its shards ({error})") from error
        shards = max(1, -(-self.num_rows // max(1, self.rows_per_shard)))
        if self.rows_per_shard < 1 or self.hidden_dim < 0 or len(self.shard_bytes) != shards:
            raise ResultError(self.path, "describes shards that do not add up to its rows")

    def candidates(self, sequence_id: str) -> list[int]:
        """Return the rows that an id may have by its hash: usually one, or none where it has no row."""
        wanted = int.from_bytes(id_hash(sequence_id), "little")
        bucket = wanted >> (64 - self._bits)
        entries = self._entries(slice(bucket, bucket + 1))
        rows: list[int] = entries["row"][entries["hash"] == wanted].tolist()
        return rows

    def check(self, hashes: HashArray) -> None:
        """Raise ``ResultError`` unless the index as a whole has these *hashes*, uint64 (num_rows,)."""
        order = np.argsort(hashes, kind="stable")
        ends = _bucket_ends(hashes, order, self._bits)
        is_same = len(hashes) == self.num_rows and np.array_equal(self._directory["end"], ends)
        if not is_same or any((self._entries(some) != wanted).any() for some, wanted in _table(hashes, order, ends)):
            raise ResultError(self.path, "does not lead to the ids of its shards")

    def _entries(self, buckets: slice) -> EntryArray:
        """Return the entries of neighbouring buckets, each compared with its checksum."""
        size = _ENTRY.itemsize
        bounds = _bounds(self._directory["end"], buckets)
        data = self._pread((bounds[-1] - bounds[0]) * size, self._table_at + bounds[0] * size)
        checksums = self._directory["crc32"][buckets].tolist()
        for (start, end), checksum in zip(pairwise(bounds), checksums, strict=True):
            if zlib.crc32(memoryview(data)[(start - bounds[0]) * size : (end - bounds[0]) * size]) != checksum:
                raise ResultError(self.path, f"damaged: entries {start} to {end - 1} do not match their checksum")
        entries = np.frombuffer(data, dtype=_ENTRY)
        if (entries["row"] >= self.num_rows).any():
            raise ResultError(self.path, "leads to rows that the result does not have")
        return entries

    def _pread(self, num_bytes: int, at_bytes: int) -> bytes:
        data = read_at(self._file.fileno(), num_bytes, at_bytes)
        if len(data) < num_bytes:
            raise ResultError(self.path, "damaged: truncated")
        return data

    @property
    def is_closed(self) -> bool:
        return self._file.closed

    def close(self) -> None:
        self._file.close()


def _directory_bits(num_rows: int) -> int:
    return max(0, -(-num_rows // _BUCKET_ENTRIES) - 1).bit_length()


def _bucket_ends(hashes: HashArray, order: IntArray, bits: int) -> IntArray:
    """Return where each bucket ends in the table, in entries; *order* sorts the hashes."""
    next_buckets = np.arange(1, 1 << bits, dtype=np.uint64) << np.uint64(64 - bits if bits else 0)
    return np.append(np.searchsorted(hashes, next_buckets, sorter=order), len(hashes))


def _bounds(ends: np.ndarray[Any, np.dtype[Any]], buckets: slice) -> list[int]:
    """Return where neighbouring buckets begin, and where the last one ends."""
    return [int(ends[buckets.start - 1]) if buckets.start else 0, *ends[buckets].tolist()]


def _table(
    hashes: HashArray, order: IntArray, ends: np.ndarray[Any, np.dtype[Any]]
) -> Iterator[tuple[slice, EntryArray]]:
    """Yield the entries of the table, a bounded number of buckets at a time, and which buckets these are."""
    for first in range(0, len(ends), _BUCKETS_AT_ONCE):
        buckets = slice(first, min(first + _BUCKETS_AT_ONCE, len(ends)))
        bounds = _bounds(ends, buckets)
        rows = order[bounds[0] : bounds[-1]]
        entries = np.empty(len(rows), dtype=_ENTRY)
        entries["hash"], entries["row"] = hashes[rows], rows
        yield buckets, entries
