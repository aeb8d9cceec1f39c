"""
The one enumeration of how work can fail, used by worker, parent, task retries and report alike.

``classify_error`` runs in the worker, where the exception is; ``classify_exit`` runs in the parent, where only the
exit code and the last report are. Neither looks at an error's text.
"""

from __future__ import annotations

import errno
from enum import StrEnum

from virnucpro.errors import ConfigurationError, ExitCode, OutputError, SequenceError, StoppedError, VirNucProError


class FailureClass(StrEnum):
    """Why a worker ended without finishing."""

    DEVICE_OUT_OF_MEMORY = "device_out_of_memory"
    HOST_OUT_OF_MEMORY = "host_out_of_memory"
    DIED = "died"
    HUNG = "hung"
    APPLICATION_ERROR = "application_error"
    CONFIGURATION = "configuration"
    BAD_INPUT = "bad_input"
    CANNOT_WRITE = "cannot_write"
    STOPPED = "stopped"

    @property
    def is_worth_a_retry(self) -> bool:
        """Whether a new process, that resumes from what is on disk, may get further."""
        return self in _RETRIED


_RETRIED = frozenset(
    {
        FailureClass.DEVICE_OUT_OF_MEMORY,
        FailureClass.HOST_OUT_OF_MEMORY,
        FailureClass.DIED,
        FailureClass.HUNG,
        FailureClass.APPLICATION_ERROR,
    }
)

EXIT_CODES = {
    FailureClass.CONFIGURATION: ExitCode.CONFIGURATION,
    FailureClass.BAD_INPUT: ExitCode.BAD_INPUT,
    FailureClass.CANNOT_WRITE: ExitCode.CANNOT_WRITE,
    FailureClass.STOPPED: ExitCode.TERMINATED,
}
"""Exit code of a worker by class; every other class ends with ``ExitCode.INTERNAL``."""


def exit_code_of(failure: FailureClass) -> ExitCode:
    """Return what a worker that failed so exits with."""
    return EXIT_CODES.get(failure, ExitCode.INTERNAL)


def classify_error(error: BaseException, *, device_memory_error: type[BaseException]) -> FailureClass:
    """
    Return the class of an exception, by its type.

    Args:
        error: What ended the work.
        device_memory_error: The framework's type for it, handed in so that this module stays free of the framework.
    """
    if isinstance(error, device_memory_error):
        return FailureClass.DEVICE_OUT_OF_MEMORY
    if isinstance(error, MemoryError):
        return FailureClass.HOST_OUT_OF_MEMORY
    if isinstance(error, StoppedError):
        return FailureClass.STOPPED
    if isinstance(error, ConfigurationError):
        return FailureClass.CONFIGURATION
    if isinstance(error, OutputError) or (
        isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
    ):
        return FailureClass.CANNOT_WRITE
    if isinstance(error, VirNucProError) and not isinstance(error, SequenceError):
        return FailureClass.BAD_INPUT if error.exit_code is ExitCode.BAD_INPUT else FailureClass.APPLICATION_ERROR
    return FailureClass.APPLICATION_ERROR


def classify_exit(exit_code: int | None, reported: str | None) -> FailureClass:
    """
    Return the class of a worker's end as its parent saw it.

    Args:
        exit_code: As ``Process.exitcode``: negative for a signal.
        reported: The class that the worker itself reported, or None when it said nothing.
    """
    if reported in set(FailureClass):
        return FailureClass(reported)
    by_code = {int(code): failure for failure, code in EXIT_CODES.items()}
    return by_code.get(exit_code or 0, FailureClass.DIED)
