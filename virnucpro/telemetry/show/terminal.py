"""
The last lines of a terminal, redrawn in place with everything else printed above them, and what they show of a run.

The cursor stays visible below the lines, so that a killed run leaves the terminal usable. Writing to a terminal that
has gone is a no-op. There is one bar for each rank, one for all, and notes. Every line fits: a narrow terminal gets
shorter labels and fewer figures; a low one shows the ranks in trouble and the slowest, and counts the remaining ones.
"""

from __future__ import annotations

import io
import math
import sys
import threading
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, TextIO, cast

from rich.console import Console
from rich.text import Text

from virnucpro.telemetry.show import wording
from virnucpro.telemetry.snapshot import RankState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virnucpro.telemetry.snapshot import RankSnapshot, RunSnapshot, WorkSnapshot

_LINE_UP = "\x1b[1A"
_ERASE_BELOW = "\r\x1b[J"
_LEAST_BAR, _MOST_BAR = 6, 40
_LEAST_RANKS = 2
_LONGEST_NAME = 24
_GAP = "  "
_SHORT = {"sequences": "seqs", "tokens": "tok"}
_STYLES = {
    RankState.WAITING: "dim",
    RankState.STARTING: "dim",
    RankState.LOADING: "cyan",
    RankState.COMPUTING: "",
    RankState.FINISHING: "cyan",
    RankState.COMPLETE: "green",
    RankState.FAILED: "bold red",
    RankState.LOST: "bold red",
    RankState.STOPPED: "yellow",
}


class Terminal:
    """
    Draws lines on a terminal; safe for several threads.

    *interrupted*: set after another writer, such as a signal handler, wrote below the lines; drawing continues below.
    """

    def __init__(self, stream: TextIO, *, interrupted: threading.Event | None = None) -> None:
        self._stream = stream
        self._interrupted = interrupted
        self._console = Console(file=io.StringIO(), force_terminal=True, highlight=False)
        """Gives size and colours only: rich ends the process when it writes to a closed pipe."""
        self._lock = threading.RLock()
        self._drawn: list[Text] = []
        self._begun = ""
        """An unfinished line to print above."""
        self._is_gone = False
        self._redirected: TextIO | None = None

    @property
    def columns(self) -> int:
        return self._console.width

    @property
    def lines(self) -> int:
        return self._console.height

    @property
    def is_ascii(self) -> bool:
        return not (self._stream.encoding or "utf-8").lower().startswith("utf")

    def draw(self, lines: Sequence[Text] | None, *, above: Sequence[Text] = ()) -> None:
        """Replace the last lines, no wider than the terminal (None keeps them); *above* is printed above, to stay."""
        with self._lock:
            if self._redirected is None:
                self._redirected, sys.stderr = sys.stderr, cast("TextIO", _StandardError(self, self._stream))
            erase = self._erase()
            self._drawn = self._drawn if lines is None else list(lines)
            self._write(erase + "".join(f"{self._rendered(line)}\n" for line in (*above, *self._drawn)))

    def print_above(self, text: str) -> None:
        """Print the complete lines of *text*; an unfinished one waits for its end."""
        with self._lock:
            *lines, self._begun = (self._begun + text).split("\n")
            if lines:
                self.draw(None, above=[Text.from_ansi(line) for line in lines])

    def close(self) -> None:
        with self._lock:
            if self._redirected is not None:
                self._write(self._erase() + self._begun)
                sys.stderr, self._redirected = self._redirected, None
                self._drawn, self._begun = [], ""

    def _erase(self) -> str:
        if self._interrupted is not None and self._interrupted.is_set():
            self._interrupted, self._drawn = None, []
        columns = self.columns  # a narrower terminal than before has wrapped them
        height = sum(max(1, ceil(line.cell_len / columns)) for line in self._drawn)
        return _LINE_UP * height + _ERASE_BELOW if height else ""

    def _rendered(self, line: Text) -> str:
        with self._console.capture() as captured:
            self._console.print(line, end="", soft_wrap=True)
        return captured.get()

    def _write(self, text: str) -> None:
        if self._is_gone:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._is_gone = True


class _StandardError(io.TextIOBase):
    """Replaces ``sys.stderr`` while lines are drawn."""

    def __init__(self, terminal: Terminal, stream: TextIO) -> None:
        self._terminal = terminal
        self._stream = stream

    def write(self, text: str) -> int:
        self._terminal.print_above(text)
        return len(text)

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self._stream.errors


@dataclass(frozen=True, kw_only=True)
class _Row:
    name: str
    share: float
    sequences: int
    rate: float
    seconds_left: float | None
    state: str | None
    """Shown instead of rate and time left."""
    style: str


def lines_of(snapshot: RunSnapshot, terminal: Terminal, *, tick: int, is_stopping: bool = False) -> list[Text]:
    """Return the lines of a run, none between stages; *tick*, the number of this call, turns the spinner."""
    stage, embedding = snapshot.stage, snapshot.embedding
    if stage is None:
        return []
    spinner = r"-\|/" if terminal.is_ascii else "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
    title = f"{spinner[tick % len(spinner)]} {wording.doing(snapshot)}, {wording.about(stage.seconds)}"
    head = Text(f"{title}; stopping" if is_stopping else title, style="bold")
    lines = [head]
    if embedding is not None and embedding.ranks and not embedding.is_over:
        lines += _of_embedding(embedding, terminal, now=snapshot.now)
    for line in lines:
        line.truncate(terminal.columns - 1, overflow="crop" if terminal.is_ascii else "ellipsis")
    return lines


