"""
Every exception that VirNucPro raises on purpose, with the exit code of its command.

An error carries its values as attributes and builds its sentence once, with what to do. Anything else is a defect and
ends with ``ExitCode.INTERNAL``.
"""

from __future__ import annotations

import errno
import json
import os
import re
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class ExitCode(IntEnum):
    """Exit codes of commands (numbers of sysexits.h where it has one)."""

    COMPLETE = 0
    USAGE = 2
    PARTIAL = 3
    BAD_INPUT = 65
    INTERNAL = 70
    CANNOT_WRITE = 73
    RUN_LOCKED = 75
    CONFIGURATION = 78
    INTERRUPTED = 130
    TERMINATED = 143


class VirNucProError(Exception):
    """Base of all errors below."""

    exit_code: ExitCode = ExitCode.INTERNAL

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[VirNucProError], args: tuple[Any, ...], attributes: dict[str, Any]) -> VirNucProError:
    """Recreate a pickled error: its sentence was built from its values, so both travel."""
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(attributes)
    return error


class _OfFileError(Exception):
    """Concerns the file or folder *path*; *what* is wrong with it."""

    sentence = "{path}: {what}"

    def __init__(self, path: str | Path, what: str) -> None:
        self.path, self.what = str(path), what
        super().__init__(self.sentence.format(path=path, what=what))


# --- input -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InputProblem:
    """A problem of an input file, printed as ``FILE:LINE: what (id): what to do``."""

    path: str
    """As the user named it."""
    line: int | None
    """1-based; None for the file as a whole."""
    what: str
    """What is wrong, without a full stop."""
    remedy: str
    """What the user can do."""
    sequence_id: str | None = None

    def __str__(self) -> str:
        path = printable(self.path)
        where = path if self.line is None else f"{path}:{self.line}"
        who = "" if self.sequence_id is None else f" ({printable(self.sequence_id)})"
        return f"{where}: {self.what}{who}: {self.remedy}"


class BadInputError(VirNucProError, ValueError):
    """The input is invalid; *problems* are at most ``MAX_PROBLEMS``, and *more* says that the check stopped there."""

    exit_code = ExitCode.BAD_INPUT
    MAX_PROBLEMS = 20

    def __init__(self, problems: Sequence[InputProblem], *, more: bool = False) -> None:
        files = {problem.path: number for number, problem in reversed(list(enumerate(problems)))}
        self.problems = tuple(sorted(problems, key=lambda problem: (files[problem.path], problem.line or 0)))
        self.more = more
        lines = [str(problem) for problem in self.problems]
        if more:
            lines.append(f"... and more: only the first {len(self.problems)} problems are shown")
        super().__init__("\n".join(lines))


class InputChangedError(VirNucProError):
    """An input file changed after it was indexed; *sequence_id* is None when the whole file was compared."""

    exit_code = ExitCode.BAD_INPUT

    def __init__(self, path: str, sequence_id: str | None = None) -> None:
        self.path = path
        self.sequence_id = sequence_id
        record = "" if sequence_id is None else f" (seen at record {printable(sequence_id)})"
        super().__init__(f"{path}: the file changed after it was indexed{record}: start the run again on a stable copy")


class IndexFormatError(_OfFileError, VirNucProError, ValueError):
    """A sequence index cannot be read."""

    exit_code = ExitCode.BAD_INPUT
    sentence = "{path}: not a usable sequence index ({what}): delete it and run `virnucpro index` again"


class ResultError(_OfFileError, VirNucProError, ValueError):
    """A result file is missing, damaged or not of its run."""

    exit_code = ExitCode.BAD_INPUT


