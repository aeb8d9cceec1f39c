"""Every error has an exit code of the list, carries its values, and says what to do without harming a terminal."""

from __future__ import annotations

import errno
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virnucpro import errors
from virnucpro.errors import (
    BadInputError,
    CacheError,
    ClassifierFileError,
    ClassifierMismatchError,
    ClusterLostError,
    ConfigurationError,
    DeviceError,
    DiskSpaceError,
    ExitCode,
    HostCheckError,
    IndexFormatError,
    InputChangedError,
    InputProblem,
    OutputError,
    PathNotAllowedError,
    ResultError,
    RunLockedError,
    SequenceError,
    SettingsChangedError,
    SourceGoneError,
    StoppedError,
    SurroundingsError,
    TimeLimitError,
    TokenBudgetError,
    UnknownClassifierError,
    UnknownModelError,
    VirNucProError,
    WeightsError,
    WorkersFailedError,
    printable,
)
from virnucpro.knobs import UsageError

DESIGN = {0: "COMPLETE", 2: "USAGE", 3: "PARTIAL", 65: "BAD_INPUT", 70: "INTERNAL", 73: "CANNOT_WRITE"}
DESIGN |= {75: "RUN_LOCKED", 78: "CONFIGURATION", 130: "INTERRUPTED", 143: "TERMINATED"}

FAILED = {"world_size": 8, "missing_sequences": 12345, "total_sequences": 99999}
EXAMPLES = [
    (VirNucProError("x"), 70),
    (BadInputError([InputProblem("in.fa", 3, "empty sequence", "remove the record", "id7")]), 65),
    (InputChangedError("in.fa", "id7"), 65),
    (IndexFormatError("x.index", "cut short"), 65),
    (ResultError("embeddings.h5", "is missing"), 65),
    (SourceGoneError("shard_0.h5"), 65),
    (ConfigurationError("x"), 78),
    (PathNotAllowedError("file", "in.fasta", "VIRNUCPRO_DATA_ROOTS", ["/data"]), 78),
    (UnknownModelError("esm9", ["a", "b"]), 78),
    (WeightsError("esm2", "are not here"), 78),
    (UnknownClassifierError("mine", ["a"]), 78),
    (ClassifierMismatchError("mine", {"chunks of": ("500 nt", "300 nt")}), 78),
    (ClassifierFileError("500_model.pth", "is empty"), 65),
    (DeviceError("x"), 78),
    (TokenBudgetError(1024, 512), 78),
    (SettingsChangedError("out", {"precision": ("fp32", "bf16")}), 78),
    (OutputError("out/x.h5", "No space left on device"), 73),
    (DiskSpaceError("out", needed_bytes=3 << 30, available_bytes=5 << 20), 73),
    (RunLockedError("out", "pid 7"), 75),
    (SurroundingsError("out/x.h5", "Input/output error", "check this disk", ExitCode.CANNOT_WRITE), 73),
    (CacheError("cache/embeddings.sqlite", "disk full"), 73),
    (SequenceError("id7", "not finite"), 70),
    (HostCheckError("node7", "in.fa", "has another size"), 78),
    (HostCheckError("node7", "out", "cannot be written to", exit_code=ExitCode.CANNOT_WRITE), 73),
    (ClusterLostError("dask"), 70),
    (WorkersFailedError({1: "died"}, partial_path=None, **FAILED), 3),
    (StoppedError(), 130),
    (TimeLimitError(1.5), 70),
]


def every_error(base=VirNucProError):
    return {base}.union(*(every_error(sub) for sub in base.__subclasses__()))


def test_the_exit_codes_are_those_of_the_design():
    assert {int(code): code.name for code in ExitCode} == DESIGN


def test_every_error_of_ours_has_an_example_here():
    ours = {error for error in every_error() if error.__module__ == errors.__name__}
    assert ours == {type(error) for error, _ in EXAMPLES}


