"""
Reads in FASTQ and in unaligned BAM, converted to FASTA text.

Records are read by byte offset, so both are written as FASTA once; ``dnaio`` decodes BAM. A read of a pair (FASTQ: a
comment like ``1:N:0:ATCACG`` or ``INSTRUMENT:7:1101:5/1``; BAM: its flags) gets ``/1`` or ``/2`` after its id unless it
has it. Mates without such a mark, in two FASTQ files with the same ids in the same order, get it too (``index.build``).

Damage is reported with its line, in BAM with its record's number. ``dnaio`` 1.2 ends the whole process on a BAM record
with inconsistent sizes, so all sizes are checked first.
"""

from __future__ import annotations

import io
import re
import struct
from itertools import zip_longest
from typing import TYPE_CHECKING

from dnaio.readers import BamReader

from virnucpro.data.fasta import PRINTABLE_ASCII
from virnucpro.data.reading.compressed import BLOCK_BYTES, BlockFile
from virnucpro.errors import BadInputError, InputProblem

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Never

BAM_MAGIC = b"BAM\1"
BAM_END = bytes.fromhex("1f8b08040000000000ff0600424302001b0003000000000000000000")
"""The last bytes of a file that ``bgzip`` or a program of BAM compressed: an empty block."""
BAM_COPY_LINES = 2
"""Lines of a BAM record's FASTA text."""
CONVERT_ALIGNED = "convert it with: samtools fastq -N FILE > NEW_FILE"

_MAX_READ_BYTES = 512 << 20
"""Longest line of FASTQ, or BAM record, bytes: one is held in memory."""
_TEXT_BYTES = 1 << 20
_COPY_AGAIN = "copy or download the file again"

_PAIR_COMMENT = re.compile(rb"(\S+)[ \t]+(?:([12]):[YN]:\d|\S+/([12])(?!\S))")
"""An id, and the comment on its read by Illumina's programs or the European Nucleotide Archive."""
_SIZE = struct.Struct("<I")
_FIXED = struct.Struct("<iiBBHHHiiii")
"""Start of a BAM record: reference, position, bytes of the name, mapping quality, bin, CIGAR operations, flags,
letters, the mate's reference and position, template length."""
_FLAGS = struct.Struct("<H")
_FLAGS_AT = 14
_PAIRED, _UNMAPPED, _FIRST, _SECOND, _SECONDARY, _SUPPLEMENTARY = 0x1, 0x4, 0x40, 0x80, 0x100, 0x800


def fastq_as_fasta(blocks: Iterator[bytes], path: str, mate: int = 0) -> Iterator[bytes]:
    """
    Convert FASTQ to FASTA text; a record keeps four lines, two of them empty, so that line numbers stay the same.

    *mate*: number in a pair, 1 or 2, of reads without one in their comment; 0 for unpaired reads.
    """
    text: list[bytes] = []
    text_bytes = 0
    lines = _lines(blocks, path)
    for number, record in enumerate(zip_longest(lines, lines, lines, lines)):
        if not any(record) and not any(lines):  # blank lines at the end
            break
        _check_record(record, path, 4 * number + 1)
        header, sequence, _, _ = record
        name = header[1:]
        pair = _PAIR_COMMENT.match(name)
        if pair is not None:
            name = _mate_id(pair[1], int(pair[2] or pair[3])) + name[pair.end(1) :]
        elif mate:
            read_id = name.replace(b"\t", b" ").partition(b" ")[0]
            name = _mate_id(read_id, mate) + name[len(read_id) :]
        text.append(b">%b\n%b\n\n\n" % (name, sequence))
        text_bytes += len(sequence)
        if text_bytes > _TEXT_BYTES:
            yield b"".join(text)
            text.clear()
            text_bytes = 0
    yield b"".join(text)


def _lines(blocks: Iterator[bytes], path: str) -> Iterator[bytes]:
    """Yield the lines without their ends; a line held in memory has at most ``_MAX_READ_BYTES``."""
    file = io.BufferedReader(BlockFile(blocks), BLOCK_BYTES)
    number = 0
    while line := file.readline(_MAX_READ_BYTES + 1):
        number += 1
        if len(line) > _MAX_READ_BYTES:
            _refuse(path, number, f"line of more than {_MAX_READ_BYTES} bytes", _COPY_AGAIN)
        yield line.removesuffix(b"\n").removesuffix(b"\r")


def _check_record(record: tuple[bytes, bytes, bytes, bytes], path: str, line: int) -> None:
    """Raise BadInputError for four lines (None after the end) that are no record; *line* is the first one's."""
    header, sequence, plus, qualities = record
    if not header.startswith(b"@"):
        at, what = 0, "no '@' at the start of a record"
    elif None in record:
        at, what = 3 - record.count(None), "it ends inside a record"
    elif sequence.startswith(b">"):  # it would begin a record
        _refuse(path, line + 1, "unexpected character '>' at column 1", _COPY_AGAIN)
    elif plus.isalpha():
        remedy = "join them with: seqtk seq -l0 FILE > NEW_FILE"
        _refuse(path, line + 2, "FASTQ with a sequence on several lines", remedy)
    elif plus not in {b"+", b"+" + header[1:]}:
        at, what = 2, "no '+' line, or not that of this record"
    elif len(sequence) != len(qualities) or not qualities.isascii():
        at, what = 3, "sequence and qualities differ in length, or qualities are not ASCII"
    else:
        return
    _refuse(path, line + at, f"damaged or truncated FASTQ ({what})", f"{_COPY_AGAIN}; a record has four lines")


