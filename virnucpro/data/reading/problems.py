"""
Problems of the input: those of one error message, or the records that are skipped because they break a rule.

Skipped records are kept in the sequence index as lines of text. Memory is that of the compressed text, some ten bytes a
record, so that a million of them fit.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from virnucpro.choices import BadRecordPolicy
from virnucpro.data.fasta import MAX_ID_BYTES, shown_id
from virnucpro.errors import BadInputError, InputProblem, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from virnucpro.data.fasta import Fault

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


class Problems:
    """Collects the problems of the inputs, up to the limit of one error message, and the records that are skipped."""

    def __init__(self, on_bad_record: BadRecordPolicy = BadRecordPolicy.ERROR) -> None:
        self.skipped = SkippedRecords()
        self.skips_bad = on_bad_record is BadRecordPolicy.SKIP
        self._found: list[InputProblem] = []

    def add_record(self, fault: Fault, name: bytes, path: str, file_number: int) -> None:
        if self.skips_bad:
            self.skipped.add(file_number, fault.line, name, fault.what)
        else:
            self.add(InputProblem(path, fault.line, fault.what, fault.remedy, shown_id(name)))

    def add(self, problem: InputProblem) -> None:
        """Add *problem*; raises BadInputError once there are more than one error holds."""
        if len(self._found) == BadInputError.MAX_PROBLEMS:
            raise BadInputError(self._found, more=True)
        self._found.append(problem)

    def extend(self, error: BadInputError) -> None:
        if error.more:
            raise error
        for problem in error.problems:
            self.add(problem)

    def raise_if_any(self) -> None:
        if self._found:
            raise BadInputError(self._found)


def read_skipped(text: bytes | memoryview, paths: Sequence[str]) -> Iterator[SkippedRecord]:
    """Yield the records of the text of ``SkippedRecords.pieces``, end to end; *paths* are the input files."""
    view = memoryview(text)
    rest = b""
    for start in range(0, len(view), _READ_BYTES):
        *lines, rest = (rest + bytes(view[start : start + _READ_BYTES])).split(b"\n")
        for one in lines:
            number, line, name, what = one.decode("utf-8").split("\t")
            yield SkippedRecord(paths[int(number)], int(line), name, what)
