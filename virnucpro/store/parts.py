"""
Parts and shards: the rows of whole blocks, sealed on disk.

A part is the unit of durability: an HDF5 image built in memory and written as plain bytes. A shard is made of many
parts. Either is done when it validates on disk, and is read by block number: which rank made a block is not part of its
identity.

A flipped bit can send the HDF5 library into an endless loop, so every seal is checked first. The block numbers also
stand before the seal with a checksum of their own, to tell from the last bytes whether a file is worth reading. This
module does not know ranks, plans or models: readers compare the positions of a block with the plan.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from virnucpro import durable
from virnucpro.errors import ResultError, SourceGoneError
from virnucpro.run_folders import only_regular, read_at
from virnucpro.run_layout import PART_NAME
from virnucpro.spans import WRITING, span
from virnucpro.store import schema
from virnucpro.store.schema import BlockOrigin
from virnucpro.this_host import host_name, merged_processors

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence
    from pathlib import Path

    import h5py

    from virnucpro.arrays import BoolArray, FloatArray, IntArray

_CONTENTS = struct.Struct("<32sQ8s")  # sha256 of the block numbers before it, how many, magic
_CONTENTS_MAGIC = b"VNPBLKS1"
_UNKNOWN = '{"unknown processor": ["an unknown host"]}'  # of parts that an earlier version wrote
_known: set[bytes] = set()
"""Seals of files that this process wrote, or has read: their bytes need no child (``in_child``)."""
_READS_AHEAD = 64
"""Reads of scattered rows advised ahead (the best of 16 to 256, cold, on a virtual disk)."""


@dataclass(frozen=True)
class BlockRows:
    """The rows of a finished block, or of those of its sequences that could be computed."""

    block: int
    """Number in the plan."""
    positions: IntArray
    """int64 (num_sequences,): positions in the sequence index, in the plan's order."""
    sequence_ids: Sequence[str]
    embeddings: FloatArray
    """float32 (num_sequences, hidden_dim)."""
    origin: BlockOrigin = BlockOrigin.COMPUTED


