"""
Which letters a sequence may hold, and what they are turned into, by what is embedded and by the rules of the input.

Letters of proteins are those that ESM-2's alphabet knows, and J, which it does not and which is read as X. Letters of
DNA are IUPAC's; U is none: the published tokenizer of DNABERT-S knows no U, and reads RNA as [UNK] nearly half (an
RNA's row is further from its own DNA's than another DNA's is), so whoever has RNA is told to write T.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from virnucpro.config import SequenceKind
from virnucpro.settings import GapPolicy, StopPolicy

if TYPE_CHECKING:
    from virnucpro.config import InputRules

BLANKS = b" \t\r\n"
"""Bytes that may stand inside a sequence and are removed. CR counts only at the end of a line."""
GAPS = b"-."
"""Bytes that alignments put where a residue is missing."""
PROTEIN_LETTERS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""Letters of residues: ESM-2 knows them all but J."""
DNA_LETTERS = b"ACGTRYSWKMBDHVN"
"""IUPAC's letters of DNA."""


@dataclass(frozen=True, kw_only=True)
class Letters:
    """How the bytes of a sequence are read."""

    kind: SequenceKind
    """What is embedded."""
    accepted: bytes
    """Upper-case letters that a normalised sequence may hold."""
    unknown: bytes
    """The letter that says nothing."""
    ambiguous: bytes
    """Letters that stand for several residues or nucleotides, ``unknown`` included."""
    normalise: bytes
    """Translation: upper case, and of proteins J (leucine or isoleucine) to X."""
    removed: bytes
    """Bytes that are taken out."""
    faulty: re.Pattern[bytes]
    """Bytes that need a second look: those that break a rule, and stops."""
    stops: StopPolicy | None
    """What happens to stops inside; None where ``*`` is no stop."""
    most_residues: int | None
    """Residues or nucleotides of a record at the most; None is no limit."""
    chunk_nt: int | None
    """Nucleotides of the chunks that a record is cut into; None where it is not cut."""

    @property
    def removes_gaps(self) -> bool:
        """Whether gaps are taken out."""
        return GAPS[0] in self.removed

    def count_ambiguous(self, sequence: bytes) -> int:
        """Return how many letters of a normalised *sequence* stand for several residues or nucleotides."""
        return sum(sequence.count(letter) for letter in self.ambiguous if letter in sequence)  # most are in none


@cache
def letters_of(rules: InputRules) -> Letters:
    """Return how sequences are read under *rules*."""
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
