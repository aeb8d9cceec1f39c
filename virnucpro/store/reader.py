"""Reading a result: a mapping from id to vector that touches the disk only for the rows that are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from virnucpro.errors import ResultError
from virnucpro.run_layout import RunLayout
from virnucpro.store import schema

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    FloatArray = np.ndarray[Any, np.dtype[np.float32]]


class Embeddings(Mapping[str, "FloatArray"]):
    """
    The rows of one embeddings file by sequence id, in the order of the input.

    Ids are in memory, rows are read when asked for. Use it as a context manager, or ``close`` it.

    Args:
        path: The HDF5 file.

    Raises:
        ResultError: Not an embeddings file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file, self._rows = schema.open_embeddings(path)
        try:
            self.ids: tuple[str, ...] = tuple(
                name for names in schema.iter_sequence_ids(self._file, path) for name in names
            )
            """Sequence ids in the order of the rows."""
            self._row_of = _row_numbers(self.ids, path)
        except ResultError:
            self._file.close()
            raise

    @property
    def hidden_dim(self) -> int:
        """Width of a vector."""
        return int(self._rows.shape[1])

    def __getitem__(self, sequence_id: str) -> FloatArray:
        """Return the vector of one sequence, float32 (hidden_dim,)."""
        row: FloatArray = self._rows[self._row_of[sequence_id]]
        return row

    def __iter__(self) -> Iterator[str]:
        return iter(self.ids)

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, sequence_id: object) -> bool:
        return sequence_id in self._row_of

    def to_numpy(self, sequence_ids: Iterable[str] | None = None) -> FloatArray:
        """
        Return many vectors at once.

        Args:
            sequence_ids: Which, and in which order; by default all, in the order of ``ids``.

        Returns:
            float32 (num_sequences, hidden_dim).

        Raises:
            KeyError: An id that is not in the file.
        """
        if sequence_ids is None:
            everything: FloatArray = self._rows[()]
            return everything
        numbers = np.array([self._row_of[name] for name in sequence_ids], dtype=np.int64)
        wanted, back = np.unique(numbers, return_inverse=True)
        chosen: FloatArray = self._rows[wanted] if len(wanted) else np.empty((0, self.hidden_dim), np.float32)
        return chosen[back]

    def close(self) -> None:
        """Close the file; rows can no longer be read."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Embeddings({str(self.path)!r}: {len(self)} sequences x {self.hidden_dim})"


def _row_numbers(ids: Sequence[str], path: Path) -> dict[str, int]:
    numbers = {name: row for row, name in enumerate(ids)}
    if len(numbers) < len(ids):
        raise ResultError(path, "an id stands for more than one row")
    return numbers


def read_embeddings(path: str | Path) -> Embeddings:
    """
    Open a result.

    Args:
        path: An embeddings file, or the output folder of a complete run.

    Returns:
        A mapping from sequence id to vector, with ``.ids`` and ``.to_numpy()``.

    Raises:
        ResultError: There is no result, or it is not one of ours.
    """
    where = Path(path)
    if where.is_dir():
        layout = RunLayout(where)
        if not layout.embeddings.exists() and layout.partial_embeddings.exists():
            raise ResultError(where, f"holds a partial result only: open {layout.partial_embeddings} if that is enough")
        where = layout.embeddings
    return Embeddings(where)
