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

from virnucpro.errors import ConfigurationError, TimeLimitError

AGAIN_S = 60.0
"""Seconds after which the clock rings again, for code that took the first ring for an error of its own. Stopping
workers takes less."""


@contextmanager
def time_limit(minutes: float) -> Iterator[None]:
    """
    Interrupt the block after so many minutes.

    Args:
        minutes: Of the wall clock; 0 is no limit. Within another limit, that one continues after the block.

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
    handler = signal.signal(signal.SIGALRM, ring)
    left_s, again_s = signal.setitimer(signal.ITIMER_REAL, minutes * 60, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left_s:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, left_s - (time.monotonic() - began_s)), again_s)
