"""
Joins the DNA and protein embeddings of each frame by id, block by block, in frame order.

A run that lost sequences has fewer rows. Every id in a file is compared with the expected one; a row under another id
is never used, and surplus rows are an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np

from virnucpro.errors import ResultError
from virnucpro.store import schema

if TYPE_CHECKING:
    from pathlib import Path

    FloatArray = np.ndarray[Any, np.dtype[np.float32]]
    BoolArray = np.ndarray[Any, np.dtype[np.bool_]]


class RowStream:
    """The rows of one embeddings file in order; a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file, self._rows = schema.open_embeddings(path)
        self._ids = schema.iter_sequence_ids(self._file, path)
        self._ahead: list[str] = []
        self._next_row = 0

    @property
    def hidden_dim(self) -> int:
        """Width of a row."""
        return int(self._rows.shape[1])

    def take(self, wanted: list[str]) -> tuple[BoolArray, FloatArray]:
        """Return which of the next frames have a row, bool (wanted,), and the rows, float32 (rows, hidden_dim)."""
        while len(self._ahead) < len(wanted) and (more := next(self._ids, None)) is not None:
            self._ahead.extend(more)
        ahead = self._ahead[: len(wanted)]
        if ahead == wanted:
            has_row = np.ones(len(wanted), dtype=np.bool_)
        else:
            coming = iter(ahead)
            upcoming = next(coming, None)
            has_row = np.zeros(len(wanted), dtype=np.bool_)
            for number, name in enumerate(wanted):
                if name == upcoming:
                    has_row[number] = True
                    upcoming = next(coming, None)
        taken = int(np.count_nonzero(has_row))
        del self._ahead[:taken]
        rows: FloatArray = self._rows[self._next_row : self._next_row + taken]
        self._next_row += taken
        return has_row, rows

    def finish(self) -> None:
        """Check that every row was taken."""
        left = self._ahead or next(self._ids, [])
        if left:
            raise ResultError(self.path, f"has a row of {left[0]!r}, which is not the frame expected there")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def join(dna: RowStream, protein: RowStream, frame_ids: list[str]) -> tuple[BoolArray, FloatArray]:
    """
    Return the features of the next frames: DNA, then protein.

    Args:
        frame_ids: Ids of the next frames, in order.

    Returns:
        bool (frames,): which frames have both rows; float32 (rows, DNA width + protein width).
    """
    has_dna, dna_rows = dna.take(frame_ids)
    has_protein, protein_rows = protein.take(frame_ids)
    has_both = has_dna & has_protein
    features = np.empty((int(has_both.sum()), dna.hidden_dim + protein.hidden_dim), dtype=np.float32)
    for has_row, rows, columns in (
        (has_dna, dna_rows, slice(0, dna.hidden_dim)),
        (has_protein, protein_rows, slice(dna.hidden_dim, None)),
    ):
        features[:, columns] = rows if len(rows) == len(features) else rows[has_both[has_row]]
    return has_both, features
