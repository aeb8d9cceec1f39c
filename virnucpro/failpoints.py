"""
Fault injection for tests: at a named step a process is killed, gets an ``OSError``, or hangs.

Active only when ``VIRNUCPRO_FAILPOINT`` was set at import: ``PATTERN:N:ACTION[:FILE]``. PATTERN is a shell pattern for
``process/step`` (``*/file.write``, ``gpu_worker_1/*``); N is the matching step of this process that fails, ``N+`` all
from it on. ACTION is ``kill``, ``hang``, ``ENOSPC``, ``EIO``, ``EDQUOT``, or ``trace``, which appends matching steps to
FILE. With FILE a fault happens once over all processes: the first one makes that file.
"""

from __future__ import annotations

import errno
import fnmatch
import multiprocessing
import os
import signal
import threading
import time

VARIABLE = "VIRNUCPRO_FAILPOINT"
ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EDQUOT": errno.EDQUOT}
"""Actions that raise ``OSError`` -> error number."""
_OTHER_ACTIONS = ("kill", "hang", "trace")


class _Fault:
    """A parsed specification, and the number of matching steps so far."""

    def __init__(self, text: str) -> None:
        pattern, number, action, *file = text.split(":", 3)
        if action not in ERRORS and action not in _OTHER_ACTIONS:
            raise ValueError(f"{VARIABLE} is {text!r}: {action!r} is not an action")
        self.pattern = pattern
        self.number = int(number.removesuffix("+"))
        self.is_lasting = number.endswith("+")
        self.action = action
        self.file = file[0] if file else None
        self._taken = 0
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def reach(self, name: str) -> None:
        step = f"{multiprocessing.current_process().name}/{name}"
        if not fnmatch.fnmatchcase(step, self.pattern):
            return
        if self._pid != os.getpid():  # forked
            self._pid, self._taken, self._lock = os.getpid(), 0, threading.Lock()
        with self._lock:
            self._taken += 1
            taken = self._taken
        if self.action == "trace":
            self._note(step, os.O_APPEND)
        elif (taken == self.number and self._is_first(step)) or (self.is_lasting and taken > self.number):
            self._act()

    def _is_first(self, step: str) -> bool:
        if self.file is None or self.is_lasting:
            return True
        try:
            self._note(step, os.O_EXCL)
        except FileExistsError:
            return False
        return True

    def _note(self, step: str, flag: int) -> None:
        assert self.file is not None, "this action needs a file"
        descriptor = os.open(self.file, os.O_WRONLY | os.O_CREAT | flag, 0o600)
        try:
            os.write(descriptor, f"{step}\n".encode())
        finally:
            os.close(descriptor)

    def _act(self) -> None:
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.action in ERRORS:
            raise OSError(ERRORS[self.action], os.strerror(ERRORS[self.action]))
        while True:  # hang
            time.sleep(3600)


def arm(text: str | None) -> None:
    """
    Replace the specification; for tests that fork the program from their own process.

    Raises:
        ValueError: *text* is not a specification.
    """
    global _fault  # noqa: PLW0603  one for each process
    _fault = _Fault(text) if text else None


def reach(name: str) -> None:
    """
    Announce the step *name*.

    Raises:
        OSError: A test requested it.
    """
    if _fault is not None:
        _fault.reach(name)


_fault: _Fault | None = None
arm(os.environ.get(VARIABLE))
