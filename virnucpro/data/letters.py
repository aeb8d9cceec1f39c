"""
DNA given to a protein model, or proteins to a DNA model: noticed before any work is done.

Every nucleotide's letter is a residue's too, so DNA is only likely where a whole sample has no other letters; a letter
that stands for no nucleotide is certain. Only the longest sequences are looked at: the tokenizer refuses the rest.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import structlog

from virnucpro.config import SequenceKind
from virnucpro.data.sequence_dataset import IndexBasedDataset
from virnucpro.errors import BadInputError, InputProblem

if TYPE_CHECKING:
    from virnucpro.data.sequence_index import SequenceIndex

log = structlog.get_logger(__name__)

SAMPLE = 100
"""Sequences looked at, the longest ones."""
LEAST_NUCLEOTIDES = 60
"""Letters of a sequence that must all be nucleotides' before it counts as DNA."""

_NO_NUCLEOTIDE = re.compile("[^ACGTRYSWKMBDHVN]")
_NOT_PLAIN_DNA = re.compile("[^ACGTUN]")


def check_letters(index: SequenceIndex, sequence_kind: SequenceKind) -> None:
    """
    Refuse proteins for a DNA model, and warn of DNA for a protein model.

    Args:
        index: The input.
        sequence_kind: What the model takes.

    Raises:
        BadInputError: The model takes DNA, and a sequence has a letter that stands for no nucleotide.
    """
    dataset = IndexBasedDataset(index, range(min(SAMPLE, len(index))))
    records = [dataset[number] for number in range(len(dataset))]
    if sequence_kind is SequenceKind.DNA:
        for record in records:
            if wrong := _NO_NUCLEOTIDE.search(record.sequence):
                problem = InputProblem(
                    path=index.path_of(record.position),
                    line=index.line_of(record.position),
                    what=f"letter {wrong.start() + 1} is {wrong.group()!a}, which stands for no nucleotide of DNA",
                    remedy="the model takes DNA: give it DNA (T for U), or choose a protein model",
                    sequence_id=record.sequence_id,
                )
                raise BadInputError([problem])
    elif records and all(_is_dna(record.sequence) for record in records):
        log.warning(
            "input.looks_like_dna",
            first=records[0].sequence_id,
            advice="the model takes proteins: `virnucpro models list` names the models of DNA",
        )


def _is_dna(sequence: str) -> bool:
    return len(sequence) >= LEAST_NUCLEOTIDES and not _NOT_PLAIN_DNA.search(sequence)
