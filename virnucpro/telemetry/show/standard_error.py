"""Standard error as it is at each write: a terminal or pipe that closes never harms what the program does."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path


class StandardError(io.TextIOBase):
    """``sys.stderr`` at the moment of each write, so that text appears above the bars; a closed pipe is ignored."""

    def write(self, text: str) -> int:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, ValueError):
            sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  for the rest of the process
        return len(text)
