"""
Opens input files: regular files only, their format detected from their first bytes, other formats refused with the fix.

Records are read by byte offset from FASTA. Of a compressed file, FASTQ or BAM a FASTA copy is made once in a folder of
the run, named by the sha256 of the original; a copy is reused by its own sha256, never by a date. Standard input is
saved to such a folder before (``standard_input``). This module knows nothing of records.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from virnucpro import durable
from virnucpro.allowed_roots import check_open
from virnucpro.choices import SequenceKind
from virnucpro.data.reading.compressed import BLOCK_BYTES, GZIP, MOST_START_BYTES, UNPACKING_ERRORS, packing_of
from virnucpro.data.reading.read_formats import (
    BAM_COPY_LINES,
    BAM_END,
    BAM_MAGIC,
    CONVERT_ALIGNED,
    bam_as_fasta,
    fastq_as_fasta,
)
from virnucpro.errors import BadInputError, InputProblem, OutputError, unreadable
from virnucpro.run_folders import read_at
from virnucpro.run_layout import STDIN_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO

    from virnucpro.data.reading.compressed import Packing

UTF8_BOM = b"\xef\xbb\xbf"
DEFAULT_MAX_UNPACKED_BYTES = 256 << 30
"""Limit for one unpacked file or stream, bytes: more than UniRef100, less than a decompression bomb."""
STDIN = "-"
"""Stands for standard input on the command line."""

_COPY_AGAIN = "copy or download the file again"
_SNIFFED_BYTES = 1 << 16
_BGZIP, _BGZIP_AT = b"\6\0BC\2\0", 10
"""The extra field of gzip that ``bgzip`` writes, and its place."""
_SAVE_FIRST = "save it to a regular file first"
_ANY2FASTA = "convert it with: any2fasta FILE > NEW_FILE"
_FORMATS = tuple(
    (re.compile(start, re.DOTALL), what, remedy)
    for start, what, remedy in (
        (rb"PK\x03\x04", "zip", "unpack it with: unzip FILE"),
        (rb"7z\xbc\xaf", "7z", "unpack it with: 7z x FILE"),
        (rb"Rar!\x1a\x07", "rar", "unpack it with: unrar x FILE"),
        (rb"\x1f\x9d", "compress (.Z)", "unpack it with: gzip -d FILE"),
        (rb".{257}ustar", "tar", "unpack it with: tar -xf FILE"),
        (rb"CRAM", "CRAM", CONVERT_ALIGNED),
        (rb"@HD\tVN:|@SQ\tSN:", "SAM", CONVERT_ALIGNED),
        (rb"\xff\xfe|\xfe\xff", "UTF-16 text", "convert it with: iconv -f utf-16 -t utf-8 FILE > NEW_FILE"),
        (rb">\x00", "UTF-16 text", "convert it with: iconv -f utf-16le -t utf-8 FILE > NEW_FILE"),
        (rb"\x00>", "UTF-16 text", "convert it with: iconv -f utf-16be -t utf-8 FILE > NEW_FILE"),
        (rb"LOCUS +\S", "GenBank", _ANY2FASTA),
        (rb"ID   \S", "EMBL", _ANY2FASTA),
        (rb"##gff-version", "GFF3", "take the sequences at its end with: sed '1,/^##FASTA/d' FILE > NEW_FILE"),
        (rb"[HSLPW#]\t\S", "GFA", """convert it with: awk '/^S/ {print ">" $2; print $3}' FILE > NEW_FILE"""),
        (rb"(?i:\s*<(!doctype|html|\?xml))", "HTML or XML", "download the file again: this is a page about it"),
        (rb"version https://git-lfs", "a Git LFS pointer", "fetch the file with: git lfs pull"),
    )
)


class InputFormat(StrEnum):
    FASTA = "FASTA"
    FASTQ = "FASTQ"
    BAM = "BAM"


@dataclass(frozen=True, kw_only=True)
class ReadableFile:
    """An input file that records can be read from by offset."""

    path: str
    real_path: str
    """Absolute, links resolved."""
    read_path: str
    """The file that records are read from: ``real_path``, or the FASTA copy of a compressed file, FASTQ or BAM."""
    given_bytes: int | None = None
    """Bytes of the original of a copy; None where ``read_path`` is the original."""
    given_sha256: str | None = None
    """Hex sha256 of the original of a copy, same as above."""
    lines_per_record: int | None = None
    """None where the lines of ``read_path`` are those of the unpacked original. The copy of a format without lines
    has a fixed number of lines a record; messages give the record's number instead."""
    is_fastq: bool = False
    lacks_bgzip_end: bool = False
    """Whether it is compressed by ``bgzip`` and has no end-of-file block: it may be truncated between two blocks."""

    def place(self, line: int) -> int:
        """Return what messages give for a line of ``read_path``: a line or a record's number, 1-based."""
        return line if self.lines_per_record is None else (line - 1) // self.lines_per_record + 1


