"""
What is known of a worker that failed, and the end of its log: short, plain text without control characters.

The report is shown on the terminal and under Prefect as it is. A line of the log that is torn or foreign is text, with
the time of the line before.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from virnucpro.errors import printable
from virnucpro.run_folders import only_regular
from virnucpro.telemetry.log_lines import LogEntry, entry_line, exception_sentence, frame_lines, parse_line
from virnucpro.telemetry.show.wording import rank_place
from virnucpro.telemetry.snapshot import SEQUENCES, TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from virnucpro.telemetry.snapshot import RankSnapshot

TAIL_LINES = 10
_TAIL_BYTES = 1 << 20
"""Bytes at the end of a log that are searched for its last lines."""
_FRAMES = 3
"""Innermost frames of each exception that are shown."""
_MAX_EXCEPTION_LINES = 10
_MAX_CHARACTERS = 400


def failure_report(
    rank: RankSnapshot,
    *,
    failure: str,
    reason: str,
    log_path: Path,
    exit_code: int | None,
    starts_again: bool,
    run_id: str,
    counts: str = SEQUENCES,
    measure: str = TOKENS,
) -> str:
    """
    Return a few lines about a process that has failed.

    Args:
        log_path: Log of the rank; lines of its other processes are not shown.
        exit_code: Of the process, negative for a signal; None where it never started.
    """
    try:
        last = _last_entries(log_path)
        unread = ""
    except OSError as error:
        last, unread = [], f"{log_path}: {error.strerror or error}"
    entries = [entry for entry in last if entry.process == (run_id, rank.attempts)]
    lines = [
        f"rank {rank.rank} on {rank_place(rank)} failed in attempt {rank.attempts} ({failure}): {reason}",
        f"  {_ending(exit_code)}; {'another process follows' if starts_again else 'it is not started again'}",
        f"  last batch: {_last_batch(rank, counts, measure)}",
        *_exception(entries),
    ]
    if entries:
        lines += [f"  end of {log_path}:", *(f"    {entry_line(entry)}" for entry in entries)]
    else:
        lines.append(f"  the log holds nothing of it: {unread or log_path}")
    return "\n".join(_cut(printable(line)) for line in lines)


def _last_entries(path: Path) -> list[LogEntry]:
    """Return the last lines of a log, which may be absent."""
    try:
        descriptor = only_regular(os.fspath(path), os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return []
    with os.fdopen(descriptor, "rb") as file:
        start = max(0, os.fstat(descriptor).st_size - _TAIL_BYTES)
        file.seek(start)
        lines = file.read(_TAIL_BYTES).split(b"\n")
    found: deque[LogEntry] = deque(maxlen=TAIL_LINES)
    before = LogEntry(event="")
    for line in lines[bool(start) :]:  # the first one may be truncated
        if line.strip():
            entry = parse_line(line)
            before = replace(entry, time=before.time, bound=before.bound) if entry.is_text else entry
            found.append(before)
    return list(found)


def _ending(exit_code: int | None) -> str:
    if exit_code is None:
        return "no process"
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"ended by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"ended by signal {-exit_code}"


def _last_batch(rank: RankSnapshot, counts: str, measure: str) -> str:
    batch = rank.last_batch
    if batch is None:
        return "none, it had not begun to compute"
    number = f"{batch.sequences:,} {counts if batch.sequences != 1 else counts.removesuffix('s')}"
    return f"block {batch.block}, {number}, {batch.tokens:,} {measure}"


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
