"""
One pass over a FASTA file: where each record is, its id, its residues, and a hash of its normalised sequence.

A block in which nothing is unusual is read as arrays; any other goes record by record through the strict rules of
``virnucpro.data.fasta``. Both give the same rows. Memory grows with the number of records and the bytes of their ids
only: a record longer than a block is read in parts.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from virnucpro.config import DEFAULT_RULES
from virnucpro.data.fasta import (
    BLANKS,
    MAX_HEADER_BYTES,
    Fault,
    SequenceReader,
    letters_of,
    read_header,
    read_record,
    whole_fault,
)
from virnucpro.data.reading.fasta_block import HASH_BYTES, Rows, make_rows, plain_rows, select_rows, sequence_hash
from virnucpro.data.reading.input_files import UTF8_BOM
from virnucpro.errors import InputProblem
from virnucpro.run_folders import read_at

if TYPE_CHECKING:
    from collections.abc import Callable

    from virnucpro.config import InputRules
    from virnucpro.data.fasta import Letters
    from virnucpro.data.reading.problems import Problems

_BLOCK_BYTES = 1 << 19
_RECORD_START = b"\n>"

COUNTED = (
    "mapped_j",
    "removed_blanks",
    "stripped_stops",
    "removed_gaps",
    "stops_as_x",
    "ambiguous",
    "low_information",
)
"""J read as X; blanks removed; stops removed from an end; gaps removed; stops read as X; normalised letters that
stand for several residues or nucleotides; sequences of unknown letters only."""
OF_FILES = ("lacks_bgzip_end", "mate_files")
"""Files that are counted: by ``bgzip`` without an end-of-file block; FASTQ taken as one of a pair."""


@dataclass
class ScannedFile:
    rows: list[Rows] = field(default_factory=list)
    size_bytes: int = 0
    sha256: str = ""
    """Hex, of the bytes read."""
    counts: Counter[str] = field(default_factory=Counter)
    """By the names of ``COUNTED`` and ``OF_FILES``."""

    @property
    def num_records(self) -> int:
        return sum(len(rows.residues) for rows in self.rows)


def scan_fasta(
    descriptor: int,
    path: str,
    problems: Problems,
    *,
    rules: InputRules = DEFAULT_RULES,
    file_number: int = 0,
    place: Callable[[int], int] = int,
    block_bytes: int = _BLOCK_BYTES,
) -> ScannedFile:
    """
    Read an open file from start to end; where a problem was added, only the ids of the result are meaningful.

    Args:
        path: As the user named it, for messages.
        place: Maps a line of *descriptor* to what messages give; by default the line itself.
        block_bytes: Bytes read at once; never changes a row.

    Raises:
        BadInputError: Too many problems, or the system refuses to read.
    """
    scanner = _Scanner(path, file_number, problems, place, letters_of(rules), rules.allow_empty, block_bytes)
    digest = hashlib.sha256()
    size_bytes = 0
    rest = b""
    while block := read_at(descriptor, block_bytes, size_bytes):
        size_bytes += len(block)
        digest.update(block)
        rest = scanner.feed(rest + block)
        if scanner.gave_up:
            break
    scanner.finish(rest)
    scanner.found.size_bytes = size_bytes
    scanner.found.sha256 = digest.hexdigest()
    return scanner.found


@dataclass
class _Scanner:
    """The state between two blocks; ``feed`` returns the bytes to put in front of the next block."""

    path: str
    file_number: int
    problems: Problems
    place: Callable[[int], int]
    letters: Letters
    allow_empty: bool
    block_bytes: int
    found: ScannedFile = field(default_factory=ScannedFile)
    gave_up: bool = False
    offset: int = 0
    """Bytes before the buffer."""
    line: int = 1
    """Of the buffer's first byte."""
    started: bool = False
    """Whether the first record has begun."""
    long: _LongRecord | None = None

    def feed(self, buffer: bytes) -> bytes:
        if not self.started:
            buffer = self._skip_to_first_record(buffer)
            if not self.started:
                return buffer
        if self.long is not None:
            buffer = self._continue_long(self.long, buffer)
            if self.long is not None:
                return buffer
        cut = buffer.rfind(_RECORD_START) + 1
        if cut:
            self._whole_records(buffer[:cut])
            return buffer[cut:]
        return buffer if len(buffer) < self.block_bytes else self._begin_long(buffer)

    def finish(self, buffer: bytes) -> None:
        if self.gave_up:
            return
        if not self.started:
            if not self.allow_empty:
                remedy = "name a file with at least one FASTA record, or use --allow-empty"
                self.problems.add(InputProblem(self.path, None, "no records", remedy))
        elif self.long is not None:
            self._end_long(self.long, buffer)
        else:
            self._whole_records(buffer)

    def _skip_to_first_record(self, buffer: bytes) -> bytes:
        if self.offset == 0 and buffer.startswith(UTF8_BOM):
            buffer = self._pass(buffer, len(UTF8_BOM))
        text = buffer.lstrip(BLANKS)
        if not text:
            keep = 0 if buffer.endswith(b"\n") else 1  # keep a blank before the first `>`: it is a fault
            return self._pass(buffer, len(buffer) - keep) if len(buffer) > keep else buffer
        blank_bytes = len(buffer) - len(text)
        if text.startswith(b">") and (blank_bytes == 0 or buffer[blank_bytes - 1 : blank_bytes] == b"\n"):
            self.started = True
            return self._pass(buffer, blank_bytes)
        line = self.line + buffer.count(b"\n", 0, blank_bytes)
        remedy = "begin the file with a header line, '>' and an id"
        self.problems.add(InputProblem(self.path, line, "text before the first '>'", remedy))
        self.gave_up = True
        return b""

    def _pass(self, buffer: bytes, num_bytes: int) -> bytes:
        """Count the first *num_bytes* of *buffer* as done; return the rest."""
        self.offset += num_bytes
        self.line += buffer.count(b"\n", 0, num_bytes)
        return buffer[num_bytes:]

    def _whole_records(self, buffer: bytes) -> None:
        """Process whole records that fill *buffer*."""
        plain = plain_rows(buffer, self.offset, self.found.counts, self.letters)
        if plain is None:
            rows, num_lines = self._strict_rows(buffer), buffer.count(b"\n")
        else:
            rows, num_lines = plain
        self.found.rows.append(rows)
        self.offset += len(buffer)
        self.line += num_lines

    def _strict_rows(self, buffer: bytes) -> Rows:
        starts = [0]
        while (line_end := buffer.find(_RECORD_START, starts[-1])) >= 0:
            starts.append(line_end + 1)
        line = self.line
        names, residues, hashes, low, good = [], [], [], [], []
        for start, end in pairwise([*starts, len(buffer)]):
            record, reader = read_record(buffer[start:end], line, self.letters)
            if record.fault is None:
                self._count(reader)
            else:
                self._fault(record.fault, record.name)
            good.append(record.fault is None or not self.problems.skips_bad)
            names.append(record.name)
            residues.append(len(record.sequence))
            hashes.append(sequence_hash(record.sequence))
            low.append(reader.low_information)
            line += buffer.count(b"\n", start, end)
        rows = make_rows(starts, len(buffer), self.offset, residues, names, b"".join(hashes), low)
        return select_rows(rows, np.array(good, dtype=np.bool_))

    def _begin_long(self, buffer: bytes) -> bytes:
        header_end = buffer.find(b"\n", 0, MAX_HEADER_BYTES + 3)  # `>`, the header, CR LF
        if header_end + 1 == len(buffer) or (header_end < 0 and len(buffer) < MAX_HEADER_BYTES + 3):
            return buffer
        taken = header_end + 1 if header_end >= 0 else MAX_HEADER_BYTES + 3  # too long: what follows does not matter
        name, fault = read_header(buffer[1 : header_end if header_end >= 0 else taken], self.line)
        if fault is not None:
            self._fault(fault, name)
        reader = SequenceReader(self.line + 1, self.letters)
        self.long = _LongRecord(name, self.offset, self.line, reader, fault is not None)
        return self._continue_long(self.long, self._pass(buffer, taken))

    def _continue_long(self, long: _LongRecord, buffer: bytes) -> bytes:
        cut = buffer.find(_RECORD_START) + 1
        if cut:
            self._end_long(long, buffer[:cut])
            return buffer[cut:]
        held_back = 2 if buffer.endswith(b"\r\n") else int(buffer.endswith((b"\r", b"\n")))
        piece = buffer[: len(buffer) - held_back]
        long.feed(piece, last=False)
        return self._pass(buffer, len(piece))

    def _end_long(self, long: _LongRecord, last_piece: bytes) -> None:
        long.feed(last_piece, last=True)
        self._pass(last_piece, len(last_piece))
        self.long = None
        fault = long.reader.fault or whole_fault(long.name, long.reader, long.line, self.letters)
        if fault is not None and not long.has_fault:
            self._fault(fault, long.name)
        if (fault is not None or long.has_fault) and self.problems.skips_bad:
            return
        self._count(long.reader)
        digest = long.digest.digest()[:HASH_BYTES]
        length, low = self.offset - long.offset, long.reader.low_information
        self.found.rows.append(make_rows([0], length, long.offset, [long.reader.residues], [long.name], digest, [low]))

    def _count(self, reader: SequenceReader) -> None:
        for name in COUNTED:
            self.found.counts[name] += getattr(reader, name)

    def _fault(self, fault: Fault, name: bytes) -> None:
        fault = fault._replace(line=self.place(fault.line))
        self.problems.add_record(fault, name, self.path, self.file_number)


@dataclass
class _LongRecord:
    name: bytes
    offset: int
    line: int
    reader: SequenceReader
    has_fault: bool
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)

    def feed(self, piece: bytes, *, last: bool) -> None:
        self.digest.update(self.reader.feed(piece, last=last))
