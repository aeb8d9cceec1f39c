"""
The workers' log files of a run, merged in order of time; and from them the facts of a worker that failed.

Files are read line by line and may grow, be truncated or be replaced meanwhile. A line that is torn or not ours is
text, with the time of the line before. The report of a failure is short, plain text without control characters: it is
shown on the terminal and under Prefect as it is.
"""

from __future__ import annotations

import heapq
import os
import re
import signal
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, BinaryIO, Self

from virnucpro.errors import ResultError, printable
from virnucpro.run_folders import only_regular
from virnucpro.run_layout import PredictionLayout, RunLayout
from virnucpro.telemetry.log_lines import LogEntry, entry_line, exception_sentence, frame_lines, parse_line
from virnucpro.telemetry.show.wording import rank_place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from virnucpro.telemetry.snapshot import RankSnapshot

MAX_LINE_BYTES = 1 << 20
"""Bytes read of a line; the rest of a longer one is skipped."""
_WINDOW_BYTES = 256 << 10
"""Bytes at the end of a file that are searched first for its last lines."""
TAIL_LINES = 10
_FRAMES = 3
"""Innermost frames of each exception that are shown."""
_MAX_EXCEPTION_LINES = 10
_MAX_CHARACTERS = 400
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


def failure_report(
    rank: RankSnapshot,
    *,
    failure: str,
    reason: str,
    log_path: Path,
    exit_code: int | None,
    starts_again: bool,
    run_id: str,
) -> str:
    """
    Return a few lines about a process that has failed.

    Args:
        rank: What was known of it when it ended.
        failure: Class of the failure.
        reason: One sentence.
        log_path: Log of the rank; lines of its other processes are not shown.
        exit_code: Of the process, negative for a signal; None where it never started.
        starts_again: Whether another process follows.
        run_id: Of this start of the run.
    """
    try:
        entries = last_of_process(log_path, attempt=rank.attempts, run_id=run_id, count=TAIL_LINES)
        unread = ""
    except ResultError as error:
        entries, unread = [], str(error)
    lines = [
        f"rank {rank.rank} on {rank_place(rank)} failed in attempt {rank.attempts} ({failure}): {reason}",
        f"  {_ending(exit_code)}; {'another process follows' if starts_again else 'it is not started again'}",
        f"  last batch: {_last_batch(rank)}",
        *_exception(entries),
    ]
    if entries:
        lines += [f"  end of {log_path}:", *(f"    {entry_line(entry)}" for entry in entries)]
    else:
        lines.append(f"  the log holds nothing of it: {unread or log_path}")
    return "\n".join(_cut(printable(line)) for line in lines)


def _ending(exit_code: int | None) -> str:
    if exit_code is None:
        return "no process"
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"ended by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"ended by signal {-exit_code}"


def _last_batch(rank: RankSnapshot) -> str:
    batch = rank.last_batch
    if batch is None:
        return "none, it had not begun to compute"
    number = f"{batch.sequences:,} sequences" if batch.sequences != 1 else "1 sequence"
    return f"block {batch.block}, {number}, {batch.tokens:,} tokens"


def _exception(entries: list[LogEntry]) -> Iterator[str]:
    exception = next(
        (entry.exception for entry in reversed(entries) if entry.exception and entry.level == "ERROR"), None
    )
    if exception is not None:
        yield f"  exception: {exception_sentence(exception)}"
        for line in islice(frame_lines(exception, frames=_FRAMES), _MAX_EXCEPTION_LINES):
            yield f"    {line}"


def _cut(line: str) -> str:
    return line if len(line) <= _MAX_CHARACTERS else f"{line[: _MAX_CHARACTERS - 3]}..."
