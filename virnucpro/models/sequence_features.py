"""
What a contig's letters say by themselves: composition, open runs, and whose k-mers it has.

The numbers of a contig are, in this order:

- frequencies of 3-mers and 4-mers, a k-mer and its reverse complement counted as one (32 and 136);
- codon usage of the longest open run (64); the longest open run of each frame, longest first, in residues and as a
  share of the contig (6 and 6); stops over codons of each frame, fewest first (6); residues of the longest open run,
  and the logarithm of the contig's nucleotides (2);
- of each table of k-mers: the mean log-odds of every group of genomes against all of them, the share of k-mers whose
  log-odds are at least ``MARKED``, and k-mers per nucleotide; of tables of residues the mean log-odds within the
  longest open run, too.

An open run is a stretch of a frame without a stop or a letter that is none of A, C, G and T; residues are read from
runs of ``SHORTEST_RUN`` residues and more. A contig and its reverse complement have the same numbers, but where two
runs share the greatest length. Legend: L nucleotides, R residues, K k-mers, G groups, S numbers of a contig.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from virnucpro.genetic_code import BASES, STANDARD_CODE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    CodeArray = np.ndarray[Any, np.dtype[np.uint8]]
    FloatArray = np.ndarray[Any, np.dtype[np.float32]]
    SlotArray = np.ndarray[Any, np.dtype[np.uint32]]
    TableArray = np.ndarray[Any, np.dtype[np.int8]]

LETTERS = b"ACGT"
OTHER = len(LETTERS)
"""Code of every other letter; the complement of a code c below it is 3 - c."""
SHORTEST_RUN = 25
"""Residues below which an open run is not read: shorter ones are mostly in frames that code nothing."""
UNITS_PER_NAT = 16
"""Log-odds are kept as int8, in sixteenths of a nat."""
MARKED = 24
"""Log-odds, in those units, from which a k-mer is counted as one of the group: 4.5 times as frequent."""

_CODES = bytes(LETTERS.find(letter) % (OTHER + 1) for letter in range(256))
_RESIDUES = b"ACDEFGHIKLMNPQRSTVWY"
_STOP = len(_RESIDUES)
_REDUCED_ALPHABET = ("LVIM", "C", "A", "G", "ST", "P", "FYW", "EDNQ", "KR", "H")
"""Ten classes of residues (Murphy, Wallqvist and Levy 2000)."""
_FRAMES = 6


@dataclass(frozen=True)
class KmerTable:
    """One kind of k-mer, and the slots that its log-odds are kept in."""

    name: str
    """In the file of a contig model."""
    is_protein: bool
    """Of residues, or of nucleotides of either strand."""
    places: tuple[int, ...]
    """Which letters of a window make the k-mer, from 0."""
    letters: int
    """Letters of the alphabet."""
    hash_bits: int = 0
    """Where there are more k-mers than slots: k-mers share 2 to this many slots by their hash."""

    @property
    def span(self) -> int:
        """Letters of a window."""
        return self.places[-1] + 1

    @property
    def slots(self) -> int:
        """Rows of the table."""
        if self.hash_bits:
            return 1 << self.hash_bits
        kmers_of_a_strand: int = self.letters ** len(self.places)
        return kmers_of_a_strand if self.is_protein else kmers_of_a_strand // 2


TABLES = (
    KmerTable("residues_3", is_protein=True, places=(0, 1, 2), letters=20),
    KmerTable("residues_4", is_protein=True, places=(0, 1, 2, 3), letters=20),
    KmerTable("reduced_6", is_protein=True, places=(0, 1, 2, 3, 4, 5), letters=10, hash_bits=19),
    KmerTable("reduced_6_of_8", is_protein=True, places=(0, 1, 3, 5, 6, 7), letters=10, hash_bits=19),
    KmerTable("nucleotides_7", is_protein=False, places=tuple(range(7)), letters=4),
    KmerTable("nucleotides_9", is_protein=False, places=tuple(range(9)), letters=4),
    KmerTable("nucleotides_11", is_protein=False, places=tuple(range(11)), letters=4, hash_bits=19),
)
"""k is odd for nucleotides: the base in the middle then tells a k-mer from its reverse complement."""


def encode(letters: bytes) -> CodeArray:
    """Return the codes of upper-case nucleotides, uint8 (L,): places in ``LETTERS``, or ``OTHER``."""
    return np.frombuffer(letters.translate(_CODES), dtype=np.uint8)


class SequenceFeatures:
    """
    Makes the numbers of a contig.

    Args:
        tables: For each of ``TABLES``, by name, the log-odds of each group: int8 (slots, G), in ``UNITS_PER_NAT``.

    Raises:
        ValueError: A table is missing or of another shape.
    """

    def __init__(self, tables: Mapping[str, TableArray]) -> None:
        self._tables = [tables[table.name] for table in TABLES if table.name in tables]
        groups = {rows.shape[1:] for rows in self._tables}
        if [len(rows) for rows in self._tables] != [table.slots for table in TABLES] or len(groups) != 1:
            shapes = {name: rows.shape for name, rows in tables.items()}
            message = f"tables of log-odds have shapes {shapes}"
            raise ValueError(message)
        self._num_groups = self._tables[0].shape[1]
        self.dim = feature_count(self._num_groups)

    def of(self, codes_L: CodeArray) -> FloatArray:
        """
        Return the numbers of a contig.

        Args:
            codes_L: uint8 (L,): what ``encode`` returns.

        Returns:
            float32 (S,), finite; zeros where there is nothing to count.
        """
        runs = OpenRuns.of(codes_L)
        parts = [composition(codes_L), runs.numbers(len(codes_L))]
        for table, rows, (slots_K, longest) in zip(TABLES, self._tables, kmers(codes_L, runs), strict=True):
            found_KG = rows[slots_K]
            most = max(len(found_KG), 1)
            parts.append(found_KG.sum(axis=0, dtype=np.int64) / (UNITS_PER_NAT * most))
            parts.append((found_KG >= MARKED).sum(axis=0) / most)
            parts.append(np.array([len(found_KG) / max(len(codes_L), 1)]))
            if table.is_protein:
                within_KG = found_KG[longest]
                parts.append(within_KG.sum(axis=0, dtype=np.int64) / (UNITS_PER_NAT * max(len(within_KG), 1)))
        return np.concatenate(parts).astype(np.float32)


@dataclass(frozen=True)
class OpenRuns:
    """The open runs of the six frames of a contig."""

    longest_of_frames: np.ndarray[Any, np.dtype[np.int64]]
    """int64 (6,): residues of the longest run of each frame."""
    stop_shares: np.ndarray[Any, np.dtype[np.float64]]
    """float64 (6,): stops over codons of each frame."""
    codons: np.ndarray[Any, np.dtype[np.uint8]]
    """uint8 (R,): codon, as three digits of base 4, of every residue of the runs that are read."""
    remaining: np.ndarray[Any, np.dtype[np.int64]]
    """int64 (R,): residues of its run from each residue on."""
    longest_codons: np.ndarray[Any, np.dtype[np.uint8]]
    """uint8 (residues,): codons of the longest run, however short."""
    longest: slice
    """Where the longest run is among the residues that are read."""

    @classmethod
    def of(cls, codes_L: CodeArray) -> OpenRuns:
        """Find the runs."""
        frames = _codons_of_frames(codes_L)
        codons = np.concatenate(frames)
        ends = np.cumsum([len(frame) for frame in frames])
        stops = np.flatnonzero(_IS_END[codons])
        lengths = np.diff(stops, prepend=-1) - 1
        starts = stops - lengths
        first_runs = np.searchsorted(stops, ends - 1)
        bounds = [-1, *first_runs.tolist()]
        longest_of_frames = np.array([lengths[a + 1 : b + 1].max(initial=0) for a, b in pairwise(bounds)])
        num_stops = np.array([b - a - 1 for a, b in pairwise(bounds)])
        num_codons = np.maximum([len(frame) - 1 for frame in frames], 1)
        run = int(np.argmax(lengths))
        is_read = lengths >= SHORTEST_RUN
        read_lengths = lengths[is_read]
        within = np.arange(read_lengths.sum()) - np.repeat(np.cumsum(read_lengths) - read_lengths, read_lengths)
        first = int(lengths[:run][is_read[:run]].sum())
        return cls(
            longest_of_frames=longest_of_frames,
            stop_shares=num_stops / num_codons,
            codons=codons[np.repeat(starts[is_read], read_lengths) + within],
            remaining=np.repeat(read_lengths, read_lengths) - within,
            longest_codons=codons[starts[run] : stops[run]],
            longest=slice(first, first + int(lengths[run]) * int(is_read[run])),
        )

    def numbers(self, num_nt: int) -> FloatArray:
        """Return codon usage of the longest run, longest runs, stops, and sizes, float32 (84,)."""
        usage = np.bincount(self.longest_codons, minlength=_CODONS) / max(len(self.longest_codons), 1)
        longest = np.sort(self.longest_of_frames)[::-1]
        sizes = [len(self.longest_codons), np.log(max(num_nt, 1))]
        parts = [usage, longest, 3 * longest / max(num_nt, 1), np.sort(self.stop_shares), np.array(sizes)]
        return np.concatenate(parts).astype(np.float32)


def composition(codes_L: CodeArray) -> FloatArray:
    """Return the frequencies of 3-mers and 4-mers of either strand, float32 (168,)."""
    parts = []
    for k, canonical in _CANONICAL.items():
        counts = np.bincount(_numbers(codes_L, k)[_is_whole(codes_L, k)], minlength=4**k)
        either = np.bincount(canonical, weights=counts)
        parts.append(either / max(either.sum(), 1))
    return np.concatenate(parts).astype(np.float32)


def kmers(codes_L: CodeArray, runs: OpenRuns) -> Iterator[tuple[SlotArray, slice]]:
    """
    Find the k-mers of a contig.

    Args:
        codes_L: uint8 (L,).
        runs: Its open runs.

    Yields:
        For each of ``TABLES`` the slots of its k-mers, uint32 (K,), and which of them are of the longest open run.
    """
    residues_R = _RESIDUE_OF_CODON[runs.codons]
    reduced_R = _CLASS_OF_RESIDUE[residues_R]
    reverse_L = _reverse_complement(codes_L)
    for table in TABLES:
        if table.is_protein:
            letters_R = residues_R if table.letters == len(_RESIDUES) else reduced_R
            windows = max(len(letters_R) - table.span + 1, 0)
            slots = np.zeros(windows, dtype=np.uint32)
            for place in table.places:
                slots *= np.uint32(table.letters)
                slots += letters_R[place : place + windows]
            is_whole = runs.remaining[:windows] >= table.span
            longest = slice(*(int(is_whole[:at].sum()) for at in (runs.longest.start, runs.longest.stop)))
            slots = slots[is_whole]
        else:
            forward, backward = _numbers(codes_L, table.span), _numbers(reverse_L, table.span)[::-1]
            slots = _either_strand(forward, backward, table.span)[_is_whole(codes_L, table.span)]
            longest = slice(0, 0)
        yield _hashed(slots, table.hash_bits) if table.hash_bits else slots, longest


def feature_count(num_groups: int) -> int:
    """Return how many numbers a contig has, S."""
    of_tables = sum((3 if table.is_protein else 2) * num_groups + 1 for table in TABLES)
    return COMPOSITION_COUNT + of_tables


def _codons_of_frames(codes_L: CodeArray) -> list[CodeArray]:
    """Return the codons of each of the six frames, with one that ends a run behind them."""
    end = np.array([_NO_CODON], dtype=np.uint8)
    frames = []
    for strand in (codes_L, _reverse_complement(codes_L)):
        codons = np.where(_is_whole(strand, 3), _numbers(strand, 3), _NO_CODON).astype(np.uint8)
        frames += [np.concatenate([codons[offset::3], end]) for offset in range(3)]
    return frames


def _numbers(codes_L: CodeArray, k: int) -> SlotArray:
    """Return the number of each k-mer, its letters as digits of base 4, uint32 (L - k + 1,)."""
    windows = max(len(codes_L) - k + 1, 0)
    numbers = np.zeros(windows, dtype=np.uint32)
    for place in range(k):
        numbers <<= np.uint32(2)
        numbers |= codes_L[place : place + windows] & np.uint8(3)
    return numbers


def _is_whole(codes_L: CodeArray, k: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Tell which k-mers have no other letter than A, C, G and T, bool (L - k + 1,)."""
    others = np.append(0, np.cumsum(codes_L == OTHER))
    return np.asarray(others[k:] == others[: max(len(others) - k, 0)])


