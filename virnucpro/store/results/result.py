"""
What a result is: the rows of a run by id, under one path, in a form that a subclass of ``Result`` knows.

A form knows its files, and how rows are written into them, checked and read. It does not know where the rows come from,
which ids they should have, or in which run: callers pass these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from virnucpro import durable
from virnucpro.errors import ResultError, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from virnucpro.arrays import BoolArray, FloatArray, IntArray
    from virnucpro.store.results.hdf5 import ShardProof


class NewRows(Protocol):
    """Rows to be written, in the order of the input."""

    @property
    def hidden_dim(self) -> int:
        """Width of a row."""

    @property
    def id_bytes(self) -> int:
        """UTF-8 bytes of all ids together."""

    def __len__(self) -> int: ...

    def subset(self, rows: range) -> NewRows:
        """Return neighbouring rows."""

    def iter_ids(self) -> Iterator[list[str]]:
        """Yield the ids in order, a bounded number at a time."""

    def truncated_from(self) -> IntArray:
        """Return int64 (rows,): residues of each truncated sequence, 0 where it is whole."""

    def low_information(self) -> BoolArray:
        """Return bool (rows,): True for sequences of unknown residues or nucleotides only."""

    def iter_rows(self) -> Iterator[tuple[IntArray, FloatArray]]:
        """Yield ascending row numbers and their rows, in the order in which these lie on disk."""

    def store(self, folder: Path) -> dict[str, Any]:
        """Write to *folder* where the rows are, for other hosts; return the rest of it, ready for JSON."""


class ExpectedRows(Protocol):
    """What a result must hold."""

    @property
    def num_rows(self) -> int: ...

    @property
    def is_complete(self) -> bool:
        """Whether every record of the input has its row."""

    @property
    def files(self) -> Mapping[str, str] | None:
        """Hex sha256 of each file by its name in ``run.json``; None leaves their bytes unchecked."""

    def iter_ids(self, rows: range | None = None) -> Iterator[list[str]]:
        """Yield the ids of the input in order, or those of some records, a bounded number at a time."""


class Hosts(Protocol):
    """Hosts that write and check the files of a result together."""

    def write(self, rows: NewRows, bounds: Sequence[range], paths: Sequence[Path]) -> dict[Path, str]:
        """Have HDF5 files of these rows written; return the hex sha256 of each."""

    def validate(self, proof: ShardProof) -> None:
        """Have every shard checked; ``ResultError`` where one is wrong."""


class Rows(Protocol):
    """The rows of an open result."""

    @property
    def ids(self) -> Sequence[str]:
        """Ids in the order of the rows."""

    @property
    def hidden_dim(self) -> int:
        """Width of a row."""

    def rows_of(self, sequence_ids: Sequence[str]) -> IntArray:
        """Return the row number of each id, int64 (ids,); ``KeyError`` names the first that has none."""

    def read(self, rows: slice | IntArray) -> FloatArray:
        """Return rows by a slice of step 1, or by their ascending numbers; float32 (rows, hidden_dim)."""

    def __contains__(self, sequence_id: object) -> bool: ...

    def close(self) -> None: ...


class Result(ABC):
    """A result that is, or will be, at *path*. ``proof`` is the file written last: with it, the result is complete."""

    suffix: ClassVar[str]
    """Of the path in the run's folder, behind ``embeddings`` or ``embeddings.partial``."""
    has_many_files: ClassVar[bool] = False
    """Whether several hosts can write its files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def is_at(cls, path: Path) -> bool:
        """Whether what is at *path* has this form."""
        return path.suffix == cls.suffix and not path.is_dir()

    @classmethod  # noqa: B027  most forms need nothing
    def require(cls) -> None:
        """Raise ``ConfigurationError`` where a library is missing."""

    @staticmethod
    @abstractmethod
    def bytes_at_most(num_rows: int, hidden_dim: int, *, id_bytes: int) -> int:
        """Return the most disk space that a result takes."""

    @property
    def proof(self) -> Path:
        return self.path

    def files(self) -> list[Path]:
        return [self.proof] if self.proof.is_file() else []

    def name_of(self, file: Path) -> str:
        """Return the name of a file in ``run.json``: its path in the run's folder."""
        return file.relative_to(self.path.parent).as_posix()

    def is_intact(self, files: Mapping[str, str]) -> bool:
        """Whether the whole result exists, with the bytes that ``run.json`` recorded."""
        folder, top = self.path.parent, self.path.name
        own = {folder / name: digest for name, digest in files.items() if name.split("/")[0] == top}
        return self.proof in own and all(
            file.is_file() and durable.sha256_of(file) == digest for file, digest in own.items()
        )

    @abstractmethod
    def write(self, rows: NewRows, *, give_way: Callable[[int], None], hosts: Hosts | None = None) -> dict[Path, str]:
        """
        Write all rows; return the hex sha256 of files whose writer returned it.

        Args:
            give_way: Called with a number of bytes before that much is written.
            hosts: Write a result of many files; None for this process.

        Raises:
            OutputError: The system refused; ``proof`` is absent or as before.
        """

    @abstractmethod
    def validate(self, expected: ExpectedRows, *, hosts: Hosts | None = None) -> None:
        """Raise ``ResultError`` unless bytes, shape, ids and their order are as expected and all numbers finite."""

    @abstractmethod
    def open(self) -> Rows:
        """Open the result for reading. Raises ResultError: missing, damaged, or no result of this form."""

    def remove(self) -> None:
        """Remove its files; ``OutputError`` where the system refuses."""
        durable.remove(self.path)

    def remove_unfinished(self) -> None:  # noqa: B027  a form of one file leaves nothing unfinished
        """Remove its files unless ``proof`` exists; ``OutputError`` where the system refuses."""

    def check_bytes(self, file: Path, expected: ExpectedRows) -> None:
        """Raise ``ResultError`` where a file is missing or has another sha256 than expected."""
        if not file.is_file():
            raise ResultError(file, "is missing")
        if expected.files is not None:
            durable.check_sha256(file, expected.files.get(self.name_of(file)))


