"""SIGINT, SIGTERM and the time limit of a command, turned into a stop request for the run."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from virnucpro.errors import ExitCode, StoppedError, VirNucProError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator


class TimeLimitError(StoppedError):
    """The run's own time limit has passed: it was stopped, and continues when it is run again."""

    exit_code = ExitCode.INTERNAL

    def __init__(self, minutes: float) -> None:
        self.minutes, self.signal_number = minutes, None
        VirNucProError.__init__(self, f"the time limit of {minutes:g} minutes has passed: run it again to continue")


class Interrupts:
    """Shared by the signal handlers and the run."""

    def __init__(self, event: threading.Event, has_workers: Callable[[], bool], time_limit_minutes: float = 0) -> None:
        self.event = event
        """Set once the terminal shows that the run stops at the next batch boundary."""
        self.signal_number: int | None = None
        self._has_workers = has_workers
        self._time_limit_minutes = time_limit_minutes

    def error(self) -> StoppedError:
        if self.signal_number == signal.SIGALRM:
            return TimeLimitError(self._time_limit_minutes)
        return StoppedError(self.signal_number)

    def handle(self, number: int, _frame: object) -> None:
        """
        Handle a signal.

        Raises:
            StoppedError: The first signal, without workers.
            SystemExit: A later signal.
        """
        if number == signal.SIGALRM and self.signal_number is not None:
            return  # it is stopping already
        if self.signal_number not in {None, signal.SIGALRM}:
            with suppress(OSError):
                os.write(2, b"\nstopped at once: start the same command again to continue\n")
            raise SystemExit(int(StoppedError(number).exit_code))
        self.signal_number = number
        has_workers = self._has_workers()
        if has_workers:
            with suppress(OSError):  # standard error may be closed
                os.write(2, b"\nstopping as soon as what is finished is safe; once more to stop at once\n")
        self.event.set()
        if not has_workers:
            raise self.error()


@contextmanager
def stop_on_signals(
    event: threading.Event, has_workers: Callable[[], bool], *, time_limit_minutes: float = 0
) -> Iterator[Interrupts]:
    """
    Stop workers at a batch boundary on the first SIGINT or SIGTERM, and end at once on the second.

    Without workers (while the input is read or the result merged) the first signal ends the run. Main thread only.

    Args:
        event: Set on the first signal, after the message.
        has_workers: Whether workers compute now.
        time_limit_minutes: Of the wall clock, after which the run stops as after a signal; 0 is no limit.
    """
    interrupts = Interrupts(event, has_workers, time_limit_minutes)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    before = {number: signal.signal(number, interrupts.handle) for number in numbers}
    signal.setitimer(signal.ITIMER_REAL, time_limit_minutes * 60)
    try:
        yield interrupts
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
