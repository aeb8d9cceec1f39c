"""Reading a result: a mapping from id to vector that touches the disk only for the rows that are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from virnucpro.errors import ResultError
from virnucpro.run_layout import RunLayout, ShardedLayout
from virnucpro.store import schema
from virnucpro.store.sharded_rows import ShardedRows

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    FloatArray = np.ndarray[Any, np.dtype[np.float32]]
    IntArray = np.ndarray[Any, np.dtype[np.int64]]


class Rows(Protocol):
    """The rows of a result, in whichever form."""

    @property
    def ids(self) -> Sequence[str]:
        """Sequence ids in the order of the rows."""

    @property
    def hidden_dim(self) -> int:
        """Width of a row."""

    def rows_of(self, sequence_ids: Sequence[str]) -> IntArray:
        """Return the number of the row of each id, int64 (ids,); ``KeyError`` tells the first that has none."""

    def read(self, rows: slice | IntArray) -> FloatArray:
        """Return rows by a slice of step 1, or by their ascending numbers; float32 (rows, hidden_dim)."""

    def __contains__(self, sequence_id: object) -> bool:
        """Whether there is a row of this id."""

    def close(self) -> None:
        """Close the files."""


class Embeddings(Mapping[str, "FloatArray"]):
    """
    The rows of a result by sequence id, in the order of the input.

    Rows are read when asked for. The ids of a single file are in memory, those of a sharded result are not. Use it as a
    context manager, or ``close`` it.

    Args:
        path: The HDF5 file, or the folder of shards.

    Raises:
        ResultError: Not a result.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: Rows = ShardedRows(ShardedLayout(path)) if path.is_dir() else _OneFile(path)

    @property
    def ids(self) -> Sequence[str]:
        """Sequence ids in the order of the rows: a tuple, or of a sharded result a sequence that reads its files."""
        return self._rows.ids

    @property
    def hidden_dim(self) -> int:
        """Width of a vector."""
        return self._rows.hidden_dim

    def __getitem__(self, sequence_id: str) -> FloatArray:
        """Return the vector of one sequence, float32 (hidden_dim,)."""
        row = int(self._rows.rows_of([sequence_id])[0])
        vector: FloatArray = self._rows.read(slice(row, row + 1))[0]
        return vector

    def __iter__(self) -> Iterator[str]:
        return iter(self.ids)

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, sequence_id: object) -> bool:
        return sequence_id in self._rows

    def to_numpy(self, sequence_ids: Iterable[str] | None = None) -> FloatArray:
        """
        Return many vectors at once.

        Args:
            sequence_ids: Which, and in which order; by default all, in the order of ``ids``.

        Returns:
            float32 (num_sequences, hidden_dim).

        Raises:
            KeyError: An id that has no row.
        """
        if sequence_ids is None:
            return self._rows.read(slice(0, len(self)))
        wanted, back = np.unique(self._rows.rows_of(list(sequence_ids)), return_inverse=True)
        chosen = self._rows.read(wanted)
        return chosen[back]

    def close(self) -> None:
        """Close its files; rows can no longer be read."""
        self._rows.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Embeddings({str(self.path)!r}: {len(self)} sequences x {self.hidden_dim})"


class _OneFile:
    """The rows of one embeddings file."""

    def __init__(self, path: Path) -> None:
        self._file, self._rows = schema.open_embeddings(path)
        try:
            self.ids = tuple(name for names in schema.iter_sequence_ids(self._file, path) for name in names)
            self._row_of = _row_numbers(self.ids, path)
        except ResultError:
            self._file.close()
            raise

    @property
    def hidden_dim(self) -> int:
        return int(self._rows.shape[1])

    def rows_of(self, sequence_ids: Sequence[str]) -> IntArray:
        return np.array([self._row_of[name] for name in sequence_ids], dtype=np.int64)

    def __contains__(self, sequence_id: object) -> bool:
        return sequence_id in self._row_of

    def read(self, rows: slice | IntArray) -> FloatArray:
        is_nothing = not isinstance(rows, slice) and not len(rows)
        found: FloatArray = self._rows[:0] if is_nothing else self._rows[rows]
        return found

    def close(self) -> None:
        self._file.close()


def _row_numbers(ids: Sequence[str], path: Path) -> dict[str, int]:
    numbers = {name: row for row, name in enumerate(ids)}
    if len(numbers) < len(ids):
        raise ResultError(path, "an id stands for more than one row")
    return numbers


def read_embeddings(path: str | Path) -> Embeddings:
    """
    Open a result.

    Args:
        path: The output folder of a complete run, or its result: an embeddings file, or a folder of shards.

    Returns:
        A mapping from sequence id to vector, with ``.ids`` and ``.to_numpy()``.

    Raises:
        ResultError: There is no result, or it is not one of ours.
    """
    where = Path(path)
    if where.is_dir() and not ShardedLayout(where).index.exists() and not ShardedLayout(where).shards():
        where = _result_in(RunLayout(where))
    return Embeddings(where)


def _result_in(layout: RunLayout) -> Path:
    """Return the result in the folder of a run."""
    sharded, partial = layout.sharded_embeddings, layout.partial_sharded_embeddings
    if layout.embeddings.exists() or sharded.index.exists():
        return layout.embeddings if layout.embeddings.exists() else sharded.folder
    for path, proof in ((layout.partial_embeddings, layout.partial_embeddings), (partial.folder, partial.index)):
        if proof.exists():
            raise ResultError(layout.output_dir, f"holds a partial result only: open {path} if that is enough")
    return sharded.folder if sharded.shards() else layout.embeddings
