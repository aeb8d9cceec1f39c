"""Any number of lines in the order of their bytes: runs are sorted in unnamed files, then merged."""

from __future__ import annotations

import heapq
import tempfile
from itertools import islice
from typing import IO, TYPE_CHECKING, Self

from virnucpro import durable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

LINES_IN_MEMORY = 1 << 19
MOST_FILES = 200
"""Sorted runs that are open at once, before they are merged into one."""
_LINES_PER_PIECE = 1 << 13


class SortedLines:
    """Context manager that collects lines; sorts *lines_in_memory* at a time into unnamed files in *folder*."""

    def __init__(self, folder: Path, *, lines_in_memory: int = LINES_IN_MEMORY) -> None:
        self._folder = folder
        self._lines_in_memory = lines_in_memory
        self._lines: list[bytes] = []
        self._sorted: list[IO[bytes]] = []

    def add(self, lines: Iterable[bytes]) -> None:
        """Add lines, each with its line feed. Raises OutputError: the system refused."""
        self._lines.extend(lines)
        if len(self._lines) < self._lines_in_memory:
            return
        self._lines.sort()
        self._keep(self._lines)
        self._lines = []
        if len(self._sorted) == MOST_FILES:
            pieces, self._sorted = self._sorted, []
            self._keep(heapq.merge(*pieces))
            for piece in pieces:
                piece.close()

    def _keep(self, lines: Iterable[bytes]) -> None:
        with durable.writing(self._folder):
            self._sorted.append(tempfile.TemporaryFile(dir=self._folder))  # noqa: SIM115  closed when this object ends
            self._sorted[-1].writelines(lines)
            self._sorted[-1].seek(0)

    def pieces(self) -> Iterator[bytes]:
        """Yield everything in order, many lines at a time."""
        self._lines.sort()
        merged = heapq.merge(self._lines, *self._sorted)
        while lines := list(islice(merged, _LINES_PER_PIECE)):
            yield b"".join(lines)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._sorted:
            file.close()
