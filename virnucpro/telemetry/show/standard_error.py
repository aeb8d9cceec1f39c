"""Standard error as it is at each write: a terminal or pipe that closes never harms what the program does."""

from __future__ import annotations

import io
import os
import sys
import textwrap
from pathlib import Path
from typing import TextIO


class StandardError(io.TextIOBase):
    """``sys.stderr`` at the moment of each write, so that text appears above the bars; a closed pipe is ignored."""

    def write(self, text: str) -> int:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, ValueError):
            sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  for the rest of the process
        return len(text)


def wrapped(text: str, stream: TextIO) -> str:
    """Return *text*; on a terminal its lines are broken between words, and go on further in."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (OSError, ValueError):  # it is closed, or in memory
        columns = 0
    if not columns:
        return text
    lines = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        wrapper = textwrap.TextWrapper(
            columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        lines += wrapper.wrap(line) or [""]
    return "\n".join(lines)
