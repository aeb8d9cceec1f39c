"""
The workers' log files of a run, merged in order of time.

Files are read line by line and may grow, be truncated or be replaced meanwhile. A line that is torn or not ours is
text, with the time of the line before.
"""

from __future__ import annotations

import heapq
import os
import re
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, BinaryIO, Self

from virnucpro.errors import ResultError
from virnucpro.run_folders import only_regular
from virnucpro.run_layout import PredictionLayout, RunLayout
from virnucpro.telemetry.logs.log_lines import LogEntry, parse_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

MAX_LINE_BYTES = 1 << 20
"""Bytes read of a line; the rest of a longer one is skipped."""
_WINDOW_BYTES = 256 << 10
"""Bytes at the end of a file that are searched first for its last lines."""
_RANK = re.compile(r"worker_(\d+)\.log")


class LogFile:
    """One worker's log, which may not exist yet; a context manager."""

    def __init__(self, path: Path) -> None:
        match = _RANK.fullmatch(path.name)
        assert match is not None
        self.path, self.rank = path, int(match[1])
        self._file: BinaryIO | None = None
        self._before = LogEntry(event="")

    def read_new(self, *, is_over: bool = True) -> Iterator[LogEntry]:
        """
        Yield the lines not read yet.

        Args:
            is_over: No more will be written, so an unfinished last line counts.
        """
        if self._file is not None and not self._is_at_path():
            yield from self._lines(self._file, is_over=True)
            self.__exit__()
        if self._file is None:
            self._file = self._open()
        if self._file is not None:
            if os.fstat(self._file.fileno()).st_size < self._file.tell():  # truncated
                self._file.seek(0)
            yield from self._lines(self._file, is_over=is_over)

    def last(self, count: int, is_wanted: Callable[[LogEntry], bool], *, is_over: bool = True) -> list[LogEntry]:
        """Return the last *count* wanted lines; ``read_new`` continues after them."""
        self._file = self._open()
        found: deque[LogEntry] = deque(maxlen=count)
        if self._file is not None:
            size_bytes, window_bytes = os.fstat(self._file.fileno()).st_size, _WINDOW_BYTES
            while True:
                found.clear()
                self._before = LogEntry(event="")
                start = max(0, size_bytes - window_bytes)
                self._file.seek(max(0, start - 1))
                if start:
                    self._skip_line(self._file)
                found.extend(entry for entry in self._lines(self._file, is_over=is_over) if is_wanted(entry))
                if len(found) == count or not start:
                    break
                window_bytes *= 8
        return list(found)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> BinaryIO | None:
        try:
            descriptor = only_regular(os.fspath(self.path), os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ResultError(self.path, error.strerror or str(error)) from error
        return os.fdopen(descriptor, "rb")

    def _is_at_path(self) -> bool:
        assert self._file is not None
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except FileNotFoundError:
            return False

    def _lines(self, file: BinaryIO, *, is_over: bool) -> Iterator[LogEntry]:
        while line := self._read_line(file):
            if not line.endswith(b"\n"):
                if len(line) == MAX_LINE_BYTES:
                    self._skip_line(file)
                elif not is_over:  # the rest is being written
                    file.seek(-len(line), os.SEEK_CUR)
                    return
            if not line.strip():
                continue
            entry = parse_line(line.removesuffix(b"\n"))
            if entry.is_text:
                entry = replace(entry, time=self._before.time, bound=self._before.bound)
            self._before = entry
            yield entry

    def _skip_line(self, file: BinaryIO) -> None:
        while (rest := self._read_line(file)) and not rest.endswith(b"\n"):
            pass

    def _read_line(self, file: BinaryIO) -> bytes:
        try:
            return file.readline(MAX_LINE_BYTES)
        except OSError as error:
            raise ResultError(self.path, error.strerror or str(error)) from error


@dataclass(frozen=True)
class FoundEntry:
    entry: LogEntry
    rank: int
    stage: str
    """``dna`` or ``protein`` in a prediction, else empty."""


class RunLogs:
    """
    All workers' logs of a run; a context manager.

    Args:
        is_wanted: Selects lines.
    """

    def __init__(
        self, output_dir: Path, is_wanted: Callable[[LogEntry], bool] = lambda _: True, *, rank: int | None = None
    ) -> None:
        prediction = PredictionLayout(output_dir)
        self._folders = {
            "": RunLayout(output_dir),
            "dna": RunLayout(prediction.dna_dir),
            "protein": RunLayout(prediction.protein_dir),
        }
        self._is_wanted = is_wanted
        self._rank = rank
        self._files: dict[Path, tuple[str, LogFile]] = {}
        self._to_close = ExitStack()

    def ranks(self) -> list[int]:
        return sorted({LogFile(path).rank for layout in self._folders.values() for path in layout.worker_logs()})

    def last(self, count: int, *, is_over: bool = True) -> list[FoundEntry]:
        """Return the last *count* lines of all logs together; ``read_new`` continues after them."""
        self._look_for_files()
        found = (
            [FoundEntry(entry, file.rank, stage) for entry in file.last(count, self._is_wanted, is_over=is_over)]
            for stage, file in self._files.values()
        )
        return list(deque(_by_time(found), maxlen=count))

    def read_new(self, *, is_over: bool = True) -> Iterator[FoundEntry]:
        """Yield the lines not read yet, new files included."""
        self._look_for_files()
        yield from _by_time(self._wanted_of(stage, file, is_over=is_over) for stage, file in self._files.values())

    def _wanted_of(self, stage: str, file: LogFile, *, is_over: bool) -> Iterator[FoundEntry]:
        for entry in file.read_new(is_over=is_over):
            if self._is_wanted(entry):
                yield FoundEntry(entry, file.rank, stage)

    def _look_for_files(self) -> None:
        for stage, layout in self._folders.items():
            for path in sorted(layout.worker_logs()):
                if path not in self._files:
                    file = self._to_close.enter_context(LogFile(path))
                    if self._rank in {None, file.rank}:
                        self._files[path] = (stage, file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._to_close.close()


def last_of_process(path: Path, *, attempt: int, run_id: str, count: int) -> list[LogEntry]:
    """Return the lines of one process among the last *count* of a log."""
    with LogFile(path) as file:
        entries = file.last(count, lambda _: True)
    return [entry for entry in entries if entry.process == (run_id, attempt)]


def _by_time(entries: Iterable[Iterable[FoundEntry]]) -> Iterator[FoundEntry]:
    return heapq.merge(*entries, key=lambda found: found.entry.time)