def _of_embedding(embedding: WorkSnapshot, terminal: Terminal, *, now: float) -> list[Text]:
    ranks = list(embedding.ranks)
    room = max(terminal.lines - 5, _LEAST_RANKS)  # head, all ranks, remaining ranks, notes, and the line of the cursor
    shown = ranks if len(ranks) <= room else _of_interest(ranks, room, now=now)
    rows = [_of_rank(rank, embedding, now=now) for rank in shown]
    if len(ranks) > 1:
        rows.append(_of_all(embedding))
    lines = _in_columns(rows, terminal, embedding)
    if others := [rank for rank in ranks if rank not in shown]:
        lines.insert(len(shown), Text(f"and {len(others)} others: {wording.states(others)}", style="dim"))
    if notes := wording.notes(embedding):
        lines.append(Text(", ".join(notes), style="dim"))
    return lines


def _of_interest(ranks: Sequence[RankSnapshot], number: int, *, now: float) -> list[RankSnapshot]:
    """Return *number* ranks in rank order: those in trouble first, then the slowest."""

    def urgency(rank: RankSnapshot) -> tuple[bool, bool, float]:
        is_in_trouble = rank.state in {RankState.FAILED, RankState.LOST} or wording.silence(rank, now=now) is not None
        is_open = rank.state not in {RankState.COMPLETE, RankState.STOPPED}
        return is_in_trouble, is_open, -math.inf if rank.seconds_left is None else rank.seconds_left

    return sorted(sorted(ranks, key=urgency, reverse=True)[:number], key=lambda rank: rank.rank)


def _of_rank(rank: RankSnapshot, embedding: WorkSnapshot, *, now: float) -> _Row:
    name = wording.rank_name(rank)
    return _Row(
        name=name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 2] + "..",
        share=wording.rank_share(rank),
        sequences=wording.computed(rank, embedding),
        rate=rank.tokens_per_second,
        seconds_left=rank.seconds_left,
        state=wording.rank_state(rank, now=now),
        style=_STYLES[rank.state] if wording.silence(rank, now=now) is None else "yellow",
    )


def _of_all(embedding: WorkSnapshot) -> _Row:
    rate = wording.tokens_per_second(embedding)
    return _Row(
        name=f"all {len(embedding.ranks)} ranks",
        share=embedding.progress,
        sequences=sum(wording.computed(rank, embedding) for rank in embedding.ranks),
        rate=rate,
        seconds_left=embedding.seconds_left,
        state=None if rate > 0 else "",
        style="bold",
    )


def _in_columns(rows: Sequence[_Row], terminal: Terminal, embedding: WorkSnapshot) -> list[Text]:
    """Return one line for each row, with as many figures as leave space for a bar."""
    names = max(len(row.name) for row in rows)
    for brevity in range(4):
        figures = _figures(rows, embedding, brevity)
        bar = terminal.columns - 1 - names - len("100 %") - max(map(len, figures)) - 3 * len(_GAP)
        if bar >= _LEAST_BAR:
            break
    bar = min(bar, _MOST_BAR)
    done_sign, open_sign = ("#", ".") if terminal.is_ascii else ("█", "░")
    lines = []
    for row, text in zip(rows, figures, strict=True):
        line = Text(no_wrap=True)
        line.append(row.name.ljust(names) + _GAP, style=row.style)
        if bar >= _LEAST_BAR:
            filled = int(bar * min(max(row.share, 0.0), 1.0))
            line.append(done_sign * filled, style="green" if row.share >= 1 else "cyan")
            line.append(open_sign * (bar - filled) + _GAP, style="dim")
        line.append(f"{wording.percent(row.share):>5}{_GAP}", style=row.style)
        line.append(text, style=row.style)
        lines.append(line)
    return lines


def _figures(rows: Sequence[_Row], embedding: WorkSnapshot, brevity: int) -> list[str]:
    """
    Return sequences, rate and time left of each row, aligned in columns.

    *brevity* 0 shows all, 1 shortens the units, 2 drops the sequences, 3 the rate too.
    """
    counts, measure = embedding.counts, embedding.measure
    if brevity:
        counts, measure = _SHORT.get(counts, counts), _SHORT.get(measure, measure)
    sequences, tokens, left = f" {counts}", f" {measure}/s", "" if brevity else " left"
    table = [
        (
            f"{row.sequences:,}{sequences}" if brevity < 2 else "",
            f"{row.rate:,.0f}{tokens}" if brevity < 3 and row.state is None else "",
            f"{wording.clock(row.seconds_left)}{left}" if row.seconds_left is not None and row.state is None else "",
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row, cells in zip(rows, table, strict=True):
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True) if width]
        if row.state is not None:
            padded = [*(padded[:1] if widths[0] and row.sequences else []), row.state]
        lines.append(_GAP.join(padded).rstrip())
    return lines
