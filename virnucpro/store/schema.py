"""
What is inside our HDF5 files, and what an HDF5 file must be before we read it.

Three kinds of file share one schema of rows: parts and shards (with the block bookkeeping that lets a run resume) and
the final ``embeddings.h5`` (without it). Everything is contiguous, uncompressed and free of dates, so that equal rows
give equal bytes.

This module knows names, types and the checks on untrusted files. It does not know blocks, plans or runs.
"""

from __future__ import annotations

import errno
import os
import threading
from contextlib import contextmanager
from enum import IntEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from virnucpro.errors import ResultError
from virnucpro.in_child import read_in_child
from virnucpro.run_folders import only_regular

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from virnucpro.arrays import FloatArray, IntArray
    from virnucpro.durable import NewFile


EMBEDDINGS = "embeddings"
"""float32 (num_sequences, hidden_dim)."""
SEQUENCE_IDS = "sequence_ids"
"""Variable-length UTF-8 (num_sequences,)."""
TRUNCATED_FROM = "truncated_from"
"""int64 (num_sequences,), only in files with a truncated sequence: its residues before, 0 where it is whole."""
LOW_INFORMATION = "low_information"
"""uint8 (num_sequences,), only in files that have one: 1 where a sequence has only unknown residues (X) or nucleotides
(N), so that its row carries no information."""
POSITIONS = "positions"
"""int64 (num_sequences,): position of each row's sequence in the sequence index. Parts and shards only."""
BLOCKS = "blocks"
"""int64 (num_blocks, 3): block number, its rows, its ``BlockOrigin``; rows are in the order of this table. Parts and
shards only."""
PLAN_FINGERPRINT = "plan_fingerprint"
"""Attribute: the plan that the rows were computed by. Parts and shards only."""
PROCESSORS = "processors"
"""Attribute, JSON: the processors that computed the rows, and their hosts. Parts and shards only."""


class BlockOrigin(IntEnum):
    """How the rows of a block were computed, which decides how exactly they can be reproduced."""

    COMPUTED = 0
    """In one forward pass over the whole block: the same bytes again for the same plan, device type and versions."""
    RESPLIT = 1
    """In several passes, because the whole block did not fit the device: the same numbers within the tolerance."""
    CACHED = 2
    """From the embedding cache, computed there in other batches: the same numbers within the tolerance."""
    WIDENED = 3
    """In one pass, and in float32 what overflowed in it: the same bytes again; the log of the worker names these."""


UTF8 = h5py.string_dtype(encoding="utf-8")
_REFERENCE = np.dtype([("bytes", "<u4"), ("place", "V12")])
"""An id in the dataset: the length of the text, and where the text is."""
OVERHEAD_BYTES = 1 << 16
"""Most bytes of an HDF5 file besides its rows and ids."""
IDS_PER_WRITE = 8192
"""Ids converted at a time."""
_ROWS_BYTES = 4 << 20
"""Bytes of embeddings read or checked at a time."""
_GAP_BYTES = 1 << 14
"""Bytes between two rows that are read rather than skipped: about what a second read costs."""
_UNBUFFERED = "virnucpro-unbuffered"
"""Driver of h5py that writes data at once: HDF5 keeps small writes until their dataset is closed, where h5py cannot
raise that one failed."""
h5py.register_driver(_UNBUFFERED, lambda access: access.set_sieve_buf_size(0))


def open_hdf5(path: Path | str, mode: str, **driver: Any) -> h5py.File:
    """Open HDF5 without its own lock, which some file systems lack; the only place that calls ``h5py.File``."""
    try:
        return h5py.File(path, mode, locking=False, **driver)
    except OSError as error:
        if mode == "r" and not os.path.lexists(path):  # removed while HDF5 opened it, which has no errno then
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path)) from error
        raise


