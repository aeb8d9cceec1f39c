"""
The facts of a worker that failed, without opening a file.

Device and attempt, why it ended, what it was given last, its exception, and the end of its log. Short, plain text
without control characters: it is shown on the terminal and under Prefect as it is.
"""

from __future__ import annotations

import signal
from itertools import islice
from typing import TYPE_CHECKING

from virnucpro.errors import ResultError, printable
from virnucpro.telemetry.logs.log_lines import entry_line, exception_sentence, frame_lines
from virnucpro.telemetry.logs.log_reader import last_of_process
from virnucpro.telemetry.show.wording import rank_place

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from virnucpro.telemetry.logs.log_lines import LogEntry
    from virnucpro.telemetry.snapshot import RankSnapshot

TAIL_LINES = 10
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
