"""The tenths of a piece of work that are worth a line in a log."""

import time

LEAST_S = 5.0
"""Seconds between two lines, at least, and before the first."""


class Tenths:
    """Says when the next line is due; the end of the work has a line of its own."""

    def __init__(self) -> None:
        self._said, self._said_s = 0, time.monotonic()

    def due(self, share: float) -> int:
        """Return the percent, a multiple of 10, that a line is due for at *share* of the work, 0 to 1; else 0."""
        tenths, now_s = int(10 * share + 1e-9), time.monotonic()
        if not self._said < tenths < 10 or now_s - self._said_s < LEAST_S:
            return 0
        self._said, self._said_s = tenths, now_s
        return 10 * tenths