@dataclass(frozen=True)
class SealedBlocks:
    """A part or shard whose bytes were checked on opening; ``check`` checks the numbers."""

    path: Path
    plan_fingerprint: str
    """Plan that the rows were computed by."""
    blocks: IntArray
    """int64 (num_blocks, 3): block number, rows, ``BlockOrigin``."""
    positions: IntArray
    """int64 (num_sequences,): positions in the sequence index, in the order of the rows."""
    hidden_dim: int
    """Width of a row; 0 in an empty shard written without a model."""
    offset_bytes: int
    """Offset of the first row in the file."""
    seal: bytes
    """sha256 of the checked file; other content is refused."""
    processors: dict[str, list[str]]
    """What computed the rows of the file."""
    kept_rows: BoolArray | None = None
    """bool (rows of the file,): the rows that belong to this view; None for all."""

    @classmethod
    def open(cls, path: Path, *, checked: bytes | None = None) -> SealedBlocks:
        """
        Check every byte of a part or shard against its seal, then read its table of contents.

        *checked*: a seal verified just now; a file that still has it is not read again. ``ResultError`` where it is
        damaged or of another schema, ``SourceGoneError`` where it was replaced meanwhile.
        """
        seal = durable.check_seal(path) if checked is None else checked
        if checked is not None:
            with open(path, "rb", buffering=0, opener=only_regular) as sealed:
                if durable.seal_of(sealed.fileno()) != checked:
                    raise SourceGoneError(path)
        is_known = checked is None and seal in _known
        with schema.open_checked(path, is_known=is_known) as file, schema.damage_named(path):
            rows = schema.embeddings_of(file, path)
            blocks = schema.integers_of(file, schema.BLOCKS, path, shape=(None, 3))
            positions = schema.integers_of(file, schema.POSITIONS, path, shape=(rows.shape[0],))
            if (blocks[:, 1] < 0).any() or int(blocks[:, 1].sum()) != rows.shape[0]:
                raise ResultError(path, "its blocks do not add up to its rows")
            if not np.isin(blocks[:, 2], list(BlockOrigin)).all():
                raise ResultError(path, "its blocks have an origin that does not exist")
            plan = file.attrs.get(schema.PLAN_FINGERPRINT, "")
            offset_bytes = rows.id.get_offset() or 0
            processors = merged_processors([dict(json.loads(str(file.attrs.get(schema.PROCESSORS, _UNKNOWN))))])
            found = cls(path, str(plan), blocks, positions, int(rows.shape[1]), offset_bytes, seal, processors)
        found._reopened().close()
        _known.add(seal)
        return found

    def check(self) -> None:
        """Check that every number is finite. Raises ResultError: one is not."""
        for rows in self.iter_rows():
            if not np.isfinite(rows).all():
                raise ResultError(self.path, "holds a number that is not finite")

    def only(self, blocks: Container[int]) -> SealedBlocks:
        kept = np.array([number in blocks for number in self.blocks[:, 0].tolist()], dtype=np.bool_)
        if kept.all():
            return self
        rows = np.repeat(kept, self.blocks[:, 1])
        in_file = rows if self.kept_rows is None else self.kept_rows.copy()
        if self.kept_rows is not None:
            in_file[self.kept_rows] = rows
        return replace(self, blocks=self.blocks[kept], positions=self.positions[rows], kept_rows=in_file)

    def iter_rows(self) -> Iterator[FloatArray]:
        """Yield the rows in order, a bounded number of bytes at a time; SourceGoneError where the file was replaced."""
        step = schema.rows_at_once(self.hidden_dim)
        num_rows = len(self.positions) if self.kept_rows is None else len(self.kept_rows)
        with self._reopened() as file:
            for start in range(0, num_rows, step):
                some = self._read(file, start, min(start + step, num_rows))
                yield some if self.kept_rows is None else some[self.kept_rows[start : start + step]]

    def iter_rows_at(self, numbers: IntArray) -> Iterator[tuple[slice, FloatArray]]:
        """
        Yield slices of *numbers* and their rows, a bounded number of bytes at a time; distant rows are not read.

        The kernel is advised of reads ahead; else each scattered row of a file larger than memory is waited for.
        *numbers*: of rows within these blocks, int64 (n,), ascending, repeats allowed.
        """
        in_file = numbers if self.kept_rows is None else np.flatnonzero(self.kept_rows)[numbers]
        most_gap, most_rows = schema.gap_rows(self.hidden_dim), schema.rows_at_once(self.hidden_dim)
        with self._reopened() as file:
            runs = schema.near_runs(in_file, most_gap=most_gap, most_rows=most_rows)
            for some in self._announced(file, in_file, runs):
                wanted = in_file[some]
                first = int(wanted[0])
                yield some, self._read(file, first, int(wanted[-1]) + 1)[wanted - first]

    def _announced(self, file: BinaryIO, in_file: IntArray, runs: Iterator[slice]) -> Iterator[slice]:
        """Yield *runs* of the row numbers *in_file*, each some reads after the kernel was advised of it."""
        waiting: deque[slice] = deque()
        row_bytes = self.hidden_dim * 4
        for some in runs:
            first, end = int(in_file[some.start]), int(in_file[some.stop - 1]) + 1
            at = self.offset_bytes + first * row_bytes
            os.posix_fadvise(file.fileno(), at, (end - first) * row_bytes, os.POSIX_FADV_WILLNEED)
            waiting.append(some)
            if len(waiting) > _READS_AHEAD:
                yield waiting.popleft()
        yield from waiting

    def _reopened(self) -> BinaryIO:
        """Open the checked file for plain reads. Raises SourceGoneError: it was removed or replaced."""
        try:
            file = open(self.path, "rb", buffering=0, opener=only_regular)  # noqa: SIM115  closed by its caller
        except FileNotFoundError as error:
            raise SourceGoneError(self.path) from error
        if durable.seal_of(file.fileno()) != self.seal:
            file.close()
            raise SourceGoneError(self.path)
        return file

    def _read(self, file: BinaryIO, first: int, end: int) -> FloatArray:
        """Return adjacent rows of the file, float32 (end - first, hidden_dim)."""
        row_bytes = self.hidden_dim * 4
        data = read_at(file.fileno(), (end - first) * row_bytes, self.offset_bytes + first * row_bytes)
        if len(data) < (end - first) * row_bytes:
            raise SourceGoneError(self.path)
        return np.frombuffer(data, dtype="<f4").reshape(end - first, self.hidden_dim)

    def iter_sequence_ids(self) -> Iterator[list[str]]:
        """Yield the ids in row order, a bounded number at a time; SourceGoneError where the file was removed."""
        first = 0
        try:
            opened = schema.open_hdf5(self.path, "r")
        except FileNotFoundError as error:
            raise SourceGoneError(self.path) from error
        with opened as file:
            for names in schema.iter_sequence_ids(file, self.path):
                if self.kept_rows is None:
                    yield names
                else:
                    kept = self.kept_rows[first : first + len(names)].tolist()
                    yield [name for name, is_kept in zip(names, kept, strict=True) if is_kept]
                first += len(names)


def write_part(folder: Path, blocks: Sequence[BlockRows], *, plan_fingerprint: str, processor: str = "") -> Path:
    """Make finished blocks, at least one, durable in *folder*; *processor* (empty: none) of this host computed them."""
    for item in blocks:
        assert len(item.positions) == len(item.sequence_ids) == len(item.embeddings), f"block {item.block}: rows differ"
    table = np.array([(item.block, len(item.positions), item.origin) for item in blocks], dtype=np.int64)
    digest = hashlib.sha256(table[:, :2].tobytes()).hexdigest()  # parts of different blocks never share a name
    path = folder / f"part_{table[0, 0]:09d}_{digest[:12]}.h5"
    with span(WRITING, block=blocks[0].block, blocks=len(blocks), sequences=int(table[:, 1].sum())):
        image = _image(blocks, table, plan_fingerprint, processor)
        _known.add(durable.write_bytes(path, image + _contents(table), seal=True))
    return path


