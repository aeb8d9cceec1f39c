"""
Records that were skipped because they break a rule: which, where, and why.

They are kept in the sequence index as lines of text. Memory is that of the compressed text, some ten bytes a record, so
that a million of them fit.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from virnucpro.data.fasta import MAX_ID_BYTES
from virnucpro.errors import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_PACKED_LINES = 1 << 12
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class SkippedRecord:
    path: str
    line: int
    sequence_id: str
    """The id as far as there is one, unprintable characters escaped."""
    what: str

    @property
    def reason(self) -> str:
        """Where and why, in one text without tabs."""
        return f"{printable(self.path)}:{self.line}: {self.what}"


class SkippedRecords:
    """Collects skipped records while the input is read."""

    def __init__(self) -> None:
        self._packed: list[bytes] = []
        self._lines: list[str] = []
        self.count = 0

    def add(self, file_number: int, line: int, name: bytes, what: str) -> None:
        """Add a record of input file *file_number*, from 0."""
        shown = printable(name[:MAX_ID_BYTES].decode("utf-8", "backslashreplace"))
        self._lines.append(f"{file_number}\t{line}\t{shown}\t{printable(what)}\n")
        self.count += 1
        if len(self._lines) == _PACKED_LINES:
            self._packed.append(self._pack())

    def _pack(self) -> bytes:
        text = "".join(self._lines).encode("utf-8", "backslashreplace")
        self._lines.clear()
        return zlib.compress(text, level=1)

    def pieces(self) -> Iterator[bytes]:
        """Yield the text of all records, for ``read_skipped``."""
        if self._lines:
            self._packed.append(self._pack())
        for packed in self._packed:
            yield zlib.decompress(packed)


def read_skipped(text: bytes | memoryview, paths: Sequence[str]) -> Iterator[SkippedRecord]:
    """Yield the records of the text of ``SkippedRecords.pieces``, end to end; *paths* are the input files."""
    view = memoryview(text)
    rest = b""
    for start in range(0, len(view), _READ_BYTES):
        *lines, rest = (rest + bytes(view[start : start + _READ_BYTES])).split(b"\n")
        for one in lines:
            number, line, name, what = one.decode("utf-8").split("\t")
            yield SkippedRecord(paths[int(number)], int(line), name, what)