class SourceGoneError(ResultError):
    """A part or shard was removed or replaced while it was read, as its rank sealed it: look again."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path, "is no longer the file that was checked")


# --- configuration ---------------------------------------------------------------------------------------------------


class ConfigurationError(VirNucProError, ValueError):
    """A setting cannot work; a retry would change nothing."""

    exit_code = ExitCode.CONFIGURATION


class PathNotAllowedError(ConfigurationError):
    """A path leads outside the folders that the worker allows."""

    def __init__(self, parameter: str, path: str, variable: str, roots: list[str]) -> None:
        self.parameter = parameter
        self.path = path
        allowed = ", ".join(printable(root) for root in roots) or "none"
        setting = variable if variable in os.environ else "VIRNUCPRO_DATA_ROOTS"
        super().__init__(
            f"{parameter}: {printable(path)} is not under a folder that the worker allows ({setting}: {allowed}); "
            f"nothing was read"
        )


class UnknownModelError(ConfigurationError):
    def __init__(self, name: str, known: Sequence[str]) -> None:
        self.name = name
        self.known = tuple(known)
        super().__init__(f"unknown model {name!r}: choose one of {', '.join(known)}, or the path of a .pt file")


class WeightsError(ConfigurationError):
    """A model's weights are absent or unusable."""

    def __init__(self, name: str, what: str) -> None:
        self.name = name
        self.what = what
        super().__init__(f"weights of {name}: {what}")


class UnknownClassifierError(ConfigurationError):
    """Neither a bundled classifier nor the folder of one."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        self.name = name
        self.known = tuple(known)
        super().__init__(
            f"unknown classifier {name!r}: choose {' or '.join(known)}, or the folder that "
            "`virnucpro models convert-classifier 500_model.pth -o DIR` made of a published one"
        )


class ClassifierMismatchError(ConfigurationError):
    """A classifier does not fit the run; *differences* maps what to (trained with, requested)."""

    def __init__(self, name: str, differences: dict[str, tuple[str, str]]) -> None:
        self.name = name
        self.differences = differences
        listed = "; ".join(f"{what} {trained}, not {asked}" for what, (trained, asked) in differences.items())
        super().__init__(
            f"the classifier {name} was trained with {listed}: its scores would be meaningless. "
            "Use the same as in its training, or a classifier trained with what you use"
        )


class ClassifierFileError(_OfFileError, VirNucProError, ValueError):
    """The file of a published classifier is refused; nothing in it was executed."""

    exit_code = ExitCode.BAD_INPUT


class DeviceError(ConfigurationError):
    """A device selection that names no device, names one twice, or mixes forms."""


class TokenBudgetError(ConfigurationError):
    """A sequence alone exceeds the token budget."""

    def __init__(self, tokens: int, token_budget: int) -> None:
        self.tokens = tokens
        self.token_budget = token_budget
        super().__init__(
            f"a sequence of {tokens} tokens does not fit a token budget of {token_budget}: "
            f"raise --token-budget to at least {tokens}, or lower --max-residues"
        )


class SettingsChangedError(ConfigurationError):
    """The folder holds a run with other settings, input or model; *differences* maps setting to (old, new)."""

    def __init__(self, output_dir: str | Path, differences: dict[str, tuple[object, object]]) -> None:
        self.output_dir = str(output_dir)
        self.differences = differences
        listed = "; ".join(f"{key} was {_shown(old)}, now {_shown(new)}" for key, (old, new) in differences.items())
        super().__init__(
            f"{output_dir} holds a run that cannot be continued like this: {listed}. "
            "Use the same input and settings, or another output folder, or --restart to start from scratch in this one"
        )


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "not set" if value is None else repr(value)


# --- running ---------------------------------------------------------------------------------------------------------


class OutputError(VirNucProError, OSError):
    """An output file or folder cannot be written; *what* is the system's text."""

    exit_code = ExitCode.CANNOT_WRITE

    def __init__(self, path: str | Path, what: str) -> None:
        self.path = str(path)
        self.what = what
        if what == os.strerror(errno.EEXIST):
            what = "a file of that name is there: name a folder"
        is_full = what in map(os.strerror, _FULL)
        remedy = ": free some space, then start the same command again" if is_full else ""
        super().__init__(f"cannot write {path}: {what}{remedy}")


class DiskSpaceError(OutputError):
    """A run does not fit on the disk of its folder."""

    def __init__(self, path: str | Path, *, needed_bytes: int, available_bytes: int) -> None:
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        super().__init__(
            path,
            f"the run needs {_size(needed_bytes)} there and {_size(available_bytes)} are available: "
            "free some space, or use a folder on another disk",
        )


