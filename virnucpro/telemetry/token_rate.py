"""
How fast a rank computes now, and how long the run will take.

Rates are over the last minute, since long sequences come first and cost more a token.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virnucpro.telemetry.snapshot import RankSnapshot

RATE_WINDOW_S = 60.0
"""Seconds of computing that a rate is taken over."""


class TokenRate:
    """Planned tokens a second over the last minute of computing."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()

    def mark(self, now_s: float, tokens: int) -> None:
        """Note that *tokens* are done since the first mark."""
        self._marks.append((now_s, tokens))
        while len(self._marks) > 2 and now_s - self._marks[1][0] >= RATE_WINDOW_S:
            self._marks.popleft()

    def restart(self, now_s: float) -> None:
        """Begin anew: a model has been loaded."""
        self._marks = deque([(now_s, 0)])

    def per_second(self, now_s: float) -> float:
        """Return the rate; it falls when nothing has been done for longer than the window."""
        if len(self._marks) < 2:
            return 0.0
        (first_s, before), (last_s, done) = self._marks[0], self._marks[-1]
        end_s = last_s if now_s - last_s < RATE_WINDOW_S else now_s
        return (done - before) / (end_s - first_s) if end_s > first_s else 0.0


def seconds_left(ranks: Sequence[RankSnapshot], *, is_over: bool) -> float | None:
    """Return the estimate of the slowest rank; one that has no rate yet is taken to be as fast as the others."""
    if not any(rank.tokens_left for rank in ranks):
        return 0.0
    if is_over:
        return None
    rates = [rank.tokens_per_second for rank in ranks if rank.tokens_per_second]
    if not rates:
        return None
    usual = sum(rates) / len(rates)
    return max(rank.tokens_left / (rank.tokens_per_second or usual) for rank in ranks)
