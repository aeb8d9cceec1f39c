"""One enumeration of failures: by type in the worker, by exit code and report in the parent."""

from __future__ import annotations

import errno

import pytest

from virnucpro.errors import (
    BadInputError,
    ConfigurationError,
    ExitCode,
    InputChangedError,
    InputProblem,
    OutputError,
    ResultError,
    SequenceError,
    StoppedError,
    TokenBudgetError,
    WeightsError,
)
from virnucpro.pipeline.failures import EXIT_CODES, FailureClass, classify_error, classify_exit, exit_code_of


class DeviceMemoryError(RuntimeError):
    """Stands for the framework's type."""


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (DeviceMemoryError("x"), FailureClass.DEVICE_OUT_OF_MEMORY),
        (RuntimeError("CUDA out of memory"), FailureClass.APPLICATION_ERROR),
        (MemoryError(), FailureClass.HOST_OUT_OF_MEMORY),
        (StoppedError(15), FailureClass.STOPPED),
        (ConfigurationError("x"), FailureClass.CONFIGURATION),
        (TokenBudgetError(9, 8), FailureClass.CONFIGURATION),
        (WeightsError("m", "x"), FailureClass.CONFIGURATION),
        (OutputError("f", "x"), FailureClass.CANNOT_WRITE),
        (OSError(errno.ENOSPC, "x"), FailureClass.CANNOT_WRITE),
        (OSError(errno.EDQUOT, "x"), FailureClass.CANNOT_WRITE),
        (OSError(errno.EROFS, "x"), FailureClass.CANNOT_WRITE),
        (OSError(errno.EIO, "x"), FailureClass.APPLICATION_ERROR),
        (InputChangedError("f"), FailureClass.BAD_INPUT),
        (BadInputError([InputProblem("f", 1, "x", "y")]), FailureClass.BAD_INPUT),
        (ResultError("f", "x"), FailureClass.BAD_INPUT),
        (SequenceError("id", "x"), FailureClass.APPLICATION_ERROR),
        (KeyError("x"), FailureClass.APPLICATION_ERROR),
    ],
)
def test_an_error_is_classified_by_its_type(error, failure):
    assert classify_error(error, device_memory_error=DeviceMemoryError) is failure


@pytest.mark.parametrize("failure", list(FailureClass))
def test_what_a_worker_reported_counts_whatever_its_exit_code(failure):
    for exit_code in (0, 70, -9, None):
        assert classify_exit(exit_code, failure.value) is failure


@pytest.mark.parametrize(
    ("exit_code", "failure"),
    [
        (78, FailureClass.CONFIGURATION),
        (65, FailureClass.BAD_INPUT),
        (73, FailureClass.CANNOT_WRITE),
        (143, FailureClass.STOPPED),
        (70, FailureClass.DIED),
        (7, FailureClass.DIED),
        (1, FailureClass.DIED),
        (0, FailureClass.DIED),
        (None, FailureClass.DIED),
        (-9, FailureClass.DIED),
        (-11, FailureClass.DIED),
        (-15, FailureClass.DIED),
    ],
)
def test_a_worker_without_a_report_is_classified_by_its_exit_code(exit_code, failure):
    assert classify_exit(exit_code, None) is failure
    assert classify_exit(exit_code, "a word that nobody knows") is failure


@pytest.mark.parametrize("failure", list(FailureClass))
def test_both_sides_agree_on_every_exit_code(failure):
    code = exit_code_of(failure)
    assert isinstance(code, ExitCode)
    assert code != ExitCode.COMPLETE
    expected = failure if failure in EXIT_CODES else FailureClass.DIED
    assert classify_exit(int(code), None) is expected


def test_what_a_retry_cannot_change_is_not_retried():
    assert {failure for failure in FailureClass if not failure.is_worth_a_retry} == {
        FailureClass.CONFIGURATION,
        FailureClass.BAD_INPUT,
        FailureClass.CANNOT_WRITE,
        FailureClass.STOPPED,
    }
