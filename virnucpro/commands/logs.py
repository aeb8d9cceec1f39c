"""``virnucpro logs``: a run's worker logs, merged by time."""

from __future__ import annotations

import io
import os
import shlex
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.style import Style

from virnucpro.choices import LogLevel
from virnucpro.commands.options import RunDir
from virnucpro.errors import ExitCode, ResultError, printable
from virnucpro.run_layout import PredictionLayout, RunLayout
from virnucpro.store.locks.holder import holder_of
from virnucpro.telemetry.log_lines import LEVELS, entry_line, frame_lines
from virnucpro.telemetry.log_reader import RunLogs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from virnucpro.telemetry.log_reader import FoundEntry

POLL_S = 0.5
"""Seconds between two reads of an active run's files."""
_STYLES = {
    "DEBUG": Style(dim=True),
    "WARNING": Style(color="yellow"),
    "ERROR": Style(color="red", bold=True),
    "CRITICAL": Style(color="red", bold=True),
}


def logs(
    output: RunDir,
    rank: Annotated[int | None, typer.Option(min=0, help="Only this worker.", show_default="all")] = None,
    level: Annotated[
        LogLevel, typer.Option(case_sensitive=False, help="Only lines that are at least as severe.")
    ] = LogLevel.DEBUG,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue with new lines until the run ends, or Ctrl-C.")
    ] = False,
    tail: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Only the last N lines.", show_default="all")
    ] = None,
) -> None:
    """Show the workers' log lines of a run by time (UTC)."""
    least = LEVELS.index(level)
    lock = RunLayout(output).lock
    _check_folder(output)
    screen = _Screen()
    try:
        with RunLogs(output, lambda entry: LEVELS.index(entry.level) >= least, rank=rank) as files:
            is_over = not (follow and _is_active(lock))
            _check_rank(rank, files.ranks(), is_over=is_over, output=output)
            screen.show(files.read_new(is_over=is_over) if tail is None else files.last(tail, is_over=is_over))
            while not is_over:
                time.sleep(POLL_S)
                is_over = not _is_active(lock)  # before reading, so that the last lines are not missed
                screen.show(files.read_new(is_over=is_over))
        if follow:
            ask = shlex.join(["virnucpro", "status", str(output)])
            print(f"no run is active in {printable(str(output))}; for its state: {printable(ask)}", file=sys.stderr)
    except KeyboardInterrupt:
        raise typer.Exit(int(ExitCode.INTERRUPTED)) from None
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _check_folder(output: Path) -> None:
    """Check that a folder can have logs, and that they are readable."""
    own, parts = RunLayout(output), PredictionLayout(output)
    try:
        if not any(path.exists() for path in (own.manifest, own.lock, own.log_dir)):
            raise ResultError(output, "holds no run: give the output folder of a run")
        for layout in (own, RunLayout(parts.dna_dir), RunLayout(parts.protein_dir)):
            with suppress(FileNotFoundError), os.scandir(layout.log_dir):
                pass
    except OSError as error:
        raise ResultError(error.filename, error.strerror or str(error)) from error


def _is_active(lock: Path) -> bool:
    """Whether a run may be active in the folder."""
    holder = holder_of(lock)
    return holder is not None and holder.is_alive is not False


def _check_rank(rank: int | None, ranks: list[int], *, is_over: bool, output: Path) -> None:
    """
    Report missing logs.

    Raises:
        typer.BadParameter: There are logs, but none of *rank*.
    """
    if not ranks:
        waiting = "no worker has logged anything yet" if _is_active(RunLayout(output).lock) else "no worker has logged"
        print(f"{printable(str(output))}: {waiting}", file=sys.stderr)
    elif rank is not None and rank not in ranks and is_over:
        present = ", ".join(map(str, ranks))
        raise typer.BadParameter(f"rank {rank} has no log here: there are {present}.", param_hint="--rank")


class _Screen:
    """Standard output, coloured on a terminal."""

    def __init__(self) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):  # the encoding may lack characters
            sys.stdout.reconfigure(errors="backslashreplace")
        console = Console()
        self._is_coloured = console.color_system is not None and not console.no_color

    def show(self, found: Iterable[FoundEntry]) -> None:
        for item in found:
            style = _STYLES.get(item.entry.level) if self._is_coloured else None
            for line in (
                entry_line(item.entry, rank=item.rank, stage=item.stage),
                *(f"    {frame}" for frame in frame_lines(item.entry.exception)),
            ):
                sys.stdout.write(f"{line if style is None else style.render(line)}\n")
        sys.stdout.flush()
