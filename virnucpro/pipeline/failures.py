"""
The one enumeration of how work can fail, used by worker, parent, task retries and report alike.

``classify_error`` runs in the worker, where the exception is; ``classify_exit`` runs in the parent, where only the
exit code, the last report and the kernel's count of out-of-memory kills are. Errors of devices are told apart by
``hardware.device_errors``, which needs the framework.
"""

from __future__ import annotations

import errno
import resource
import signal
import threading
from enum import StrEnum
from pathlib import Path

from virnucpro.errors import ExitCode, StoppedError, error_number, is_of_memory


class FailureClass(StrEnum):
    """Why a worker ended without finishing, or why a sequence has no row."""

    DEVICE_OUT_OF_MEMORY = "device_out_of_memory"
    HOST_OUT_OF_MEMORY = "host_out_of_memory"
    OOM_KILL = "oom_kill"
    """The kernel killed the process because the machine, or our share of it, ran out of memory."""
    DEVICE_ERROR = "device_error"
    """The device reported an error that only a new process can recover from."""
    DIED = "died"
    HUNG = "hung"
    APPLICATION_ERROR = "application_error"
    NOT_FINITE = "not_finite"
    """Of a sequence: the model gave it a number that is not finite."""
    CONFIGURATION = "configuration"
    BAD_INPUT = "bad_input"
    CANNOT_WRITE = "cannot_write"
    STOPPED = "stopped"

    @property
    def is_worth_a_retry(self) -> bool:
        """Whether a new process, that resumes from what is on disk, may get further."""
        return self is not FailureClass.NOT_FINITE and self not in EXIT_CODES

    @property
    def may_be_the_batch(self) -> bool:
        """Whether the batch that the process was computing may have been the cause."""
        return self in {FailureClass.OOM_KILL, FailureClass.DEVICE_ERROR, FailureClass.DIED, FailureClass.HUNG}

    @property
    def concerns_all_ranks(self) -> bool:
        """Whether the other ranks would meet the same, so that giving them the work of this one is of no use."""
        return self in {FailureClass.BAD_INPUT, FailureClass.CANNOT_WRITE, FailureClass.STOPPED}


EXIT_CODES = {
    FailureClass.CONFIGURATION: ExitCode.CONFIGURATION,
    FailureClass.BAD_INPUT: ExitCode.BAD_INPUT,
    FailureClass.CANNOT_WRITE: ExitCode.CANNOT_WRITE,
    FailureClass.STOPPED: ExitCode.TERMINATED,
}
"""Exit code of a worker by class; every other class ends with ``ExitCode.INTERNAL``."""

_INTERPRETER_FAILED = 1
"""Exit code of Python where our code was not even reached: a broken installation."""


def exit_code_of(failure: FailureClass) -> ExitCode:
    return EXIT_CODES.get(failure, ExitCode.INTERNAL)


def classify_error(error: BaseException) -> FailureClass:
    """Return the class of an exception that is no device's, by its type and exit code."""
    if isinstance(error, StoppedError):
        return FailureClass.STOPPED
    if is_of_memory(error):
        return FailureClass.HOST_OUT_OF_MEMORY
    if isinstance(error, ImportError):
        return FailureClass.CONFIGURATION
    if error_number(error) in {errno.ENOSPC, errno.EDQUOT, errno.EROFS}:
        return FailureClass.CANNOT_WRITE
    by_code = {code: failure for failure, code in EXIT_CODES.items()}
    return by_code.get(getattr(error, "exit_code", ExitCode.INTERNAL), FailureClass.APPLICATION_ERROR)


def classify_exit(
    exit_code: int | None, reported: str | None, *, sent_a_message: bool = True, oom_killed: bool = False
) -> FailureClass:
    """
    Return the class of a worker's end as its parent saw it.

    Args:
        exit_code: As ``Process.exitcode``: negative for a signal.
        reported: The class that the worker itself reported, or None when it did not report.
        oom_killed: Whether the kernel counted a kill for lack of memory meanwhile.
    """
    if reported in set(FailureClass):
        return FailureClass(reported)
    if exit_code == -signal.SIGKILL and oom_killed:
        return FailureClass.OOM_KILL
    if exit_code == -signal.SIGABRT and resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return FailureClass.HOST_OUT_OF_MEMORY  # libraries abort where they can allocate nothing
    if exit_code == _INTERPRETER_FAILED and not sent_a_message:
        return FailureClass.CONFIGURATION
    by_code = {int(code): failure for failure, code in EXIT_CODES.items()}
    return by_code.get(exit_code or 0, FailureClass.DIED)


class OomKills:
    """
    The kernel's count of processes that it killed for lack of memory in our control group; safe from any thread.

    A killed process cannot report why, and its exit code is that of any SIGKILL. Each kill that is counted
    explains one process.

    Args:
        events_file: ``memory.events`` (cgroup v2) or ``memory.oom_control`` (v1), with a line ``oom_kill N``; by
            default that of our own group, and where there is none no death is explained so.
    """

    def __init__(self, events_file: Path | None = None) -> None:
        self._file = _own_events_file() if events_file is None else events_file
        self._lock = threading.Lock()
        self._explained = self._count()

    def explain_one(self) -> bool:
        """Whether there was a kill that has not explained a process yet; it has now."""
        with self._lock:
            if self._count() <= self._explained:
                return False
            self._explained += 1
            return True

    def _count(self) -> int:
        try:
            lines = [line.split() for line in self._file.read_text().splitlines()] if self._file is not None else []
        except OSError:
            lines = []
        return next((int(words[1]) for words in lines if words[:1] == ["oom_kill"] and len(words) > 1), 0)


def _own_events_file() -> Path | None:
    """Return where our control group counts its kills, for the versions 1 and 2 of control groups; None without."""
    try:
        memberships = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return None
    root = Path("/sys/fs/cgroup")
    for _, controllers, group in memberships:
        if "memory" in controllers.split(","):
            folders, name = [root / "memory" / group.lstrip("/"), root / "memory"], "memory.oom_control"
        elif not controllers:
            folders, name = [root / group.lstrip("/"), root], "memory.events"
        else:
            continue
        for folder in folders:  # inside a container the group is often mounted as the root
            if (folder / name).is_file():
                return folder / name
    return None
