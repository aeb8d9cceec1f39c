"""
What a person sees while a run goes on: one rich bar a device on a terminal, plain lines otherwise.

Progress is by tokens, not by sequences: the long ones come first. Fed with the workers' messages, from any thread.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

PLAIN_INTERVAL_S = 10.0
"""Seconds between two plain lines."""


@dataclass
class _Rank:
    label: str
    total_tokens: int = 0
    tokens: int = 0
    sequences: int = 0
    loaded_s: float | None = None

    def rate(self) -> float:
        """Tokens a second since the model was loaded."""
        elapsed = time.monotonic() - self.loaded_s if self.loaded_s is not None else 0.0
        return self.tokens / elapsed if elapsed > 0 else 0.0


def say(text: str) -> None:
    """Print a line for a person on standard error; when nobody looks any more (a closed pipe), the run goes on."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  for the rest of the process


class RunProgress:
    """
    Context manager around a run.

    Args:
        device_labels: One a rank.
        is_quiet: Show nothing.
    """

    def __init__(self, device_labels: Sequence[str], *, is_quiet: bool = False) -> None:
        self._ranks = [_Rank(f"rank {rank} ({label})") for rank, label in enumerate(device_labels)]
        self._lock = threading.Lock()
        self._last_line_s = time.monotonic()
        self._is_quiet = is_quiet
        self._bars: Progress | None = None
        self._tasks: list[TaskID] = []

    def __enter__(self) -> Self:
        if not self._is_quiet and sys.stderr.isatty():
            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[state]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._tasks = [self._bars.add_task(rank.label, total=None, state="starting") for rank in self._ranks]
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def on_message(self, rank: int, message: dict[str, Any]) -> None:
        """Take in what a worker said."""
        with self._lock:
            self._take(self._ranks[rank], message)
            try:
                if self._bars is not None:
                    self._update_bar(rank, message)
                elif not self._is_quiet and time.monotonic() - self._last_line_s > PLAIN_INTERVAL_S:
                    self._print_line()
            except OSError:  # nobody looks any more (a closed pipe): the run goes on
                self._is_quiet, self._bars = True, None

    def _take(self, rank: _Rank, message: dict[str, Any]) -> None:
        kind = message.get("kind")
        if kind == "resumed":
            rank.total_tokens, rank.tokens, rank.sequences = int(message["tokens_to_do"]), 0, 0
        elif kind == "model_loaded":
            rank.loaded_s = time.monotonic()
        elif kind == "progress":
            rank.tokens, rank.sequences = int(message["tokens"]), int(message["sequences"])

    def _update_bar(self, number: int, message: dict[str, Any]) -> None:
        assert self._bars is not None
        rank = self._ranks[number]
        state = f"{rank.sequences:,} sequences, {rank.rate():,.0f} tokens/s"
        if message.get("kind") == "resumed":
            state = "loading the model"
        elif "status" in message:
            state = str(message["status"])
        elif message.get("kind") != "progress":
            return
        is_done = message.get("status") == "complete"
        total = max(rank.total_tokens, 1)
        self._bars.update(self._tasks[number], total=total, completed=total if is_done else rank.tokens, state=state)

    def _print_line(self) -> None:
        self._last_line_s = time.monotonic()
        tokens, total = (sum(getattr(rank, name) for rank in self._ranks) for name in ("tokens", "total_tokens"))
        sequences = sum(rank.sequences for rank in self._ranks)
        rate = sum(rank.rate() for rank in self._ranks)
        left = f", about {max(0.0, (total - tokens) / rate):,.0f} s left" if rate else ""
        share = min(100 * tokens / total, 100.0) if total else 0.0  # BPE tokens were estimated
        say(f"{share:5.1f} % of tokens, {sequences:,} sequences, {rate:,.0f} tokens/s{left}")


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
