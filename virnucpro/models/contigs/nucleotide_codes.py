"""Letters of a contig as small numbers, and its k-mers, codons and residues. Legend: L nucleotides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from pydustmasker import LongdustMasker

from virnucpro.genetic_code import BASES, STANDARD_CODE

if TYPE_CHECKING:
    from virnucpro.arrays import BoolArray

    CodeArray = np.ndarray[Any, np.dtype[np.uint8]]
    WordArray = np.ndarray[Any, np.dtype[np.uint32]]

LETTERS = b"ACGT"
OTHER = len(LETTERS)
"""Code of every other letter; the complement of a code c below it is 3 - c."""
CODONS = 64
NO_CODON = CODONS
"""Stands for three letters with one other than A, C, G and T, and follows the last codon of a frame."""
RESIDUES = b"ACDEFGHIKLMNPQRSTVWY"

_LONGDUST_K = 7
"""Shortest that it takes, less one."""
_CODES = bytes(LETTERS.find(letter) % (OTHER + 1) for letter in range(256))
_PLACES = [BASES.index(letter) for letter in LETTERS]
_RESIDUE_PLACES = np.array([RESIDUES.find(residue) % (len(RESIDUES) + 1) for residue in STANDARD_CODE], dtype=np.uint8)


@dataclass(frozen=True)
class GeneticCode:
    """One of NCBI's genetic codes (https://www.ncbi.nlm.nih.gov/Taxonomy/Utils/wprintgc.cgi)."""

    number: int
    residue_of_codon: CodeArray
    """Place in ``RESIDUES`` of each codon's residue, uint8 (CODONS + 1,); their number for a stop or no codon."""

    @property
    def ends_run(self) -> BoolArray:
        """Which codons end an open run: stops, and no codon, bool (CODONS + 1,)."""
        return np.asarray(self.residue_of_codon == len(RESIDUES))

    def read_through(self, number: int, stop: bytes, residue: bytes) -> GeneticCode:
        """Return the code *number*, in which this code's *stop* is a residue."""
        changed = self.residue_of_codon.copy()
        changed[word(stop)] = RESIDUES.index(residue)
        return GeneticCode(number, changed)


def encode(letters: bytes) -> CodeArray:
    """Return the codes of upper-case nucleotides, uint8 (L,): places in ``LETTERS``, or ``OTHER``."""
    return np.frombuffer(letters.translate(_CODES), dtype=np.uint8)


def reverse_complement(codes_L: CodeArray) -> CodeArray:
    return np.where(codes_L < OTHER, np.uint8(3) - codes_L, np.uint8(OTHER))[::-1]


def canonical_strand(codes_L: CodeArray) -> CodeArray:
    """Return the same for both strands: the one that comes first by its codes."""
    other_L = reverse_complement(codes_L)
    at = np.flatnonzero(codes_L != other_L)[:1]
    return other_L if len(at) and other_L[at[0]] < codes_L[at[0]] else codes_L


def masked(letters: bytes) -> CodeArray:
    """Return codes of upper-case nucleotides, uint8 (L,), ``OTHER`` in low complexity by Longdust (Li and Li 2025)."""
    codes_L = encode(letters)
    if len(letters) > _LONGDUST_K:
        intervals = LongdustMasker(letters.decode("ascii")).intervals
        if intervals:
            codes_L = codes_L.copy()
            for start, end in intervals:
                codes_L[start:end] = OTHER
    return codes_L


def words(codes_L: CodeArray, k: int) -> WordArray:
    """Return the number of each k-mer, its letters as digits of base 4, uint32 (L - k + 1,)."""
    if k == 1:
        return (codes_L & np.uint8(3)).astype(np.uint32)
    half = (k + 1) // 2
    of_half = words(codes_L, half)  # two of them overlap by a letter where k is odd, and agree there
    numbers = of_half[: max(len(codes_L) - k + 1, 0)] << np.uint32(2 * (k - half))
    numbers |= of_half[k - half :][: len(numbers)]
    return numbers


def word(letters: bytes) -> int:
    """Return the number of one k-mer, as in ``words``."""
    return int(words(encode(letters), len(letters))[0])


def is_whole(codes_L: CodeArray, k: int) -> BoolArray:
    """Return which k-mers have no letter other than A, C, G and T, bool (L - k + 1,)."""
    is_known_L = codes_L != OTHER
    is_whole_L = is_known_L[: max(len(codes_L) - k + 1, 0)]
    for place in range(1, k):
        is_whole_L = is_whole_L & is_known_L[place : place + len(is_whole_L)]
    return np.asarray(is_whole_L)


BACTERIAL = GeneticCode(
    11, np.append(_RESIDUE_PLACES.reshape(4, 4, 4)[np.ix_(_PLACES, _PLACES, _PLACES)], np.uint8(len(RESIDUES)))
)
"""Of bacteria, archaea and most of their viruses; residues and stops as in the standard code."""
RECODED = (BACTERIAL.read_through(4, b"TGA", b"W"), BACTERIAL.read_through(15, b"TAG", b"Q"))
"""Codes of mycoplasmas and mitochondria, and of some phages of the gut (Ivanova et al. 2014)."""
