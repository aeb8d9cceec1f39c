"""What a command prints on standard output: to a terminal, a file, or a pipe that somebody has closed by now."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.measure import Measurement

from virnucpro.errors import OutputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

_GONE = (errno.EPIPE, errno.EIO)
"""What the system says of a pipe or a terminal that somebody has closed."""
_NO_TERMINAL_COLUMNS = 120
_MOST_COLUMNS = 1000


class _StandardOutput(io.FileIO):
    """Standard output that tells a full disk, and the like, as any other file of a command."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in _GONE:
                raise
            raise OutputError("standard output", error.strerror or str(error)) from error


def guard_standard_output() -> None:
    """Let every print raise ``OutputError`` where what is printed cannot be kept."""
    if sys.stdout is None:  # closed by the caller
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  for the rest of the process
        return
    try:
        raw = _StandardOutput(sys.stdout.fileno(), "w", closefd=False)
    except (OSError, ValueError):  # in memory
        return
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=sys.stdout.encoding,
        errors=sys.stdout.errors,
        line_buffering=getattr(sys.stdout, "line_buffering", False),
    )


@contextmanager
def told_if_anybody_reads() -> Iterator[None]:
    """
    Let the block print to a standard output that may be gone: how the work went does not depend on who reads of it.

    A run of a night whose terminal was closed ends with its own exit code; its outcome stands in its folder.

    Raises:
        OutputError: There is an output, and it cannot be written.
    """
    try:
        yield
        sys.stdout.flush()
    except OutputError:
        raise
    except OSError:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  for the rest of the process


def print_renderable(renderable: RenderableType, *, soft_wrap: bool = False) -> None:
    """
    Print something of rich's, as a terminal shows it; no number is cut for want of columns.

    Args:
        renderable: It.
        soft_wrap: Leave it to the terminal to wrap long lines.
    """
    is_terminal = sys.stdout.isatty()
    text = io.StringIO()  # rich itself ends the process at a closed pipe
    console = Console(
        file=text, force_terminal=is_terminal, width=None if is_terminal else _NO_TERMINAL_COLUMNS, highlight=False
    )
    unbounded = console.options.update(width=_MOST_COLUMNS)
    console.width = max(console.width, Measurement.get(console, unbounded, renderable).minimum)
    console.print(renderable, soft_wrap=soft_wrap)
    print(text.getvalue(), end="")
