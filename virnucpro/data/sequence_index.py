"""
The sequence index: where every record of the input is, longest first, in a file that every worker maps.

It is built in one pass and belongs to exactly that input, the ordered list of (path, size, sha256), as certain rules
read it; dates are ignored. Identical sequences are found by a hash, so that each is computed once. Reading a record
gives the indexed bytes or an error, never other bytes.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from virnucpro.allowed_roots import open_data
from virnucpro.config import DEFAULT_RULES, InputRules, fingerprint
from virnucpro.data.fasta import letters_of, read_record
from virnucpro.data.index.build import IndexedFile, build_index
from virnucpro.data.index.file import content_is_intact, map_index
from virnucpro.data.reading.fasta_block import HASH_BYTES, sequence_hash
from virnucpro.data.reading.input_files import DEFAULT_MAX_UNPACKED_BYTES, hash_content, open_regular
from virnucpro.data.reading.problems import SkippedRecord, read_skipped
from virnucpro.errors import BadInputError, ConfigurationError, IndexFormatError, InputChangedError, unreadable
from virnucpro.run_folders import read_at

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from virnucpro.arrays import ByteArray, IntArray


_MAX_OPEN_FILES = 64
_GONE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL}
"""Errors of a name that no longer leads to a regular file."""
_RECORDS_PER_RELEASE = 1 << 14


@dataclass(frozen=True, slots=True)
class SequenceRecord:
    """One sequence, as models see it: normalised residues."""

    position: int
    sequence_id: str
    sequence: str
    header: bytes = b""
    """The line above the sequence, as it is in the input, without ``>`` and line end."""


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """Where one record is, in the file that records are read from, and its expected content."""

    position: int
    file_number: int
    offset: int
    num_bytes: int
    name: bytes
    num_letters: int
    sequence_hash: bytes


class Plan(Protocol):
    def __len__(self) -> int: ...

    def block_positions(self, block: int) -> IntArray: ...


class SequenceIndex:
    """
    A mapped sequence index, made by ``build``, ``open`` or ``ensure``; its pickle holds the path.

    Attributes:
        path: The index file, absolute.
        file_sha256: Hex sha256 of the index file's content.
        files: The input, in the given order.
        lengths: int64 (n,): residues of each sequence, longest first; ties in the order of the input.
        input_rows: int64 (n,): row in the order of the input of each position.
        representatives: int64 (n,): first position with the same sequence; its own where there is none before.
        sequence_hashes: uint8 (n, 16): first bytes of the sha256 of each normalised sequence.
        low_information: uint8 (n,): 1 where a sequence holds unknown residues or nucleotides only.
        rules: How records were read.
        counts: By ``COUNTED`` and ``OF_FILES`` of ``fasta_scan``, and ``skipped``.
        content_fingerprint: Hex sha256 of the ordered list of (path, size, sha256) of the input.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        mapped = map_index(self.path)
        columns = mapped.columns
        self.file_sha256 = mapped.sha256
        self.lengths: IntArray = columns["lengths"]
        self.input_rows: IntArray = columns["input_rows"]
        self.representatives: IntArray = columns["representatives"]
        self.sequence_hashes: ByteArray = columns["sequence_hashes"]
        self.low_information: ByteArray = columns["low_information"]
        self._offsets: IntArray = columns["offsets"]
        self._record_bytes: IntArray = columns["record_bytes"]
        self._id_ends: IntArray = columns["id_ends"]
        self._file_numbers = columns["file_numbers"]
        self.files = tuple(IndexedFile(**values) for values in mapped.description["files"])
        self.counts: dict[str, int] = mapped.description["counts"]
        self.rules = InputRules(**mapped.description["rules"])
        self._letters = letters_of(self.rules)
        self._ids, self._skipped, self._mapping = mapped.ids, mapped.skipped, mapped.mapping
        self._descriptors: dict[int, int] = {}
        self._records_seen = 0

    @classmethod
    def build(
        cls,
        fasta_files: Sequence[str | Path],
        index_path: Path,
        *,
        unpack_dir: Path,
        rules: InputRules = DEFAULT_RULES,
        max_unpacked_bytes: int = DEFAULT_MAX_UNPACKED_BYTES,
    ) -> SequenceIndex:
        """
        Read and check the whole input, and write its index.

        Args:
            fasta_files: FASTA files, for DNA also FASTQ, plain or compressed, and unaligned BAM, in the input's order.
            index_path: The index file to write.
            unpack_dir: Folder for FASTA copies of other formats; they are needed as long as the index is.
            rules: How records are read, and whether bad ones are skipped.
            max_unpacked_bytes: Bytes that one compressed file may unpack to.

        Raises:
            BadInputError: The input breaks a rule; all problems are collected, up to the limit of that error.
            OutputError: The index or an unpacked copy cannot be written.
        """
        build_index(fasta_files, index_path, unpack_dir=unpack_dir, rules=rules, max_unpacked_bytes=max_unpacked_bytes)
        _give_back_freed_memory()
        return cls(index_path)

    @classmethod
    def open(cls, index_path: Path) -> SequenceIndex:
        """Map an existing index; the input itself is not read. Raises IndexFormatError where it is unusable."""
        return cls(index_path)

    @classmethod
    def ensure(
        cls,
        fasta_files: Sequence[str | Path],
        index_path: Path,
        *,
        unpack_dir: Path,
        rules: InputRules = DEFAULT_RULES,
    ) -> SequenceIndex:
        """
        Return the index of exactly this input and rules: the existing one if it still fits, else a new one.

        The content of every file is hashed, unpacked copies too; a missing or damaged copy is remade. Arguments and
        errors are those of ``build``.
        """
        try:
            index = cls(index_path)
        except IndexFormatError:
            index = None
        if index is not None and content_is_intact(index.path) and index.fits(fasta_files, rules):
            return index
        return cls.build(fasta_files, index_path, unpack_dir=unpack_dir, rules=rules)

    def __len__(self) -> int:
        return len(self.lengths)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.path, self.file_sha256)

    def __del__(self) -> None:
        self._close_files()

    @cached_property
    def content_fingerprint(self) -> str:
        return fingerprint([[file.real_path, file.size_bytes, file.sha256] for file in self.files])

    @property
    def id_bytes(self) -> int:
        return len(self._ids)

    @property
    def num_skipped(self) -> int:
        """Records skipped because they break a rule."""
        return self.counts["skipped"]

    @property
    def num_records(self) -> int:
        """Records of the input, skipped ones included."""
        return len(self) + self.num_skipped

    def skipped(self) -> Iterator[SkippedRecord]:
        """Yield the skipped records: file by file in the order of their lines, duplicates last."""
        return read_skipped(self._skipped, [file.path for file in self.files])

    def release_pages(self) -> None:
        """
        Drop the mapped file from this process's resident memory; pages come back on access.

        They stay in the system's cache, so this costs microseconds. Without it a process that walks through a large
        index ends with all of it resident.
        """
        self._mapping.madvise(mmap.MADV_DONTNEED)

    def _saw(self, num_records: int) -> None:
        self._records_seen += num_records
        if self._records_seen >= _RECORDS_PER_RELEASE:
            self._records_seen = 0
            self.release_pages()

    def sequence_id(self, position: int) -> str:
        return self._id_bytes(position).decode("utf-8")

    def sequence_ids(self, positions: Sequence[int] | IntArray) -> list[str]:
        starts, ends = self._id_bounds(np.asarray(positions, dtype=np.int64))
        ids = self._ids
        return [str(ids[start:end], "utf-8") for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]

    def id_bytes_of(self, positions: IntArray) -> int:
        """Return the bytes of the ids at *positions*, all together."""
        starts, ends = self._id_bounds(positions)
        return int((ends - starts).sum())

    def _id_bounds(self, positions: IntArray) -> tuple[IntArray, IntArray]:
        rows = self.input_rows[positions]
        self._saw(len(rows))
        return np.where(rows > 0, self._id_ends[rows - 1], 0), self._id_ends[rows]

    def read(self, position: int) -> SequenceRecord:
        """Read one record and compare its id, residues and hash with the index; InputChangedError where they differ."""
        self._saw(1)
        name = self._id_bytes(position)
        data = self.bytes_at(position, int(self._offsets[position]), int(self._record_bytes[position]))
        record, _ = read_record(data, 1, self._letters)
        same = (
            data[:1] == b">"
            and record.name == name
            and len(record.sequence) == self.lengths[position]
            and sequence_hash(record.sequence) == self.sequence_hashes[position].tobytes()
        )
        if not same:
            raise self.changed(position)
        header = data[1:].partition(b"\n")[0].removesuffix(b"\r")
        return SequenceRecord(int(position), name.decode("utf-8"), record.sequence.decode("ascii"), header)

    def rows_of(self, positions: IntArray) -> IntArray:
        """Return the rows of the sequences at *positions*, none of them a copy: one, and one for each copy; int64."""
        first, end = (np.searchsorted(self.copied, positions, side=side) for side in ("left", "right"))
        return np.asarray(1 + end - first)

    @cached_property
    def copied(self) -> IntArray:
        """Index position of the representative of each copy, ascending: int64 (copies,)."""
        representatives = self.representatives[:]
        return np.sort(representatives[representatives != np.arange(len(self))])

    def in_input_order(self) -> IntArray:
        """Return the positions of all records in the order of the input, file by file: int64 (n,)."""
        positions = np.empty(len(self), dtype=np.int64)
        positions[self.input_rows] = np.arange(len(self))
        self.release_pages()
        return positions

    def places(self, positions: IntArray) -> Iterator[RecordPlace]:
        columns = (
            positions,
            self._file_numbers[positions],
            self._offsets[positions],
            self._record_bytes[positions],
            self.lengths[positions],
        )
        names = self.sequence_ids(positions)
        hashes = self.sequence_hashes[positions].tobytes()
        for at, (name, values) in enumerate(zip(names, zip(*(c.tolist() for c in columns), strict=True), strict=True)):
            position, file_number, offset, num_bytes, num_letters = values
            sequence_hash = hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES]
            yield RecordPlace(
                position, file_number, offset, num_bytes, name.encode("utf-8"), num_letters, sequence_hash
            )

    def path_of(self, position: int) -> str:
        return self.files[int(self._file_numbers[position])].path

    def _id_bytes(self, position: int) -> bytes:
        row = int(self.input_rows[position])
        start = int(self._id_ends[row - 1]) if row else 0
        return bytes(self._ids[start : int(self._id_ends[row])])

    def changed(self, position: int) -> InputChangedError:
        return InputChangedError(self.path_of(position), self.sequence_id(position))

    def bytes_at(self, position: int, offset: int, num_bytes: int) -> bytes:
        """Read from the file of a record; InputChangedError where it is gone, else BadInputError where it fails."""
        try:
            return read_at(self._descriptor(int(self._file_numbers[position])), num_bytes, offset)
        except OSError as error:
            if error.errno in _GONE:
                raise self.changed(position) from error
            raise unreadable(self.path_of(position), error) from error

    def _descriptor(self, file_number: int) -> int:
        """Return an open descriptor of the file that records of this input file are read from; OSError passes."""
        descriptor = self._descriptors.get(file_number)
        if descriptor is None:
            if len(self._descriptors) == _MAX_OPEN_FILES:
                self._close_files()
            descriptor = open_data(self.files[file_number].read_path)
            self._descriptors[file_number] = descriptor
        return descriptor

    def _close_files(self) -> None:
        for descriptor in self.__dict__.pop("_descriptors", {}).values():
            with suppress(OSError):  # nothing was written
                os.close(descriptor)
        self._descriptors = {}

    def fits(self, fasta_files: Sequence[str | Path], rules: InputRules) -> bool:
        """Whether *fasta_files*, in their order, still have the indexed content, under the same *rules*."""
        if rules != self.rules or [os.path.realpath(path) for path in fasta_files] != [
            file.real_path for file in self.files
        ]:
            return False
        return all(_holds_same(file) for file in self.files)