def _image(blocks: Sequence[BlockRows], table: IntArray, plan_fingerprint: str, processor: str) -> bytes:
    with schema.in_memory("part") as file:
        file.attrs[schema.PLAN_FINGERPRINT] = plan_fingerprint
        file.attrs[schema.PROCESSORS] = json.dumps({processor: [host_name()]} if processor else {})
        embeddings = np.concatenate([item.embeddings for item in blocks])
        file.create_dataset(schema.EMBEDDINGS, data=embeddings, track_times=False)
        ids = [name for item in blocks for name in item.sequence_ids]
        file.create_dataset(schema.SEQUENCE_IDS, data=ids, dtype=schema.UTF8, track_times=False)
        _write_bookkeeping(file, table, np.concatenate([item.positions for item in blocks]))
        file.flush()
        image: bytes = file.id.get_file_image()
    return image


def read_block_numbers(path: Path) -> IntArray:
    """Return the block numbers that a file declares in its last bytes; ResultError where there are none."""
    with durable.regular_or_result_error(path) as file:
        end = os.fstat(file.fileno()).st_size - durable.SEAL_BYTES
        if end < _CONTENTS.size:
            raise ResultError(path, "truncated: no table of its blocks at its end")
        digest, num_blocks, magic = _CONTENTS.unpack(read_at(file.fileno(), _CONTENTS.size, end - _CONTENTS.size))
        start = end - _CONTENTS.size - num_blocks * 8
        if magic != _CONTENTS_MAGIC or start < 0:
            raise ResultError(path, "truncated: no table of its blocks at its end")
        numbers = read_at(file.fileno(), num_blocks * 8, start)
    if hashlib.sha256(numbers).digest() != digest:
        raise ResultError(path, "damaged: the table of its blocks does not match its checksum")
    return np.frombuffer(numbers, dtype="<i8").astype(np.int64)


def _contents(blocks: IntArray) -> bytes:
    numbers = np.ascontiguousarray(blocks[:, 0], dtype="<i8").tobytes()
    return numbers + _CONTENTS.pack(hashlib.sha256(numbers).digest(), len(blocks), _CONTENTS_MAGIC)


def part_paths(folder: Path) -> list[Path]:
    """Return the parts in *folder*, in a fixed order."""
    return sorted(path for path in folder.glob("part_*.h5") if PART_NAME.fullmatch(path.name))


def first_block(part: Path) -> int | None:
    """Return the number of a part's first block from its name, None for another name."""
    number = part.name.split("_")[1]
    return int(number) if number.isdecimal() else None


def write_shard(
    path: Path,
    sources: Sequence[SealedBlocks],
    *,
    plan_fingerprint: str,
    hidden_dim: int,
    on_step: Callable[[], None] = lambda: None,
) -> None:
    """
    Write one sealed shard, or leave *path* unchanged.

    Args:
        path: The shard; may be among the sources' files.
        sources: Checked, disjoint in blocks; memory is bounded by one read.
    """
    num_rows = sum(len(source.positions) for source in sources)
    width = max((source.hidden_dim for source in sources), default=hidden_dim)
    no_blocks, no_positions = np.empty((0, 3), np.int64), np.empty(0, np.int64)
    in_sources = sum(source.path.stat().st_size for source in sources)  # an upper bound: overhead of each file is saved
    with durable.replacing(path, seal=True) as new:
        with schema.created(new, most_bytes=in_sources + schema.OVERHEAD_BYTES) as file:
            file.attrs[schema.PLAN_FINGERPRINT] = plan_fingerprint
            file.attrs[schema.PROCESSORS] = json.dumps(merged_processors(source.processors for source in sources))
            schema.write_ids(file, num_rows, (names for source in sources for names in source.iter_sequence_ids()))
            blocks = np.concatenate([no_blocks, *(source.blocks for source in sources)])
            _write_bookkeeping(file, blocks, np.concatenate([no_positions, *(source.positions for source in sources)]))
            offset = schema.early_allocated(file, schema.EMBEDDINGS, (num_rows, width))
        first = 0
        for rows in (rows for source in sources for rows in source.iter_rows()):
            schema.write_rows(new, offset, width, np.arange(first, first + len(rows)), rows)
            first += len(rows)
            on_step()
        new.write(_contents(blocks))
    _known.add(new.seal)


def _write_bookkeeping(file: h5py.File, blocks: IntArray, positions: IntArray) -> None:
    file.create_dataset(schema.BLOCKS, data=blocks, track_times=False)
    file.create_dataset(schema.POSITIONS, data=positions, track_times=False)
