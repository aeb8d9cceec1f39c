"""SIGINT and SIGTERM of the command line, turned into a request that the run understands."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from virnucpro.errors import StoppedError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator


class Interrupts:
    """What the signal handlers and the run share."""

    def __init__(self, event: threading.Event, has_workers: Callable[[], bool]) -> None:
        self.event = event
        """Set when the run is to stop at the next batch boundary, and the terminal was told so."""
        self.signal_number: int | None = None
        """The first signal."""
        self._has_workers = has_workers

    def handle(self, number: int, _frame: object) -> None:
        """
        Take a signal.

        Raises:
            StoppedError: It is the first, and there are no workers to wait for.
            SystemExit: It is not the first.
        """
        if self.signal_number is not None:
            with suppress(OSError):
                os.write(2, b"\nstopped at once: start the same command again to continue\n")
            raise SystemExit(int(StoppedError(number).exit_code))
        self.signal_number = number
        has_workers = self._has_workers()
        if has_workers:
            with suppress(OSError):  # nobody may be looking
                os.write(2, b"\nstopping as soon as what is finished is safe; once more to stop at once\n")
        self.event.set()
        if not has_workers:
            raise StoppedError(number)


@contextmanager
def stop_on_signals(event: threading.Event, has_workers: Callable[[], bool]) -> Iterator[Interrupts]:
    """
    Let the first SIGINT or SIGTERM ask the workers to stop at a batch boundary, the second one end the run at once.

    While there are no workers (the input is read, say, or the result put together) the first one does. Main thread
    only.

    Args:
        event: Set by the first one, for whoever shows the run as well.
        has_workers: Whether workers compute now.
    """
    interrupts = Interrupts(event, has_workers)
    before = {number: signal.signal(number, interrupts.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