def open_checked(path: Path, *, is_known: bool = False) -> h5py.File:
    """
    Open an HDF5 file that may come from anywhere.

    *is_known*: it was written just now, or its sha256 is the recorded one; any other file is read in a child process
    first.

    Raises:
        FileNotFoundError: There is no such file.
        ResultError: It does not open, or it holds anything but hard links to plain, internally stored datasets.
    """
    try:
        os.close(only_regular(os.fspath(path), os.O_RDONLY))  # HDF5 would wait for a pipe's writer
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ResultError(path, f"not a readable HDF5 file ({error})") from error
    if not is_known:
        read_in_child(path, _read_through)
    with damage_named(path):
        file = open_hdf5(path, "r")
        try:
            _refuse_foreign_storage(file, path)
        except BaseException:
            file.close()
            raise
    return file


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Turn what h5py raises of a damaged or unreadable file into ResultError."""
    try:
        yield
    except ResultError:
        raise
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError) as error:
        raise ResultError(path, f"not a readable HDF5 file, or damaged ({error})") from error


def _read_through(path: Path) -> None:
    """Read all that a reader may ask HDF5 for, except rows: these are plain bytes at a place that was checked."""
    with open_checked(path, is_known=True) as file, damage_named(path):
        embeddings_of(file, path)
        for name in {BLOCKS, POSITIONS} & set(file):
            file[name][()]
        file.attrs.get(PLAN_FINGERPRINT)
        file.attrs.get(PROCESSORS)
        for _ in iter_sequence_ids(file, path):
            pass


@contextmanager
def created(new: NewFile, *, most_bytes: int) -> Iterator[h5py.File]:
    """
    Begin an HDF5 file in *new* and close it when the block ends.

    HDF5 reports a full disk late, and can then crash at the end of the process. So the file begins as an image made
    in memory, and its space (*most_bytes*, of ``bytes_at_most``) is reserved before HDF5 opens it.
    """
    with in_memory("empty") as empty:
        empty.flush()
        new.write(empty.id.get_file_image())
    new.reserve(most_bytes)
    with open_hdf5(new.path, "r+", driver=_UNBUFFERED) as file:
        yield file
        file.flush()  # what fails while HDF5 closes a file is not raised


def in_memory(name: str) -> h5py.File:
    """Begin a file without a path. HDF5 takes two in memory of one name for the same: each thread has its own."""
    return open_hdf5(f"{name} {threading.get_ident()}", "w", driver="core", backing_store=False)


def write_ids(file: h5py.File, num_rows: int, ids: Iterable[list[str]]) -> None:
    dataset = file.create_dataset(SEQUENCE_IDS, (num_rows,), dtype=UTF8, track_times=False)
    filled = 0
    for names in ids:
        dataset[filled : filled + len(names)] = names
        filled += len(names)


def bytes_at_most(num_sequences: int, hidden_dim: int, *, id_bytes: int) -> int:
    """
    Return the most bytes that a file of rows takes; *id_bytes* is of all ids together.

    An id takes 16 bytes and its own, up to the next multiple of 8, in heaps of 4096 bytes with a head of 16, of which
    an id of 1024 bytes that did not fit leaves 1040 unused; and a reference of 16. Each row has up to two integers.
    """
    in_heaps = (id_bytes + num_sequences * (16 + 7)) * 4096 // (4096 - 16 - 1040)
    return num_sequences * (hidden_dim * 4 + 16 + 2 * 8) + in_heaps + OVERHEAD_BYTES


def _refuse_foreign_storage(file: h5py.File, path: Path) -> None:
    for name in file:
        if not isinstance(file.get(name, getlink=True), h5py.HardLink):
            raise ResultError(path, f"{name!r} is a link to something outside the file: refused")
        item = file[name]
        if not isinstance(item, h5py.Dataset) or item.is_virtual or item.external:
            raise ResultError(path, f"{name!r} is not a plain dataset stored in the file: refused")
        if item.chunks is not None or item.id.get_create_plist().get_nfilters():
            raise ResultError(path, f"{name!r} is stored in chunks or through a filter, as no file of ours is: refused")
        _refuse_absent_storage(file, item, path)


def _refuse_absent_storage(file: h5py.File, item: h5py.Dataset, path: Path) -> None:
    """Refuse a dataset that states more elements than the file has: reading it would take all memory."""
    stated_bytes = item.size * item.id.get_type().get_size() if item.size else 0
    if not stated_bytes or item.id.get_create_plist().get_layout() == h5py.h5d.COMPACT:
        return
    offset = item.id.get_offset()
    if offset is None or offset + stated_bytes > file.id.get_filesize():
        raise ResultError(path, f"{item.name!r} states {item.shape} elements that are not in the file: refused")


def embeddings_of(file: h5py.File, path: Path) -> h5py.Dataset:
    """Return the dataset of embeddings, float32 with one id for each row; ResultError where there is none such."""
    rows = _dataset(file, EMBEDDINGS, path)
    ids = _dataset(file, SEQUENCE_IDS, path)
    if rows.dtype != np.float32 or rows.ndim != 2:
        raise ResultError(path, f"{EMBEDDINGS!r} is {rows.dtype} {rows.shape}, expected float32 (sequences, width)")
    if h5py.check_string_dtype(ids.dtype) is None or ids.shape != (rows.shape[0],):
        raise ResultError(
            path, f"{SEQUENCE_IDS!r} has shape {ids.shape}, expected one id for each of {rows.shape[0]} rows"
        )
    if ids.size and ids.dtype.hasobject and _id_bytes(ids, path) > file.id.get_filesize():
        raise ResultError(path, f"{SEQUENCE_IDS!r} has more text than the file has bytes: refused")
    return rows


def _id_bytes(ids: h5py.Dataset, path: Path) -> int:
    """Return the UTF-8 bytes of all ids; many ids may refer to one long text."""
    offset = ids.id.get_offset()
    if offset is None or ids.id.get_storage_size() != ids.size * _REFERENCE.itemsize:
        raise ResultError(path, f"{SEQUENCE_IDS!r} is stored as in no file of ours: refused")
    step, total = 1 << 20, 0
    for at in range(0, ids.size, step):
        place = offset + at * _REFERENCE.itemsize
        total += int(np.fromfile(path, _REFERENCE, min(step, ids.size - at), offset=place)["bytes"].sum(dtype="u8"))
    return total


def open_embeddings(path: Path, *, is_known: bool = False) -> tuple[h5py.File, h5py.Dataset]:
    """Return an open file, which the caller closes, and its ``embeddings_of``; ResultError where it has none."""
    try:
        file = open_checked(path, is_known=is_known)
    except FileNotFoundError as error:
        raise ResultError(path, "is missing") from error
    try:
        with damage_named(path):
            return file, embeddings_of(file, path)
    except ResultError:
        file.close()
        raise


def integers_of(file: h5py.File, name: str, path: Path, *, shape: tuple[int | None, ...]) -> IntArray:
    """Read an int64 dataset; ResultError where it is missing or of another shape. None admits any length there."""
    data = _dataset(file, name, path)
    fits = len(shape) == data.ndim and all(
        want is None or want == have for want, have in zip(shape, data.shape, strict=True)
    )
    if data.dtype != np.int64 or not fits:
        raise ResultError(path, f"{name!r} is {data.dtype} {data.shape}, expected int64 {shape}")
    return np.asarray(data[()])


def iter_sequence_ids(file: h5py.File, path: Path) -> Iterator[list[str]]:
    """Yield the ids in order, at most ``IDS_PER_WRITE`` at a time. Raises ResultError: an id is not UTF-8."""
    for start in range(0, _dataset(file, SEQUENCE_IDS, path).shape[0], IDS_PER_WRITE):
        yield sequence_ids_in(file, path, slice(start, start + IDS_PER_WRITE))


def sequence_ids_in(file: h5py.File, path: Path, rows: slice) -> list[str]:
    """Return the ids of neighbouring rows. Raises ResultError: an id is not UTF-8."""
    with damage_named(path):
        raw: list[bytes] = _dataset(file, SEQUENCE_IDS, path)[rows].tolist()
    try:
        return [item.decode("utf-8") for item in raw]
    except UnicodeDecodeError as error:
        raise ResultError(path, f"an id in {SEQUENCE_IDS!r} is not UTF-8") from error


def rows_at_once(hidden_dim: int) -> int:
    """Return how many rows of *hidden_dim* numbers are read or checked at a time."""
    return max(1, min(IDS_PER_WRITE, _ROWS_BYTES // max(1, hidden_dim * 4)))


def gap_rows(hidden_dim: int) -> int:
    """Return the largest step from one row to the next that is read rather than skipped."""
    return 1 + _GAP_BYTES // max(1, hidden_dim * 4)


def near_runs(numbers: IntArray, *, most_gap: int, most_rows: int) -> Iterator[slice]:
    """
    Split ascending row numbers, int64 (n,), into slices that are worth one read each and cover all of them.

    *most_gap*: largest step from one number to the next within a run. *most_rows*: most rows that a read spans, and
    most numbers in a run, since they may repeat.
    """
    ends = np.flatnonzero((np.diff(numbers) > most_gap) | (np.diff(numbers // most_rows) > 0)) + 1
    start = 0
    for end in [*ends.tolist(), len(numbers)]:
        for first in range(start, end, most_rows):
            yield slice(first, min(first + most_rows, end))
        start = end


def _dataset(file: h5py.File, name: str, path: Path) -> h5py.Dataset:
    if name not in file:
        raise ResultError(path, f"has no dataset {name!r}")
    return file[name]


def early_allocated(file: h5py.File, name: str, shape: tuple[int, int]) -> int | None:
    """
    Create the float32 dataset *name* with its space reserved and unwritten; return the offset of its first byte.

    Rows are written there with plain writes. None where it has no elements.
    """
    space = h5py.h5s.create_simple(shape)
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.CONTIGUOUS)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    properties.set_obj_track_times(False)
    dataset = h5py.h5d.create(file.id, name.encode(), h5py.h5t.IEEE_F32LE, space, dcpl=properties)
    offset: int | None = dataset.get_offset()
    return offset


def write_rows(
    file: NewFile, offset_bytes: int | None, hidden_dim: int, row_numbers: IntArray, rows: FloatArray
) -> None:
    """
    Write ``rows[i]`` as row ``row_numbers[i]`` of a dataset of ``early_allocated``, once HDF5 has closed the file.

    HDF5 writes scattered rows at 9 MB/s and reports a full disk late; ``pwrite`` does neither. Adjacent rows go out in
    one write.
    """
    if not rows.size:
        return
    data = np.ascontiguousarray(rows, dtype="<f4")
    assert data.shape == (len(row_numbers), hidden_dim), "one row of the dataset's width for each number"
    bounds = [0, *(np.flatnonzero(np.diff(row_numbers) != 1) + 1).tolist(), len(row_numbers)]
    for start, end in pairwise(bounds):
        file.write_at(data[start:end].data, (offset_bytes or 0) + int(row_numbers[start]) * hidden_dim * 4)
