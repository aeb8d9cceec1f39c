"""
The last lines of a terminal, redrawn in place, with everything else printed above them.

The cursor stays visible below the lines, so that a killed run leaves the terminal usable. Writing to a terminal that
has gone is a no-op.
"""

from __future__ import annotations

import io
import sys
import threading
from math import ceil
from typing import TYPE_CHECKING, TextIO, cast

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

_LINE_UP = "\x1b[1A"
_ERASE_BELOW = "\r\x1b[J"


class Terminal:
    """
    Draws lines on a stream; safe for several threads.

    Args:
        stream: May be a terminal.
        interrupted: Set after another writer, such as a signal handler, wrote below the lines; drawing continues below.
    """

    def __init__(self, stream: TextIO, *, interrupted: threading.Event | None = None) -> None:
        self._stream = stream
        self._interrupted = interrupted
        self._console = Console(file=io.StringIO(), force_terminal=_is_terminal(stream), highlight=False)
        """Gives size and colours only: rich ends the process when it writes to a closed pipe."""
        self._lock = threading.RLock()
        self._drawn: list[Text] = []
        self._begun = ""
        """An unfinished line to print above."""
        self._is_gone = False
        self._redirected: TextIO | None = None

    @property
    def can_draw(self) -> bool:
        return self._console.is_terminal and not self._console.is_dumb_terminal

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
        """
        Replace the last lines.

        Args:
            lines: No wider than the terminal; None keeps the present ones.
            above: Printed above them, to stay.
        """
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
        """Return the escape codes that erase the drawn lines."""
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


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:  # it is closed
        return False


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
