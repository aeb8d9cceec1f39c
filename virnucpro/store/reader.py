"""Reading a result: a mapping from id to vector that reads only the rows that are accessed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from virnucpro.errors import ResultError
from virnucpro.run_layout import RunLayout
from virnucpro.store.results.forms import all_results, result_at

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from virnucpro.arrays import FloatArray
    from virnucpro.store.results.result import Result


class Embeddings(Mapping[str, "FloatArray"]):
    """
    The rows of a result by sequence id, in the order of the input.

    Rows are read on access. The ids of a single file are in memory, those of a sharded result are not. Use it as a
    context manager, or ``close`` it.

    Args:
        path: A file, or the folder of shards.

    Raises:
        ResultError: Not a result.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows = result_at(path).open()

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
        Return many vectors at once, float32 (num_sequences, hidden_dim); KeyError where an id has no row.

        Args:
            sequence_ids: Which, and in which order; by default all, in the order of ``ids``.
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


def read_embeddings(path: str | Path) -> Embeddings:
    """
    Open a result: a mapping from sequence id to vector, with ``.ids`` and ``.to_numpy()``.

    Args:
        path: The output folder of a complete run, or its result: a file, or a folder of shards.

    Raises:
        ResultError: There is no result, or it is not one of ours.
    """
    where = Path(path)
    if where.is_dir() and not result_at(where).files():
        where = _result_in(RunLayout(where)).path
    return Embeddings(where)


def _result_in(layout: RunLayout) -> Result:
    """Return the result in the folder of a run; where nothing is whole, the one whose error says what is missing."""
    whole = all_results(layout, is_partial=False)
    for result in whole:
        if result.proof.exists():
            return result
    for result in all_results(layout, is_partial=True):
        if result.proof.exists():
            raise ResultError(layout.output_dir, f"holds a partial result only: open {result.path} if that is enough")
    return next((result for result in whole if result.files()), whole[0])