def bam_as_fasta(blocks: Iterator[bytes], path: str) -> Iterator[bytes]:
    """Convert uncompressed, unaligned BAM to FASTA text, ``BAM_COPY_LINES`` lines a record."""
    for records, mates in _single_reads(_BamBytes(blocks, path)):
        reads = BamReader(io.BytesIO(records), with_header=False)
        for read, mate in zip(reads, mates, strict=True):
            yield b">%b\n%b\n" % (_mate_id(read.name.encode(), mate), read.sequence.encode())


def _mate_id(name: bytes, mate: int) -> bytes:
    """Return the id of read number *mate* of a pair; 0 is for unpaired reads."""
    suffix = b"/%d" % mate
    return name + suffix if mate and not name.endswith(suffix) else name


class _BamBytes:
    """The bytes of a BAM file, and the number of records begun."""

    def __init__(self, blocks: Iterator[bytes], path: str) -> None:
        self.records = 0
        self._blocks = blocks
        self._path = path
        self._held = bytearray()

    def take(self, num_bytes: int) -> bytes:
        while len(self._held) < num_bytes:
            self._held += self._next()
        taken = bytes(self._held[:num_bytes])
        del self._held[:num_bytes]
        return taken

    def skip(self, num_bytes: int) -> None:
        while len(self._held) < num_bytes:
            num_bytes -= len(self._held)
            self._held = bytearray(self._next())
        del self._held[:num_bytes]

    def at_end(self) -> bool:
        if not self._held:
            self._held += next(self._blocks, b"")
        return not self._held

    def refuse(self, what: str, remedy: str = _COPY_AGAIN, name: bytes | None = None) -> Never:
        shown = None if name is None else name.decode("ascii", "backslashreplace")
        _refuse(self._path, self.records or None, what, remedy, shown)

    def _next(self) -> bytes:
        block = next(self._blocks, b"")
        if not block:
            self.refuse("truncated BAM")
        return block


def _single_reads(bam: _BamBytes) -> Iterator[tuple[bytearray, list[int]]]:
    """Check records; yield batches flagged as single unaligned reads, for ``dnaio``, and each one's mate number."""
    bam.skip(len(BAM_MAGIC))
    bam.skip(*_SIZE.unpack(bam.take(_SIZE.size)))
    for _ in range(*_SIZE.unpack(bam.take(_SIZE.size))):  # reference sequences
        bam.skip(_SIZE.unpack(bam.take(_SIZE.size))[0] + _SIZE.size)
    records, mates = bytearray(), list[int]()
    while not bam.at_end():
        bam.records += 1
        size = bam.take(_SIZE.size)
        (num_bytes,) = _SIZE.unpack(size)
        if not _FIXED.size < num_bytes <= _MAX_READ_BYTES:
            bam.refuse("damaged BAM record")
        record = bam.take(num_bytes)
        mates.append(_mate_of(record, bam))
        start = len(records)
        records += size
        records += record
        _FLAGS.pack_into(records, start + _SIZE.size + _FLAGS_AT, _UNMAPPED)
        if len(records) > _TEXT_BYTES:
            yield records, mates
            records, mates = bytearray(), []
    yield records, mates


def _mate_of(record: bytes, bam: _BamBytes) -> int:
    """Check a record; return its number in a pair, 0 for none."""
    _, _, name_bytes, _, _, cigar_operations, flags, letters, *_ = _FIXED.unpack_from(record)
    name, end = record[_FIXED.size : _FIXED.size + name_bytes - 1], record[_FIXED.size + name_bytes - 1 :][:1]
    needed = _FIXED.size + name_bytes + 4 * cigar_operations + (letters + 1) // 2 + letters
    if letters < 0 or needed > len(record) or end != b"\0":
        bam.refuse("damaged BAM record")
    if not name or name.translate(None, PRINTABLE_ASCII):
        bam.refuse("read name that is not printable ASCII", "write plain names", name)
    if not flags & _UNMAPPED or flags & (_SECONDARY | _SUPPLEMENTARY):
        bam.refuse("aligned read, and only BAM of reads that are not aligned is read", CONVERT_ALIGNED, name)
    if not flags & _PAIRED:
        return 0
    return {_FIRST: 1, _SECOND: 2}.get(flags & (_FIRST | _SECOND), 0)


def _refuse(path: str, line: int | None, what: str, remedy: str, name: str | None = None) -> Never:
    raise BadInputError([InputProblem(path, line, what, remedy, name)])
