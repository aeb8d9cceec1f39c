"""
The sequences of one worker by number, read when they are asked for.

A map-style dataset as torch's ``DataLoader`` expects it, without importing torch. Pickled into another process it
opens the index there again; order and content of what it gives are those of the index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from virnucpro.spans import READING, span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virnucpro.data.sequence_index import SequenceIndex, SequenceRecord

    IntArray = np.ndarray[Any, np.dtype[np.int64]]


class IndexBasedDataset:
    """
    Some records of an index.

    Args:
        index: Where they are.
        indices: int64 (num_sequences,): their positions in the index, in the order wanted; None stands for every
            record by its position.
    """

    def __init__(self, index: SequenceIndex, indices: Sequence[int] | IntArray | None = None) -> None:
        self.index = index
        self.indices: IntArray | None = None if indices is None else np.asarray(indices, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.index if self.indices is None else self.indices)

    def __getitem__(self, number: int) -> SequenceRecord:
        """Read sequence *number* of this dataset."""
        return self.index.read(int(number if self.indices is None else self.indices[number]))

    def __getitems__(self, numbers: Sequence[int]) -> list[SequenceRecord]:
        """Read several sequences of this dataset, in the order asked for."""
        records: list[SequenceRecord] = []
        with span(READING, records):
            records.extend(self[number] for number in numbers)
        return records
