"""Standard output of a command, which may be a closed pipe or a full disk."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from virnucpro.errors import OutputError, printable
from virnucpro.telemetry.show.standard_error import wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

_GONE = (errno.EPIPE, errno.EIO)
"""Errors of a closed pipe or terminal."""
_NO_TERMINAL_COLUMNS = 120
_MOST_COLUMNS = 1000


class _StandardOutput(io.FileIO):
    """Standard output that reports a full disk as other files do."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in _GONE:
                raise
            raise OutputError("standard output", error.strerror or str(error)) from error


def guard_standard_output() -> None:
    """Make every print raise ``OutputError`` when the output cannot be written."""
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
def ignoring_closed_output() -> Iterator[None]:
    """
    Print in the block to an output that may be closed; the outcome of the work does not depend on it.

    A run whose terminal was closed keeps its own exit code.
    """
    try:
        yield
        sys.stdout.flush()
    except OutputError:
        raise
    except OSError:
        with Path(os.devnull).open("w") as nowhere:  # for the rest of the process, and for what is still in the buffer
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def print_line(text: str) -> None:
    """Print a sentence, which a terminal gets in lines that are broken between words."""
    print(wrapped(printable(text), sys.stdout))


def print_renderable(renderable: RenderableType, *, soft_wrap: bool = False) -> None:
    """Print a rich object without truncating a word; *soft_wrap* leaves wrapping to the terminal."""
    from rich.console import Console  # noqa: PLC0415  help is printed without rich
    from rich.measure import Measurement  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    is_terminal = sys.stdout.isatty()
    text = io.StringIO()  # rich ends the process at a closed pipe
    console = Console(
        file=text, force_terminal=is_terminal, width=None if is_terminal else _NO_TERMINAL_COLUMNS, highlight=False
    )
    for column in renderable.columns if isinstance(renderable, Table) else ():  # rich truncates words to fit
        cells = [str(cell) for cell in (column.header, *column.cells)]
        column.min_width = max(
            len(word) for cell in cells for word in ([cell] if column.no_wrap else cell.split() or [""])
        )
    unbounded = console.options.update(width=_MOST_COLUMNS)
    console.width = max(console.width, Measurement.get(console, unbounded, renderable).minimum)
    console.print(renderable, soft_wrap=soft_wrap)
    print(text.getvalue(), end="")