def make_readable(
    path: str | Path, unpack_dir: Path, *, kind: SequenceKind, max_unpacked_bytes: int, mate: int = 0
) -> ReadableFile:
    """Return a FASTA input, or its FASTA copy in *unpack_dir*; *mate* as of ``fastq_as_fasta``."""
    name = input_name(path)
    real_path = os.path.realpath(path)
    with open_regular(os.fspath(path)) as descriptor:
        file_format, packing = _sniffed(descriptor, name, max_unpacked_bytes, kind)
        if file_format is InputFormat.FASTA and packing is None:
            return ReadableFile(path=name, real_path=real_path, read_path=real_path)
        at_end = max(0, os.fstat(descriptor).st_size - len(BAM_END))
        is_bam = file_format is InputFormat.BAM
        lacks_end = packing is GZIP and read_at(descriptor, len(BAM_END), at_end) != BAM_END
        if is_bam and lacks_end:
            raise unusable(name, "truncated BAM: it has no end-of-file block", _COPY_AGAIN)
        is_bgzip = read_at(descriptor, len(_BGZIP), _BGZIP_AT) == _BGZIP
        given_bytes, given_sha256 = hash_content(descriptor)
        unpacked = unpack_dir.absolute() / f"{given_sha256}.fasta"
        blocks = _blocks(descriptor, name, max_unpacked_bytes, packing)
        with durable.replacing(unpacked) as copy:
            if file_format is InputFormat.FASTQ:
                blocks = fastq_as_fasta(blocks, name, mate)
            elif is_bam:
                blocks = bam_as_fasta(blocks, name)
            for block in blocks:
                copy.write(block)
    return ReadableFile(
        path=name,
        real_path=real_path,
        read_path=os.fspath(unpacked),
        given_bytes=given_bytes,
        given_sha256=given_sha256,
        lines_per_record=BAM_COPY_LINES if is_bam else None,
        is_fastq=file_format is InputFormat.FASTQ,
        lacks_bgzip_end=lacks_end and is_bgzip,
    )


def input_name(path: str | Path) -> str:
    """Return the name of an input in messages and names of files: as the user wrote it, or ``stdin``."""
    return "stdin" if STDIN_NAME.fullmatch(os.path.basename(path)) else os.fspath(path)  # noqa: PTH119  not a file yet


def holds_reads(path: str | Path) -> bool:
    """Whether a readable input holds reads: FASTQ or BAM."""
    with open_regular(os.fspath(path)) as descriptor:
        found, _ = _sniffed(descriptor, input_name(path), DEFAULT_MAX_UNPACKED_BYTES, SequenceKind.DNA)
    return found is not InputFormat.FASTA


def _sniffed(
    descriptor: int, name: str, max_unpacked_bytes: int, kind: SequenceKind
) -> tuple[InputFormat, Packing | None]:
    """Return the format of an open file, and how it is compressed."""
    packing = packing_of(read_at(descriptor, MOST_START_BYTES, 0))
    head = _head(_blocks(descriptor, name, max_unpacked_bytes, packing))
    if packing is not None and (inner := packing_of(head)) is not None:
        what = f"{inner.name} inside {packing.name}, not FASTA"
        raise unusable(name, what, f"unpack it with: {packing.program} FILE")
    return _format_of(head, name, kind), packing


