"""
What the user sees of a run: a bar for each rank on a terminal, plain lines elsewhere.

Progress counts tokens, not sequences, because the long ones come first. A terminal or pipe that closes never harms the
run.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn
from rich.text import Text

from virnucpro.telemetry.show import wording
from virnucpro.telemetry.show.standard_error import StandardError, wrapped
from virnucpro.telemetry.show.terminal import Terminal, lines_of

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from virnucpro.telemetry.snapshot import RunSnapshot, StageSnapshot, View

PLAIN_INTERVAL_S = 30.0
_WORTH_A_LINE_S = 1.0
"""A stage of at least so many seconds leaves a line on a terminal."""
_CLOCK_JITTER_S = 0.001


def say(text: str) -> None:
    """Print a line on standard error; a closed one is ignored."""
    StandardError().write(f"{wrapped(text, sys.stderr)}\n")


def terminal_view(*, is_quiet: bool = False, stop: threading.Event | None = None) -> View:
    """
    Return the view for standard error: bars on a terminal, plain lines elsewhere.

    Args:
        stop: Set when the run is stopping, after its message was written to the terminal directly.
    """
    if is_quiet:
        return QuietView()
    try:
        is_terminal = sys.stderr.isatty()
    except ValueError:  # it is closed
        is_terminal = False
    if not is_terminal or Console(stderr=True, force_terminal=True).is_dumb_terminal:
        return PlainView()
    return TerminalView(Terminal(sys.stderr, interrupted=stop), stop=stop)


class QuietView:
    """Shows messages only."""

    def update(self, snapshot: RunSnapshot) -> None:
        pass

    def say(self, text: str) -> None:
        say(text)

    def close(self) -> None:
        pass


class TerminalView:
    """Bars on the last lines of a terminal; text written to ``sys.stderr`` appears above them."""

    def __init__(self, terminal: Terminal, *, stop: threading.Event | None = None) -> None:
        self._terminal = terminal
        self._stop = stop
        self._ended = _EndedStages()
        self._ticks = 0

    def update(self, snapshot: RunSnapshot) -> None:
        is_stopping = self._stop is not None and self._stop.is_set()
        above = [
            Text(_ended_line(stage, snapshot), style="dim")
            for stage in self._ended.new_of(snapshot)
            if stage.seconds >= _WORTH_A_LINE_S
        ]
        lines = lines_of(snapshot, self._terminal, tick=self._ticks, is_stopping=is_stopping)
        self._ticks += 1
        self._terminal.draw(lines, above=above)

    def say(self, text: str) -> None:
        self._terminal.draw(None, above=[Text(line) for line in wrapped(text, sys.stderr).split("\n")])

    def close(self) -> None:
        self._terminal.close()


class PlainView(QuietView):
    """Lines for a log: at the start of a stage, every ``PLAIN_INTERVAL_S``, and at the end of a long stage."""

    def __init__(self) -> None:
        self._announced = 0
        self._ended = _EndedStages()
        self._last_line_s: float | None = None

    def update(self, snapshot: RunSnapshot) -> None:
        if self._last_line_s is None:
            self._last_line_s = snapshot.now
        time_of_day = time.strftime("%H:%M:%S", time.localtime(snapshot.now))
        lines = [
            _ended_line(stage, snapshot) for stage in self._ended.new_of(snapshot) if stage.seconds >= PLAIN_INTERVAL_S
        ]
        lines += [wording.stage_title(stage) for stage in snapshot.stages[self._announced :] if not stage.is_over]
        self._announced = len(snapshot.stages)
        if not lines and snapshot.now - self._last_line_s >= PLAIN_INTERVAL_S:
            lines = _plain_line(snapshot)
        for line in lines:
            self._last_line_s = snapshot.now
            say(f"{time_of_day}  {line}")


class _EndedStages:
    """Stages that have ended since the last look."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def new_of(self, snapshot: RunSnapshot) -> list[StageSnapshot]:
        """Return them, without stages that contain others."""
        ended = {number for number, stage in enumerate(snapshot.stages) if stage.is_over} - self._seen
        self._seen |= ended
        return [snapshot.stages[number] for number in sorted(ended) if not _has_parts(snapshot.stages[number:])]


def _has_parts(stages: Sequence[StageSnapshot]) -> bool:
    """Whether the first of *stages* still ran when a later one began, within the jitter of the clocks."""
    outer, *later = stages
    return any(stage.started < outer.started + outer.seconds - _CLOCK_JITTER_S for stage in later)


def _ended_line(stage: StageSnapshot, snapshot: RunSnapshot) -> str:
    embedding = next((item for item in reversed(snapshot.embeddings) if item.model == stage.model), None)
    if stage.name != "embed" or embedding is None:
        return f"{wording.stage_title(stage)}: {wording.duration(stage.seconds)}"
    before = reversed(snapshot.stages[: snapshot.stages.index(stage)])
    around = next((outer for outer in before if _has_parts((outer, stage))), stage)
    title = wording.stage_title(replace(around, model=""))  # the model makes it too long for a terminal
    at = "" if embedding.tokens_left == 0 else f", ended at {wording.percent(embedding.progress)}"
    rows = f"{embedding.rows:,} of {embedding.records:,} rows on disk"
    return f"{title}: {rows} after {wording.duration(stage.seconds)}{at}"


def _plain_line(snapshot: RunSnapshot) -> list[str]:
    """Return the line for a moment within a stage."""
    stage, embedding = snapshot.stage, snapshot.embedding
    if stage is None:
        return []
    if embedding is None or embedding.is_over:
        return [f"{wording.stage_title(stage)}: {wording.duration(stage.seconds)} so far"]
    return [wording.progress_of(embedding)]


class DownloadProgress:
    """Context manager around a possible download; shows a bar from the first byte on."""

    def __init__(self, *, is_quiet: bool = False) -> None:
        self._is_quiet = is_quiet
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def advance(self, done_bytes: int, total_bytes: int | None) -> None:
        if self._is_quiet:
            return
        if self._bar is None or self._task is None:
            console = Console(stderr=True)
            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=console
            )
            self._task = self._bar.add_task("weights", total=total_bytes)
            self._bar.start()
        self._bar.update(self._task, completed=done_bytes, total=total_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
