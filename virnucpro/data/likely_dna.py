"""
Warns, before any work, of DNA that is given to a protein model.

Every nucleotide's letter is also a residue's, so a sample of the longest sequences counts as DNA where no other letter
occurs. The opposite case needs no warning: the reader refuses letters of no nucleotide.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import structlog

from virnucpro.choices import SequenceKind
from virnucpro.data.sequence_dataset import IndexBasedDataset

if TYPE_CHECKING:
    from virnucpro.data.sequence_index import SequenceIndex

log = structlog.get_logger(__name__)

SAMPLE = 100
"""Number of sequences tested, the longest ones."""
LEAST_NUCLEOTIDES = 60
"""Shortest sequence that can count as DNA."""

_NOT_PLAIN_DNA = re.compile("[^ACGTUN]")


def warn_of_dna(index: SequenceIndex) -> None:
    """Log a warning where the proteins of *index* look like DNA."""
    if index.rules.sequence_kind is not SequenceKind.PROTEIN:
        return
    dataset = IndexBasedDataset(index, range(min(SAMPLE, len(index))))
    records = [dataset[number] for number in range(len(dataset))]
    if records and all(_is_dna(record.sequence) for record in records):
        log.warning(
            "input.looks_like_dna",
            first=records[0].sequence_id,
            advice="the model takes proteins: `virnucpro models list` names the models of DNA",
        )


def _is_dna(sequence: str) -> bool:
    return len(sequence) >= LEAST_NUCLEOTIDES and not _NOT_PLAIN_DNA.search(sequence)
