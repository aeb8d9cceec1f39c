"""
The sequences of one worker by number, read on access.

A map-style dataset for torch's ``DataLoader``, without importing torch. Unpickled in another process it opens the index
there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from virnucpro.spans import READING, span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virnucpro.arrays import IntArray
    from virnucpro.data.sequence_index import SequenceIndex, SequenceRecord


class IndexBasedDataset:
    """
    Some records of an index.

    Args:
        index: Holds them.
        indices: int64 (num_sequences,): their positions in the index, in the wanted order; None stands for all records
            by position.
    """

    def __init__(self, index: SequenceIndex, indices: Sequence[int] | IntArray | None = None) -> None:
        self.index = index
        self.indices: IntArray | None = None if indices is None else np.asarray(indices, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.index if self.indices is None else self.indices)

    def __getitem__(self, number: int) -> SequenceRecord:
        return self.index.read(int(number if self.indices is None else self.indices[number]))

    def __getitems__(self, numbers: Sequence[int]) -> list[SequenceRecord]:
        records: list[SequenceRecord] = []
        with span(READING, records):
            records.extend(self[number] for number in numbers)
        return records