def get_worker_indices(index: SequenceIndex, rank: int, world_size: int, plan: Plan | None = None) -> IntArray:
    """
    Return the index positions that one worker computes.

    Args:
        index: The sorted input.
        rank: The worker, from 0.
        world_size: Number of workers.
        plan: Batch plan; the worker has its blocks rank, rank + world_size, ... Without one, positions are divided
            likewise.

    Returns:
        int64 (num_sequences,), in the order of computation.

    Raises:
        ConfigurationError: There is no such rank.
    """
    if not 0 <= rank < world_size:
        raise ConfigurationError(f"rank {rank} does not exist among {world_size} workers: ranks go from 0")
    if plan is None:
        return np.arange(rank, len(index), world_size, dtype=np.int64)
    blocks = [plan.block_positions(block) for block in range(rank, len(plan), world_size)]
    return np.concatenate(blocks, dtype=np.int64) if blocks else np.empty(0, dtype=np.int64)


def _reopen(path: Path, sha256: str) -> SequenceIndex:
    """Open an index in another process; refuse one that was rebuilt in between."""
    index = SequenceIndex.open(path)
    if index.file_sha256 != sha256:
        raise IndexFormatError(path, "it was rebuilt while a run used it")
    return index


def _holds_same(file: IndexedFile) -> bool:
    """Whether a file, and its unpacked copy where it has one, still have the indexed content."""
    expected = {
        file.real_path: (file.size_bytes, file.sha256),
        file.read_path: (file.read_size_bytes, file.read_sha256),
    }
    try:
        for path, (size_bytes, sha256) in expected.items():
            with open_regular(path) as descriptor:
                if os.fstat(descriptor).st_size != size_bytes or hash_content(descriptor) != (size_bytes, sha256):
                    return False
    except (BadInputError, OSError):
        return False
    return True


def _give_back_freed_memory() -> None:
    """Have glibc return to the system what it would keep for the whole run: more than 100 bytes a record."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim is not None:
        trim(0)
