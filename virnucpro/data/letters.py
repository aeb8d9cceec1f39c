"""
Which letters a sequence may hold and how they are normalised, by sequence kind and input rules.

Protein letters are those of ESM-2's alphabet, and J, which it lacks and which is read as X. DNA letters are IUPAC's
without U: the published tokenizer of DNABERT-S has no U, so nearly half of an RNA becomes [UNK] and its embedding is
further from its own DNA's than another DNA's is. Users with RNA have to write T.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from virnucpro.choices import GapPolicy, SequenceKind, StopPolicy

if TYPE_CHECKING:
    from virnucpro.config import InputRules

BLANKS = b" \t\r\n"
"""Bytes inside a sequence that are removed; CR only at the end of a line."""
GAPS = b"-."
"""Bytes that alignments put in place of a missing residue."""
PROTEIN_LETTERS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"
DNA_LETTERS = b"ACGTRYSWKMBDHVN"


@dataclass(frozen=True, kw_only=True)
class Letters:
    kind: SequenceKind
    accepted: bytes
    """Upper-case letters of a normalised sequence."""
    unknown: bytes
    """The letter for any residue or nucleotide."""
    ambiguous: bytes
    """Letters that stand for several residues or nucleotides, ``unknown`` included."""
    normalise: bytes
    """Translation table: upper case, and in proteins J (leucine or isoleucine) to X."""
    removed: bytes
    faulty: re.Pattern[bytes]
    """Bytes that need a second look: those that break a rule, and stops."""
    stops: StopPolicy | None
    """How internal stops are treated; None where ``*`` is no stop."""
    most_residues: int | None
    """Most residues or nucleotides of a record; None is no limit."""
    chunk_nt: int | None
    """Nucleotides of the chunks that a record is cut into; None where it is not."""

    @property
    def removes_gaps(self) -> bool:
        return GAPS[0] in self.removed

    def count_ambiguous(self, sequence: bytes) -> int:
        return sum(sequence.count(letter) for letter in self.ambiguous if letter in sequence)  # most are in none


@cache
def letters_of(rules: InputRules) -> Letters:
    is_protein = rules.sequence_kind is SequenceKind.PROTEIN
    accepted = PROTEIN_LETTERS if is_protein else DNA_LETTERS
    removed = BLANKS + (GAPS if rules.gaps is GapPolicy.REMOVE else b"")
    both_cases = accepted + accepted.lower()
    return Letters(
        kind=rules.sequence_kind,
        accepted=accepted,
        unknown=b"X" if is_protein else b"N",
        ambiguous=b"XBZ" if is_protein else b"RYSWKMBDHVN",
        normalise=bytes.maketrans(
            accepted.lower() + (b"J" if is_protein else b""),
            (accepted.replace(b"J", b"X") + b"X") if is_protein else accepted,
        ),
        removed=removed,
        faulty=re.compile(rb"[^" + re.escape(both_cases + removed) + rb"]|\r(?!\n)"),
        stops=rules.stops if is_protein else None,
        most_residues=rules.most_residues,
        chunk_nt=rules.chunk_nt,
    )
