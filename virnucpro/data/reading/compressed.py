"""
Compressed input, recognised by its first bytes: gzip, bzip2, xz and Zstandard, each of one member or several.

Every byte of a file must be of a member, or NUL between members. The readers of the standard library skip whatever
follows a bzip2 or Zstandard member and is none, so a member with a damaged start would be sequences lost silently.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import sys
import zlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import BinaryIO

    from _typeshed import WriteableBuffer

BLOCK_BYTES = 1 << 20
"""Most bytes of a block, unpacked."""
UNPACKING_ERRORS = (OSError, zlib.error, lzma.LZMAError, zstd.ZstdError)
"""What damage raises; the end of the file within a member raises ``EOFError``."""

_LONGEST_ZSTD_WINDOW = 31
"""Logarithm: that of ``zstd --long=31``. Memory is taken as far as the content fills it."""


class _Member(Protocol):
    """Unpacks one member; the standard library's ``bz2``, ``lzma`` and ``zstd`` have such a class each."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /, max_length: int = -1) -> bytes: ...


@dataclass(frozen=True)
class Packing:
    name: str
    starts: tuple[bytes, ...]
    """A file of this format begins with one of them."""
    program: str
    begin: Callable[[], _Member] | None
    """Begins a member; None for gzip."""

    def blocks(self, file: BinaryIO) -> Iterator[bytes]:
        """Yield the unpacked bytes of *file*, read to its end; raises ``EOFError`` and ``UNPACKING_ERRORS``."""
        return _unpacked_gzip(file) if self.begin is None else _unpacked(file, self.begin)


GZIP = Packing("gzip", (b"\x1f\x8b",), "gunzip", None)
_SKIPPED_FRAMES = tuple(
    bytes([first]) + b"\x2a\x4d\x18" for first in range(0x50, 0x60)
)  # files of pzstd begin with one
PACKINGS = (
    GZIP,
    Packing("bzip2", (b"BZh",), "bunzip2", bz2.BZ2Decompressor),
    Packing("xz", (b"\xfd7zXZ\x00",), "unxz", partial(lzma.LZMADecompressor, lzma.FORMAT_XZ)),
    Packing(
        "Zstandard",
        (b"\x28\xb5\x2f\xfd", *_SKIPPED_FRAMES),
        "unzstd",
        partial(zstd.ZstdDecompressor, options={zstd.DecompressionParameter.window_log_max: _LONGEST_ZSTD_WINDOW}),
    ),
)
MOST_START_BYTES = max(len(start) for packing in PACKINGS for start in packing.starts)
SUFFIXES = ("gz", "bz2", "xz", "zst", "zstd")
"""That names of compressed files usually have."""


def packing_of(head: bytes) -> Packing | None:
    return next((packing for packing in PACKINGS if head.startswith(packing.starts)), None)


class BlockFile(io.RawIOBase):
    """Blocks of bytes as a file."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._block = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        if not self._block:
            self._block = memoryview(next(self._blocks, b""))
        target = memoryview(buffer)
        count = min(len(target), len(self._block))
        target[:count] = self._block[:count]
        self._block = self._block[count:]
        return count


def _unpacked_gzip(file: BinaryIO) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=file) as members:
        while block := members.read(BLOCK_BYTES):
            yield block


def _unpacked(file: BinaryIO, begin: Callable[[], _Member]) -> Iterator[bytes]:
    packed, member = b"", None
    while True:
        if not packed and (member is None or member.needs_input):
            packed = file.read(BLOCK_BYTES)
            if not packed:
                break
        if member is None:
            packed = packed.lstrip(b"\0")
            if not packed:
                continue
            member = begin()
        block = member.decompress(packed, BLOCK_BYTES)
        packed = b""
        if block:
            yield block
        if member.eof:
            packed, member = member.unused_data, None
    if member is not None:
        raise EOFError
