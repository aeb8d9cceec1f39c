"""
Opening input files: regular files only, gzip told by its first bytes, everything else refused with the fix.

Records are read by byte offset, which a compressed file does not offer: a gzip file is unpacked once into a folder of
the run, under the sha256 of what it holds compressed. Whether an unpacked copy is still good is decided by its own
sha256, never by a date. This module knows nothing of records.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import os
import stat
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from virnucpro import durable
from virnucpro.errors import BadInputError, InputProblem

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

UTF8_BOM = b"\xef\xbb\xbf"
DEFAULT_MAX_UNPACKED_BYTES = 256 << 30
"""Bytes that one gzip file may unpack to: beyond UniRef100, short of what an exploding archive asks for."""

_GZIP_MAGIC = b"\x1f\x8b"
_COPY_BYTES = 1 << 20
_SNIFFED_BYTES = 1 << 16
_SAVE_FIRST = "save it to a regular file first"
_FORMATS = (
    (b"BZh", "bzip2", "unpack it with: bunzip2 FILE"),
    (b"\x28\xb5\x2f\xfd", "Zstandard", "unpack it with: unzstd FILE"),
    (b"\xfd7zXZ\x00", "xz", "unpack it with: unxz FILE"),
    (b"PK\x03\x04", "zip", "unpack it with: unzip FILE"),
    (b"\xff\xfe", "UTF-16 text", "convert it with: iconv -f utf-16 -t utf-8 FILE > NEW_FILE"),
    (b"\xfe\xff", "UTF-16 text", "convert it with: iconv -f utf-16 -t utf-8 FILE > NEW_FILE"),
    (b">\x00", "UTF-16 text", "convert it with: iconv -f utf-16le -t utf-8 FILE > NEW_FILE"),
    (b"\x00>", "UTF-16 text", "convert it with: iconv -f utf-16be -t utf-8 FILE > NEW_FILE"),
    (_GZIP_MAGIC, "gzip inside gzip", "unpack it with: gunzip FILE"),
)


@dataclass(frozen=True, kw_only=True)
class ReadableFile:
    """An input file that records can be read from by offset."""

    path: str
    """As the user named it; for messages."""
    real_path: str
    """Absolute, links resolved."""
    read_path: str
    """What records are read from: ``real_path``, or the unpacked copy of a gzip file."""
    packed_bytes: int | None
    """Bytes of the compressed file, or None where the input is plain."""
    packed_sha256: str | None
    """Hex sha256 of the compressed file, or None where the input is plain."""


def make_readable(path: str | Path, unpack_dir: Path, *, max_unpacked_bytes: int) -> ReadableFile:
    """
    Check that an input is a text file that can be read by offset; unpack it where it is gzip.

    Args:
        path: As the user named it.
        unpack_dir: Where the unpacked copy goes; made only if it is needed.
        max_unpacked_bytes: Bytes that a gzip file may unpack to.

    Raises:
        BadInputError: It cannot be used; one problem.
        OutputError: The unpacked copy cannot be written.
    """
    name = os.fspath(path)
    real_path = os.path.realpath(name)
    with open_regular(name) as descriptor:
        if os.pread(descriptor, len(_GZIP_MAGIC), 0) != _GZIP_MAGIC:
            _refuse_other_formats(os.pread(descriptor, _SNIFFED_BYTES, 0), name)
            return ReadableFile(
                path=name, real_path=real_path, read_path=real_path, packed_bytes=None, packed_sha256=None
            )
        packed_bytes, packed_sha256 = hash_content(descriptor)
        unpacked = unpack_dir.absolute() / f"{packed_sha256}.fasta"
        _unpack(descriptor, name, unpacked, max_unpacked_bytes)
    with open_regular(os.fspath(unpacked)) as descriptor:
        _refuse_other_formats(os.pread(descriptor, _SNIFFED_BYTES, 0), name)
    return ReadableFile(
        path=name,
        real_path=real_path,
        read_path=os.fspath(unpacked),
        packed_bytes=packed_bytes,
        packed_sha256=packed_sha256,
    )


@contextmanager
def open_regular(path: str) -> Iterator[int]:
    """
    Open a regular file for reading and yield its descriptor.

    Raises:
        BadInputError: It is none, or the system refuses; one problem with the system's text.
    """
    if path == "-":
        raise _unusable(path, "standard input has no byte offsets", _SAVE_FIRST)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise _unusable(path, _system_text(error), "check the name and the permissions") from error
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise _unusable(path, os.strerror(errno.EISDIR), "name the FASTA files in it")
        if not stat.S_ISREG(mode):
            raise _unusable(path, "not a regular file (a pipe, socket or device)", _SAVE_FIRST)
        yield descriptor
    finally:
        os.close(descriptor)


def hash_content(descriptor: int) -> tuple[int, str]:
    """Return the bytes of an open file and their hex sha256; its read position does not move."""
    digest = hashlib.sha256()
    num_bytes = 0
    while block := os.pread(descriptor, _COPY_BYTES, num_bytes):
        digest.update(block)
        num_bytes += len(block)
    return num_bytes, digest.hexdigest()


def _unpack(descriptor: int, name: str, unpacked: Path, max_unpacked_bytes: int) -> None:
    """Write what the gzip file *descriptor* holds to *unpacked*, whole or not at all."""
    with durable.replacing(unpacked) as copy:
        for block in _unpacked_blocks(descriptor, name, max_unpacked_bytes):
            copy.write(block)


def _unpacked_blocks(descriptor: int, name: str, max_unpacked_bytes: int) -> Iterator[bytes]:
    unpacked_bytes = 0
    with os.fdopen(os.dup(descriptor), "rb") as packed, gzip.GzipFile(fileobj=packed) as members:
        packed.seek(0)
        while True:
            try:
                block = members.read(_COPY_BYTES)
            except EOFError as error:
                raise _unusable(name, "truncated gzip", "copy or download the file again") from error
            except (OSError, zlib.error) as error:
                raise _unusable(name, f"damaged gzip ({error})", "copy or download the file again") from error
            if not block:
                return
            unpacked_bytes += len(block)
            if unpacked_bytes > max_unpacked_bytes:
                what = f"gzip that unpacks to more than {max_unpacked_bytes} bytes"
                raise _unusable(name, what, "unpack it yourself with gunzip, if you trust it")
            yield block


def _refuse_other_formats(head: bytes, name: str) -> None:
    """Refuse what is recognisably something else than FASTA, by its first bytes."""
    for magic, kind, remedy in _FORMATS:
        if head.startswith(magic):
            raise _unusable(name, f"{kind}, not FASTA", remedy)
    text = head.removeprefix(UTF8_BOM)
    if b"\r" in text and b"\n" not in text:
        raise _unusable(name, "CR line ends", "convert them with: tr '\\r' '\\n' < FILE > NEW_FILE", line=1)
    text = text.lstrip()
    if text.startswith(b"@"):
        line = 1 + head[: -len(text)].count(b"\n")
        raise _unusable(name, "FASTQ, not FASTA", "convert it with: seqtk seq -A FILE > NEW_FILE", line=line)
    if not text.startswith(b">") and b"\0" in text:
        raise _unusable(name, "binary data, not FASTA", "name a FASTA file")


def _unusable(path: str, what: str, remedy: str, *, line: int | None = None) -> BadInputError:
    return BadInputError([InputProblem(path, line, what, remedy)])


def _system_text(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
