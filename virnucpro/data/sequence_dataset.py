"""
Sequences by number, read on access; and a warning, before any work, of DNA that is given to a protein model.

The dataset is map-style for torch's ``DataLoader``, without importing torch. Unpickled in another process it opens the
index there.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import structlog

from virnucpro.choices import SequenceKind
from virnucpro.spans import READING, span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virnucpro.arrays import IntArray
    from virnucpro.data.sequence_index import SequenceIndex, SequenceRecord

log = structlog.get_logger(__name__)

SAMPLE = 100
"""Number of sequences that are tested for DNA, the longest ones."""
LEAST_NUCLEOTIDES = 60
"""Shortest sequence that can count as DNA."""

_NOT_PLAIN_DNA = re.compile("[^ACGTUN]")


class IndexBasedDataset:
    """Some records of an index; *indices*: their positions, int64 (num_sequences,), in order; None for all."""

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


def warn_of_dna(index: SequenceIndex) -> None:
    """
    Log a warning where the proteins of *index* look like DNA.

    Every nucleotide's letter is also a residue's, so a sample counts as DNA where no other letter occurs. The opposite
    case needs no warning: the reader refuses letters of no nucleotide.
    """
    if index.rules.sequence_kind is not SequenceKind.PROTEIN:
        return
    records = [index.read(position) for position in range(min(SAMPLE, len(index)))]
    if records and all(_is_dna(record.sequence) for record in records):
        log.warning(
            "input.looks_like_dna",
            first=records[0].sequence_id,
            advice="the model takes proteins: `virnucpro models list` names the models of DNA",
        )


def _is_dna(sequence: str) -> bool:
    return len(sequence) >= LEAST_NUCLEOTIDES and not _NOT_PLAIN_DNA.search(sequence)
