"""
The command line in this process: the same ``main``, boundary and exit codes, without starting a program each time.

Only the last word is exchanged: where ``main`` would leave through ``os._exit``, it raises ``SystemExit`` here.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from typing import NamedTuple

import structlog

import virnucpro.cli


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def problems(self) -> list[str]:
        """Lines of standard error but those that say what goes on: a slow machine has time for some."""
        return [line for line in self.err.splitlines() if not re.match(r"\d\d:\d\d:\d\d  ", line)]


def run(*arguments: object) -> Ended:
    """Run ``virnucpro ARGUMENTS`` to its end."""

    def leave(code):
        raise SystemExit(int(code))

    out, err = io.StringIO(), io.StringIO()
    before = sys.argv, virnucpro.cli._leave
    sys.argv = ["virnucpro", *map(str, arguments)]
    virnucpro.cli._leave = leave
    code = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            virnucpro.cli.main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.argv, virnucpro.cli._leave = before
        structlog.reset_defaults()  # its stream is closed with this command
    return Ended(code, out.getvalue(), err.getvalue())