def _holder_in_words(holder: str) -> str:
    """Return a record of a lock file as words; anything else as it is."""
    try:
        about = json.loads(holder)
        return printable(f"process {about['pid']} on {about['host']}, run {about['run_id']}, since {about['since']}")
    except (ValueError, KeyError, TypeError):
        return printable(holder)


class RunLockedError(VirNucProError):
    """Another run holds the output folder; *holder* is its own record."""

    exit_code = ExitCode.RUN_LOCKED

    def __init__(self, output_dir: str | Path, holder: str) -> None:
        self.output_dir = str(output_dir)
        self.holder = holder
        shown = _holder_in_words(holder)
        super().__init__(f"{output_dir} is in use by another run ({shown}): wait for it, or use another folder")


class SequenceError(VirNucProError):
    """The model gave an unusable result for a sequence."""

    def __init__(self, sequence_id: str, what: str) -> None:
        self.sequence_id = sequence_id
        self.what = what
        super().__init__(f"{printable(sequence_id)}: {what}")


class HostCheckError(VirNucProError):
    """A host cannot take part in a run: *path* differs there, or cannot be written."""

    exit_code = ExitCode.CONFIGURATION

    def __init__(self, host: str, path: str | Path, what: str, *, exit_code: ExitCode = ExitCode.CONFIGURATION) -> None:
        self.host = host
        self.path = str(path)
        self.what = what
        self.exit_code = exit_code
        super().__init__(f"host {printable(host)} cannot take part in this run: {printable(self.path)}: {what}")


class ClusterLostError(VirNucProError):
    """The scheduler of a cluster (``ray`` or ``dask``) ended during a run; finished work is kept."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        super().__init__(
            f"the scheduler of {engine} was lost, and with it all tasks: start the same command again to continue, on "
            "a new cluster or without one"
        )


class WorkersFailedError(VirNucProError, RuntimeError):
    """
    Workers failed, so that rows are missing.

    Attributes:
        failures: Rank -> why it gave up.
        world_size: Number of workers.
        missing_sequences: Sequences without a row.
        total_sequences: Sequences of the input.
        partial_path: The existing rows, None when there are none.
        is_listed: Whether ``failed_sequences.tsv`` names the missing sequences.
    """

    exit_code = ExitCode.PARTIAL

    def __init__(
        self,
        failures: dict[int, str],
        *,
        world_size: int,
        missing_sequences: int,
        total_sequences: int,
        partial_path: str | None,
        exit_code: ExitCode = ExitCode.PARTIAL,
        is_listed: bool = True,
    ) -> None:
        self.failures = failures
        self.world_size = world_size
        self.missing_sequences = missing_sequences
        self.total_sequences = total_sequences
        self.partial_path = partial_path
        self.exit_code = exit_code
        self.is_listed = is_listed
        kept = "no row was finished" if is_listed else "what is finished is kept"
        kept = kept if partial_path is None else f"partial result at {printable(partial_path)}"
        who = f"{len(failures)} of {world_size} workers failed, " if failures else ""
        reasons = "".join(f"\n  rank {rank}: {why}" for rank, why in sorted(failures.items()))
        super().__init__(
            f"{who}{missing_sequences:,} of {total_sequences:,} sequences missing, {kept}{reasons}\n  "
            f"{'the missing sequences are listed in failed_sequences.tsv; ' if is_listed else ''}"
            "start the same command again to compute them"
        )


class CacheError(_OfFileError, VirNucProError):
    """The embedding cache cannot be used; a run continues without it."""

    exit_code = ExitCode.CANNOT_WRITE
    sentence = "the embedding cache {path} cannot be used: {what}"


class StoppedError(VirNucProError):
    """The run was stopped; *signal_number* is None when its caller did. The same command continues it."""

    def __init__(self, signal_number: int | None = None) -> None:
        self.signal_number = signal_number
        self.exit_code = ExitCode.INTERRUPTED if signal_number in (None, 2) else ExitCode.TERMINATED
        super().__init__("stopped; finished work is kept: start the same command again to continue")


class TimeLimitError(StoppedError):
    """The run's own time limit has passed; the same command continues it."""

    exit_code = ExitCode.INTERNAL

    def __init__(self, minutes: float) -> None:
        self.minutes, self.signal_number = minutes, None
        VirNucProError.__init__(self, f"the time limit of {minutes:g} minutes has passed: run it again to continue")


