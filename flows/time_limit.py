"""
A limit of time for a whole flow run that holds while it waits, computes or writes.

Prefect's own ``timeout_seconds`` is fixed where a flow is written, and its scopes do not nest. Here the clock of the
process rings and the main thread, whatever it does, gets an error; the flow then stops as after a signal, and ends its
workers on the way out.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from virnucpro.errors import ConfigurationError, ExitCode, StoppedError, VirNucProError

AGAIN_S = 60.0
"""Seconds after which the clock rings again, for code that took the first ring for an error of its own. Stopping
workers takes less."""


_LEAST_MINUTES = 1e-3
_DEADLINE_S: ContextVar[float | None] = ContextVar("_DEADLINE_S", default=None)


class TimeLimitError(StoppedError):
    """The run's own time limit has passed: it was stopped, and continues when it is run again."""

    exit_code = ExitCode.INTERNAL

    def __init__(self, minutes: float) -> None:
        self.minutes = minutes
        VirNucProError.__init__(self, f"the time limit of {minutes:g} minutes has passed: run it again to continue")


@contextmanager
def time_limit(minutes: float) -> Iterator[None]:
    """
    Interrupt the block after so many minutes.

    Args:
        minutes: Of the wall clock; 0 is no limit. Within another limit, that one goes on after the block.

    Raises:
        TimeLimitError: The time has passed.
        ConfigurationError: There is a limit, and this is not the main thread, which alone can be interrupted.
    """
    if not minutes:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        raise ConfigurationError("a time limit needs a flow that runs in the main thread of its process")

    def ring(_number: int, _frame: object) -> None:
        raise TimeLimitError(minutes)

    began_s = time.monotonic()
    token = _DEADLINE_S.set(began_s + minutes * 60)
    handler = signal.signal(signal.SIGALRM, ring)
    left_s, again_s = signal.setitimer(signal.ITIMER_REAL, minutes * 60, AGAIN_S)
    try:
        yield
    finally:
        _DEADLINE_S.reset(token)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left_s:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, left_s - (time.monotonic() - began_s)), again_s)


def minutes_left() -> float:
    """Return the minutes that the limit around us leaves, as a limit for what runs within it; 0 where there is none."""
    deadline_s = _DEADLINE_S.get()
    return 0.0 if deadline_s is None else max(_LEAST_MINUTES, (deadline_s - time.monotonic()) / 60)
