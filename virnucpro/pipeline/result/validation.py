"""The proof that a result is right: its bytes, its shape, its ids in the order of the input, finite numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from virnucpro.store import schema
from virnucpro.store.results.forms import result_at

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import numpy as np

    from virnucpro.data.sequence_index import SequenceIndex
    from virnucpro.store.results.result import Hosts

    IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class RowsOfInput:
    """What the result of an input must hold."""

    index: SequenceIndex
    num_rows: int
    files: Mapping[str, str] | None
    """Hex sha256 of each file by its name in ``run.json``; None leaves their bytes unchecked."""

    @property
    def is_complete(self) -> bool:
        return self.num_rows == len(self.index)

    def iter_ids(self, rows: range | None = None) -> Iterator[list[str]]:
        """Yield the ids of the input in order, or those of some records, a bounded number at a time."""
        positions = self._in_order if rows is None else self._in_order[rows.start : rows.stop]
        for start in range(0, len(positions), schema.IDS_PER_WRITE):
            yield self.index.sequence_ids(positions[start : start + schema.IDS_PER_WRITE])

    @cached_property
    def _in_order(self) -> IntArray:
        return self.index.in_input_order()


def validate_result(
    path: Path,
    index: SequenceIndex,
    *,
    expected_rows: int,
    expected_files: Mapping[str, str] | None,
    hosts: Hosts | None = None,
) -> None:
    """
    Prove that a result is whole: bytes, shape, ids in the input's order and each once, finite numbers.

    Args:
        path: The result file, or the folder of shards.
        index: The input.
        expected_rows: Rows that it must have.
        expected_files: Hex sha256 of each of its files by its name in ``run.json``; None leaves their bytes unchecked.
        hosts: Check the shards of a complete result; None for this process.

    Raises:
        ResultError: Something does not hold; says what.
    """
    result_at(path).validate(RowsOfInput(index, expected_rows, expected_files), hosts=hosts)