# --- surroundings ----------------------------------------------------------------------------------------------------

_OF_MEMORY = re.compile(r"an(?:no|')t allocate memory|failed to map segment|can't start new thread|bad_alloc")
"""What the loader, torch and Python say of memory, in errors that have no number."""
_OF_HDF5 = re.compile(r"(?:filename = '([^']*)'.*?)?errno = (\d+)", re.DOTALL)
_PACKAGES = {name: name for name in ("lightgbm", "prefect", "scipy", "tokenizers", "torch")} | {"esm": "fair-esm"}
"""What a light installation lacks (packaging/light-requirements.txt): module -> package."""
_LIMITS = (errno.EMFILE, errno.ENFILE)
_FULL = {errno.ENOSPC, errno.EDQUOT}
_DISK = {errno.EIO, errno.EROFS, errno.EFBIG, errno.EACCES, errno.EPERM, errno.ENOLCK, errno.ESTALE, errno.ENODEV}
_DISK |= _FULL | {errno.ENXIO}


class SurroundingsError(VirNucProError):
    """Memory, a disk or a limit of the system failed; *path* is "" where the file is not known."""

    def __init__(self, path: str | Path, what: str, remedy: str, exit_code: ExitCode) -> None:
        self.path, self.what, self.exit_code = str(path), what, exit_code
        where = f"{printable(self.path)}: " if self.path else ""
        super().__init__(f"{where}{printable(what)}: {remedy}, then start the same command again")


def _of_system(error: BaseException) -> tuple[BaseException, int | None, str]:
    """Return what the system raised, its number, and the file; HDF5 only writes these into its text."""
    if isinstance(error, ResultError | IndexFormatError | SurroundingsError) and error.__cause__ is not None:
        cause, number, path = _of_system(error.__cause__)
        return cause, number, path or error.path
    path, number = getattr(error, "filename", None) or "", getattr(error, "errno", None)
    found = _OF_HDF5.search(str(error))
    return (error, number, str(path)) if found is None else (error, int(found[2]), found[1] or "")


def error_number(error: BaseException) -> int | None:
    """Return the system's number of an error, None where it has none."""
    return _of_system(error)[1]


def is_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of this machine or within its limit."""
    cause, number, _ = _of_system(error)
    if isinstance(cause, VirNucProError):
        return False
    return isinstance(cause, MemoryError) or number == errno.ENOMEM or bool(_OF_MEMORY.search(str(cause)))


def of_surroundings(error: BaseException, place: str | Path = "") -> SurroundingsError | None:
    """Return *error* with cause, file (*place* where it has none) and exit code; None where it is typed or a defect."""
    cause, number, path = _of_system(error)
    if is_of_memory(error):
        said = str(cause).strip().rpartition("\n")[2] or type(cause).__name__
        remedy = "allow more memory (ulimit -v, the job's limit), or use fewer --workers and --threads"
        return SurroundingsError(path or place, f"out of memory ({said})", remedy, ExitCode.CONFIGURATION)
    if isinstance(cause, ModuleNotFoundError) and (missing := cause.name or "") in _PACKAGES:
        remedy = f"install all of virnucpro (README, Install), or this alone (pip install {_PACKAGES[missing]})"
        return SurroundingsError("", f"{missing} is not installed here", remedy, ExitCode.CONFIGURATION)
    what = os.strerror(number or 0)
    if number in _LIMITS:
        return SurroundingsError(path or place, what, "raise ulimit -n", ExitCode.CONFIGURATION)
    if number in _DISK:
        return SurroundingsError(path or place, what, "check the disk and the permissions", ExitCode.CANNOT_WRITE)
    return None


def unreadable(path: str, error: OSError) -> BadInputError | SurroundingsError:
    """Return what to raise where the system cannot read the input *path*."""
    found = of_surroundings(error, path)
    if found is not None and (found.exit_code is ExitCode.CONFIGURATION or error.errno in _FULL):
        return found
    what = error.strerror or str(error)
    return BadInputError([InputProblem(path, None, what, "check the disk, then copy the file again")])


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"


def printable(text: str) -> str:
    """Return *text* with everything escaped that a terminal or log could act on."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
