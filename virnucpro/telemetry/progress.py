"""
What a person sees while a run goes on: a bar a rank on a terminal, plain lines otherwise.

Progress is by tokens, not by sequences: the long ones come first. A terminal or a pipe that is closed in the middle
never harms the run.
"""

from __future__ import annotations

import io
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from virnucpro.telemetry import wording
from virnucpro.telemetry.bars import Screen, lines_of
from virnucpro.telemetry.terminal import Terminal

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from virnucpro.telemetry.snapshot import RunSnapshot, StageSnapshot, View

PLAIN_INTERVAL_S = 30.0
"""Seconds between two plain lines."""
_WORTH_A_LINE_S = 1.0
"""Seconds from which on a finished stage leaves a line on a terminal."""
_CLOCK_JITTER_S = 0.001


class StandardError(io.TextIOBase):
    """
    ``sys.stderr`` as it is at each write: above the bars where there are some.

    When nobody reads it any more (a closed pipe), what is written is lost, and the run goes on.
    """

    def write(self, text: str) -> int:
        """Write *text*, if anybody reads it."""
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, ValueError):
            sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  for the rest of the process
        return len(text)


def say(text: str) -> None:
    """Print a line for a person on standard error; when nobody looks any more, the run goes on."""
    StandardError().write(f"{text}\n")


def terminal_view(*, is_quiet: bool = False, stop: threading.Event | None = None) -> View:
    """
    Return what shows a run on standard error: bars on a terminal, plain lines elsewhere.

    Args:
        is_quiet: Show nothing but what goes wrong.
        stop: Set when the run was told to stop, after the terminal was told so past the view.
    """
    if is_quiet:
        return QuietView()
    terminal = Terminal(sys.stderr, interrupted=stop)
    return TerminalView(terminal, stop=stop) if terminal.can_draw else PlainView()


class QuietView:
    """Shows nothing but what goes wrong."""

    def update(self, snapshot: RunSnapshot) -> None:
        """Ignore it."""

    def say(self, text: str) -> None:
        """Print it."""
        say(text)

    def close(self) -> None:
        """Do nothing."""


class TerminalView:
    """
    The last lines of a terminal: a bar a rank while sequences are computed, a line of what is done otherwise.

    What is printed to ``sys.stderr`` meanwhile comes above them.

    Args:
        terminal: Where.
        stop: Set when the run was told to stop.
    """

    def __init__(self, terminal: Terminal, *, stop: threading.Event | None = None) -> None:
        self._terminal = terminal
        self._stop = stop
        self._ended = _EndedStages()
        self._ticks = 0

    def update(self, snapshot: RunSnapshot) -> None:
        """Draw the run as it is."""
        is_stopping = self._stop is not None and self._stop.is_set()
        above = [
            Text(_ended_words(stage, snapshot), style="dim")
            for stage in self._ended.new_of(snapshot)
            if stage.seconds >= _WORTH_A_LINE_S
        ]
        screen = Screen(
            columns=self._terminal.columns - 1, lines=self._terminal.lines, is_ascii=self._terminal.is_ascii
        )
        lines = lines_of(snapshot, screen, tick=self._ticks, is_stopping=is_stopping)
        self._ticks += 1
        self._terminal.draw(lines, above=above)

    def say(self, text: str) -> None:
        """Print lines above the bars."""
        self._terminal.draw(None, above=[Text(line) for line in text.split("\n")])

    def close(self) -> None:
        """Take the bars away."""
        self._terminal.close()


class PlainView:
    """Lines for a log: one when a stage begins, one every ``PLAIN_INTERVAL_S``, one at the end of a long stage."""

    def __init__(self) -> None:
        self._announced = 0
        self._ended = _EndedStages()
        self._last_line_s: float | None = None

    def update(self, snapshot: RunSnapshot) -> None:
        """Print what there is to say by now."""
        if self._last_line_s is None:
            self._last_line_s = snapshot.now
        time_of_day = time.strftime("%H:%M:%S", time.localtime(snapshot.now))
        lines = [
            _ended_words(stage, snapshot) for stage in self._ended.new_of(snapshot) if stage.seconds >= PLAIN_INTERVAL_S
        ]
        lines += [wording.stage_title(stage) for stage in snapshot.stages[self._announced :] if not stage.is_over]
        self._announced = len(snapshot.stages)
        if not lines and snapshot.now - self._last_line_s >= PLAIN_INTERVAL_S:
            lines = _plain_words(snapshot)
        for line in lines:
            self._last_line_s = snapshot.now
            say(f"{time_of_day}  {line}")

    def say(self, text: str) -> None:
        """Print it."""
        say(text)

    def close(self) -> None:
        """Do nothing: every line stands for itself."""


class _EndedStages:
    """Which stages have ended that nobody was told of."""

    def __init__(self) -> None:
        self._told: set[int] = set()

    def new_of(self, snapshot: RunSnapshot) -> list[StageSnapshot]:
        """Return those that have ended since the last call, without those that others were part of."""
        ended = {number for number, stage in enumerate(snapshot.stages) if stage.is_over} - self._told
        self._told |= ended
        return [snapshot.stages[number] for number in sorted(ended) if not _has_parts(snapshot.stages[number:])]


def _has_parts(stages: Sequence[StageSnapshot]) -> bool:
    """Whether the first of *stages* went on when a later one began; the clocks of begin and length differ a little."""
    outer, *later = stages
    return any(stage.started < outer.started + outer.seconds - _CLOCK_JITTER_S for stage in later)


def _ended_words(stage: StageSnapshot, snapshot: RunSnapshot) -> str:
    embedding = next((item for item in reversed(snapshot.embeddings) if item.model == stage.model), None)
    if stage.name != "embed" or embedding is None:
        return f"{wording.stage_title(stage)}: {wording.duration(stage.seconds)}"
    before = reversed(snapshot.stages[: snapshot.stages.index(stage)])
    around = next((outer for outer in before if _has_parts((outer, stage))), stage)
    title = wording.stage_title(replace(around, model=""))  # the model makes it too long for a terminal
    at = "" if embedding.tokens_left == 0 else f", ended at {wording.percent(embedding.progress)}"
    rows = f"{embedding.rows:,} of {embedding.records:,} rows on disk"
    return f"{title}: {rows} after {wording.duration(stage.seconds)}{at}"


def _plain_words(snapshot: RunSnapshot) -> list[str]:
    """Return the line of a moment in the middle of a stage."""
    stage, embedding = snapshot.stage, snapshot.embedding
    if stage is None:
        return []
    if embedding is None or embedding.is_over:
        return [f"{wording.stage_title(stage)}: {wording.duration(stage.seconds)} so far"]
    figures = [wording.percent(embedding.progress, decimals=1)]
    rate = wording.tokens_per_second(embedding)
    figures.append(f"{rate:,.0f} tokens/s" if rate else wording.states(embedding.ranks))
    if embedding.seconds_left is not None:
        figures.append(f"about {wording.about(embedding.seconds_left)} left")
    return [", ".join([*figures, *wording.notes(embedding)])]


class DownloadProgress:
    """
    Context manager around something that may fetch weights; shows a bar from the first byte on.

    Args:
        is_quiet: Show nothing.
    """

    def __init__(self, *, is_quiet: bool = False) -> None:
        self._is_quiet = is_quiet
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def advance(self, done_bytes: int, total_bytes: int | None) -> None:
        """Show that *done_bytes* of *total_bytes* are here."""
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