@pytest.mark.parametrize(("error", "code"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_every_error_ends_with_its_code_of_the_design_and_is_one_sentence_for_a_person(error, code):
    assert error.exit_code == code
    assert isinstance(error.exit_code, ExitCode)
    assert str(error).strip()
    assert "object at 0x" not in str(error)


@pytest.mark.parametrize(
    "error",
    sorted(every_error() - {VirNucProError, StoppedError, UsageError}, key=lambda error: error.__name__),
    ids=lambda error: error.__name__,
)
def test_no_other_error_ends_with_success_or_with_usage(error):
    assert error.exit_code not in {ExitCode.COMPLETE, ExitCode.USAGE}


@pytest.mark.parametrize(("number", "code"), [(None, 130), (2, 130), (15, 143), (1, 143)])
def test_a_stop_ends_with_the_code_of_its_signal(number, code):
    assert StoppedError(number).exit_code == code
    assert "start the same command again" in str(StoppedError(number))


@pytest.mark.parametrize(
    ("problem", "sentence"),
    [
        (InputProblem("in.fa", 3, "empty sequence", "add it", "id7"), "in.fa:3: empty sequence (id7): add it"),
        (InputProblem("in.fa", None, "no records", "name another"), "in.fa: no records: name another"),
        (InputProblem("in.fa", 3, "gap", "remove it"), "in.fa:3: gap: remove it"),
        (InputProblem("a", 1, "x", "y", "\x1b[31mred\n"), r"a:1: x (\x1b[31mred\n): y"),
    ],
)
def test_a_problem_reads_file_line_what_id_remedy(problem, sentence):
    assert str(problem) == sentence


def test_bad_input_lists_its_problems_one_a_line_and_says_when_there_are_more():
    problems = [InputProblem("in.fa", line, "x", "y") for line in range(1, 21)]
    assert str(BadInputError(problems)).splitlines() == [str(problem) for problem in problems]
    assert str(BadInputError(problems, more=True)).splitlines()[20:] == [
        "... and more: only the first 20 problems are shown"
    ]


@given(st.text())
def test_nothing_that_a_terminal_acts_on_is_left_in_a_printable_text(text):
    shown = printable(text)
    assert shown.isprintable()
    assert printable(shown) == shown
    if text.isprintable():
        assert shown == text


@given(st.text(min_size=1))
def test_an_id_cannot_break_a_message_into_lines(name):
    for error in (SequenceError(name, "x"), InputChangedError("in.fa", name)):
        assert str(error).isprintable()
        assert error.sequence_id == name


def test_errors_carry_the_values_that_explain_them():
    budget = TokenBudgetError(1024, 512)
    assert (budget.tokens, budget.token_budget) == (1024, 512)
    assert "1024" in str(budget)
    changed = SettingsChangedError("out", {"precision": ("fp32", "bf16")})
    assert changed.differences == {"precision": ("fp32", "bf16")}
    assert "precision was 'fp32', now 'bf16'" in str(changed)
    failed = WorkersFailedError({5: "hung: x", 1: "died: y"}, partial_path="out/p.h5", **FAILED)
    assert str(failed).splitlines() == [
        "2 of 8 workers failed, 12,345 of 99,999 sequences missing, partial result at out/p.h5",
        "  rank 1: died: y",
        "  rank 5: hung: x",
        "  the missing sequences are listed in failed_sequences.tsv; start the same command again to compute them",
    ]


def test_users_mistakes_are_value_errors_and_others_of_their_usual_family():
    assert isinstance(EXAMPLES[1][0], ValueError)
    assert isinstance(DeviceError("x"), ValueError)
    assert isinstance(OutputError("f", "x"), OSError)
    assert str(OutputError("f", "x")) == "cannot write f: x"
    assert isinstance(WorkersFailedError({}, partial_path=None, **FAILED), RuntimeError)


@pytest.mark.parametrize(
    ("raised", "code", "named"),
    [
        (OSError(errno.EIO, "Input/output error"), 73, "out: Input/output error"),
        (OSError(errno.EACCES, "x", "out/a.f32"), 73, "out/a.f32: Permission denied"),
        (OSError(errno.EMFILE, "x", "out/a.f32"), 78, "out/a.f32: Too many open files"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 78, "out: out of memory"),
        (MemoryError(), 78, "out: out of memory"),
        (RuntimeError("unable to extend file, errno = 5, error message = 'x'"), 73, "out: Input/output error"),
        (ImportError("libx.so: failed to map segment from shared object"), 78, "out: out of memory"),
        (
            RuntimeError("filename = 'a.h5', errno = 28, error message = 'No space'"),
            73,
            "a.h5: No space left on device",
        ),
    ],
)
def test_what_memory_disk_or_limits_fail_with_has_its_cause_file_and_code(raised, code, named):
    error = errors.of_surroundings(raised, "out")
    assert int(error.exit_code) == code
    assert str(error).startswith(named)


@pytest.mark.parametrize(("number", "code"), [(errno.EIO, 65), (errno.ENOSPC, 73), (errno.EMFILE, 78)])
def test_an_input_that_cannot_be_read_is_bad_input_unless_a_full_disk_or_a_limit_is_the_cause(number, code):
    error = errors.unreadable("in.fa", OSError(number, os.strerror(number)))
    assert int(error.exit_code) == code
    assert str(error).startswith("in.fa: " + os.strerror(number))


def test_a_defect_is_none_of_the_surroundings():
    assert errors.of_surroundings(KeyError("x")) is None
    assert errors.of_surroundings(RuntimeError("x")) is None