@contextmanager
def open_regular(path: str) -> Iterator[int]:
    """Open a regular file; ``BadInputError``, or ``PathNotAllowedError`` outside the allowed folders."""
    if path == STDIN:
        raise unusable(path, "only the commands predict and embed read standard input", _SAVE_FIRST)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        what = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise unusable(path, what, "check the name and the permissions") from error
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise unusable(path, os.strerror(errno.EISDIR), "name the FASTA files in it")
        if not stat.S_ISREG(mode):
            raise unusable(path, "not a regular file (a pipe, socket or device)", _SAVE_FIRST)
        check_open(descriptor, path)
        yield descriptor
    except OSError as error:
        if isinstance(error, OutputError) or error.filename is not None:
            raise
        raise unreadable(path, error) from error
    finally:
        with suppress(OSError):  # what was only read loses nothing
            os.close(descriptor)


def hash_content(descriptor: int) -> tuple[int, str]:
    """Return the bytes of an open file and their hex sha256; its read position does not move."""
    digest = hashlib.sha256()
    num_bytes = 0
    while block := os.pread(descriptor, BLOCK_BYTES, num_bytes):
        digest.update(block)
        num_bytes += len(block)
    return num_bytes, digest.hexdigest()


def _head(blocks: Iterator[bytes]) -> bytes:
    head = b""
    while len(head) < _SNIFFED_BYTES and (block := next(blocks, b"")):
        head += block
    return head[:_SNIFFED_BYTES]


def _blocks(descriptor: int, name: str, max_unpacked_bytes: int, packing: Packing | None) -> Iterator[bytes]:
    """Yield the bytes of a file from its start, unpacked where it is compressed."""
    with os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(0)
        yield from stream_blocks(file, name, max_unpacked_bytes, packing)


def stream_blocks(file: BinaryIO, name: str, max_unpacked_bytes: int, packing: Packing | None) -> Iterator[bytes]:
    """Yield the rest of a file, unpacked where it is compressed; BadInputError where that unpacks to too many bytes."""
    if packing is None:
        while block := file.read(BLOCK_BYTES):
            yield block
        return
    unpacked_bytes = 0
    blocks = packing.blocks(file)
    while True:
        try:
            block = next(blocks, b"")
        except EOFError as error:
            raise unusable(name, f"truncated {packing.name}", _COPY_AGAIN) from error
        except UNPACKING_ERRORS as error:
            raise unusable(name, f"damaged {packing.name} ({error})", _COPY_AGAIN) from error
        if not block:
            return
        unpacked_bytes += len(block)
        if unpacked_bytes > max_unpacked_bytes:
            what = f"{packing.name} that unpacks to more than {max_unpacked_bytes} bytes"
            raise unusable(name, what, f"unpack it yourself with {packing.program}, if you trust it")
        yield block


def _format_of(head: bytes, name: str, kind: SequenceKind) -> InputFormat:
    for start, what, remedy in _FORMATS:
        if start.match(head):
            raise unusable(name, f"{what}, not FASTA", remedy)
    if head.startswith(BAM_MAGIC):
        if kind is SequenceKind.PROTEIN:
            raise unusable(name, "BAM, not FASTA", "convert it with: samtools fasta FILE > NEW_FILE")
        return InputFormat.BAM
    text = head.removeprefix(UTF8_BOM)
    if b"\r" in text and b"\n" not in text:
        raise unusable(name, "CR line ends", "convert them with: tr '\\r' '\\n' < FILE > NEW_FILE", line=1)
    text = text.lstrip()
    if text.startswith(b"@"):
        if kind is SequenceKind.PROTEIN:
            line = 1 + head[: -len(text)].count(b"\n")
            raise unusable(name, "FASTQ, not FASTA", "convert it with: seqtk seq -A FILE > NEW_FILE", line=line)
        return InputFormat.FASTQ
    if not text.startswith(b">") and b"\0" in text:
        raise unusable(name, "binary data, not FASTA", "name a FASTA file")
    return InputFormat.FASTA


def unusable(path: str, what: str, remedy: str, *, line: int | None = None) -> BadInputError:
    return BadInputError([InputProblem(path, line, what, remedy)])