def _either_strand(forward: SlotArray, backward: SlotArray, k: int) -> SlotArray:
    """Return one number, below 4**k / 2, for a k-mer and its reverse complement: that of the one with A or C amid."""
    chosen = np.where((forward >> np.uint32(k)) & np.uint32(1), backward, forward)
    low = chosen & np.uint32((1 << k) - 1)  # the middle base's high bit, bit k, is 0 and goes
    return np.asarray((chosen >> np.uint32(k + 1) << np.uint32(k)) | low)


def _hashed(numbers: SlotArray, bits: int) -> SlotArray:
    """Return the highest bits of the numbers times 2 to the 32 over the golden ratio (Knuth's multiplicative hash)."""
    return np.asarray((numbers * np.uint32(2654435761)) >> np.uint32(32 - bits))


def _reverse_complement(codes_L: CodeArray) -> CodeArray:
    return np.where(codes_L < OTHER, np.uint8(3) - codes_L, np.uint8(OTHER))[::-1]


def _canonical(k: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return for each k-mer's number a number that it shares with its reverse complement, from 0, int64 (4**k,)."""
    digits = np.arange(4**k)[:, None] // 4 ** np.arange(k) % 4
    backward = ((3 - digits) * 4 ** np.arange(k)[::-1]).sum(axis=1)
    return np.unique(np.minimum(np.arange(4**k), backward), return_inverse=True)[1].astype(np.int64)


_CODONS = 64
_NO_CODON = _CODONS
_CANONICAL = {k: _canonical(k) for k in (3, 4)}
COMPOSITION_COUNT = sum(int(canonical.max()) + 1 for canonical in _CANONICAL.values()) + _CODONS + 3 * _FRAMES + 2
"""Numbers that come before those of the tables: composition and open runs."""


def _residue_of_codon() -> CodeArray:
    """Return the residue of each codon in digits of ``LETTERS``, or a stop; of what is no codon, a stop."""
    residues = np.full(_CODONS + 1, _STOP, dtype=np.uint8)
    for number in range(_CODONS):
        letters = [LETTERS[number >> shift & 3] for shift in (4, 2, 0)]
        place = sum(BASES.index(letter) * 4**power for letter, power in zip(letters, (2, 1, 0), strict=True))
        residues[number] = _RESIDUES.find(STANDARD_CODE[place : place + 1]) % (_STOP + 1)
    return residues


_RESIDUE_OF_CODON = _residue_of_codon()
_IS_END = _RESIDUE_OF_CODON == _STOP
_CLASS_OF_RESIDUE = np.array(
    [next(n for n, same in enumerate(_REDUCED_ALPHABET) if chr(residue) in same) for residue in _RESIDUES],
    dtype=np.uint8,
)