class IdOrder:
    """Compares the ids of a result, in its order, with those of the input; a partial result may lack some."""

    def __init__(self, expected: ExpectedRows, rows: range | None = None) -> None:
        self._expected = (name for names in expected.iter_ids(rows) for name in names)
        self._is_complete = expected.is_complete

    def check(self, names: Sequence[str], path: Path) -> None:
        """Raise ``ResultError`` where one of the next ids is not in the input or in the wrong place."""
        for name in names:
            wanted = next(self._expected, None)
            while not self._is_complete and wanted is not None and wanted != name:
                wanted = next(self._expected, None)
            if wanted != name:
                raise ResultError(path, f"id {printable(name)!r} is not in the input, or in the wrong place")


class RowNumbers:
    """Row numbers by id, with all ids in memory; ``ResultError`` where an id has two rows."""

    def __init__(self, ids: tuple[str, ...], path: Path) -> None:
        self.ids = ids
        self._row_of = {name: row for row, name in enumerate(ids)}
        if len(self._row_of) < len(ids):
            raise ResultError(path, "an id has more than one row")

    def rows_of(self, sequence_ids: Sequence[str]) -> IntArray:
        return np.array([self._row_of[name] for name in sequence_ids], dtype=np.int64)

    def __contains__(self, sequence_id: object) -> bool:
        return sequence_id in self._row_of


def check_rows(count: int, expected: int, path: Path) -> None:
    """Raise ``ResultError`` where a result or shard has another number of rows than expected."""
    if count != expected:
        raise ResultError(path, f"has {count} rows, expected {expected}")


def check_finite(rows: FloatArray, first: int, step: int, path: Path) -> None:
    """Raise ``ResultError`` where one of the *step* rows from number *first* on holds a number that is not finite."""
    if not np.isfinite(rows).all():
        raise ResultError(path, f"a number in rows {first} to {first + step - 1} is not finite")
