"""One enumeration of failures: by type in the worker, by exit code and report in the parent."""

from __future__ import annotations

import errno
from pathlib import Path

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
from virnucpro.pipeline import failures
from virnucpro.pipeline.failures import (
    EXIT_CODES,
    FailureClass,
    OomKills,
    classify_error,
    classify_exit,
    exit_code_of,
)


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (ImportError("x"), FailureClass.CONFIGURATION),
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
        (OSError(errno.ENOMEM, "x"), FailureClass.HOST_OUT_OF_MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), FailureClass.HOST_OUT_OF_MEMORY),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), FailureClass.HOST_OUT_OF_MEMORY),
        (RuntimeError("filename = 'a.h5', errno = 28, error message = 'No space'"), FailureClass.CANNOT_WRITE),
        (InputChangedError("f"), FailureClass.BAD_INPUT),
        (BadInputError([InputProblem("f", 1, "x", "y")]), FailureClass.BAD_INPUT),
        (ResultError("f", "x"), FailureClass.BAD_INPUT),
        (SequenceError("id", "x"), FailureClass.APPLICATION_ERROR),
        (KeyError("x"), FailureClass.APPLICATION_ERROR),
    ],
)
def test_an_error_is_classified_by_its_type(error, failure):
    assert classify_error(error) is failure


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


def test_python_that_ends_before_our_code_is_a_broken_installation():
    assert classify_exit(1, None, sent_a_message=False) is FailureClass.CONFIGURATION
    assert classify_exit(2, None, sent_a_message=False) is FailureClass.DIED


def test_only_the_kernels_count_tells_a_kill_for_memory_from_another():
    assert classify_exit(-9, None, oom_killed=True) is FailureClass.OOM_KILL
    assert classify_exit(-9, None, oom_killed=False) is FailureClass.DIED
    assert classify_exit(-11, None, oom_killed=True) is FailureClass.DIED
    assert classify_exit(-9, "hung", oom_killed=True) is FailureClass.HUNG


@pytest.mark.parametrize(
    "text", ["low 0\nhigh 0\nmax 7\noom 2\noom_kill {}\n", "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"]
)
def test_each_kill_that_the_kernel_counts_explains_one_process(tmp_path, text):
    events = tmp_path / "memory.events"
    events.write_text(text.format(4))
    kills = OomKills(events)
    assert not kills.explain_one()
    events.write_text(text.format(6))
    assert [kills.explain_one() for _ in range(3)] == [True, True, False]


def test_without_a_count_no_death_is_explained(tmp_path):
    assert not OomKills(tmp_path / "absent").explain_one()


@pytest.mark.skipif(not Path("/proc/self/cgroup").exists(), reason="this system has no control groups")
def test_our_own_control_group_is_found_where_the_kernel_counts_kills():
    mounted = [*Path("/sys/fs/cgroup").glob("memory/memory.oom_control"), *Path("/sys/fs/cgroup").glob("memory.events")]
    found = failures._own_events_file()
    assert (found is not None) or not mounted
    assert found is None or "oom_kill" in found.read_text()


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
        FailureClass.NOT_FINITE,
    }
