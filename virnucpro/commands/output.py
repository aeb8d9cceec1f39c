"""What a command prints on standard output: to a terminal, a file, or a pipe that somebody has closed by now."""

from __future__ import annotations

import io
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.measure import Measurement

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

_NO_TERMINAL_COLUMNS = 120
_MOST_COLUMNS = 1000


@contextmanager
def told_if_anybody_reads() -> Iterator[None]:
    """
    Let the block print to a standard output that may be gone: how the work went does not depend on who reads of it.

    A run of a night whose terminal was closed ends with its own exit code; its outcome stands in its folder.
    """
    try:
        yield
        sys.stdout.flush()
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
