"""
Pieces of sequence laid end to end, so that one pass reads many of them.

A NumPy call costs more than what it does for a piece of a few hundred nucleotides. What is counted of a piece does not
depend on the others: unknown letters are between them, so that no k-mer or codon is of two. Statistics are, to the bit,
those that NumPy gives of each piece alone. Legend: P pieces, T letters as laid out, F codons of a frame as laid out, X
items of pieces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from virnucpro.models.contigs.nucleotide_codes import NO_CODON, OTHER, is_whole, reverse_complement, words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virnucpro.arrays import BoolArray, DoubleArray, IntArray
    from virnucpro.models.contigs.nucleotide_codes import CodeArray

    AnyArray = np.ndarray[Any, np.dtype[Any]]

FRAMES = 6
_ADDED_IN_PAIRS = 8
"""NumPy adds up fewer numbers than these one after another."""


class Pieces:
    """
    The letters and codons of pieces.

    Unknown letters follow each piece, at least one and up to a multiple of three. So each frame of each piece ends with
    ``NO_CODON``.

    Args:
        codes: Of each piece, uint8 (its nucleotides,), as ``nucleotide_codes.encode`` returns them.
    """

    def __init__(self, codes: Sequence[CodeArray]) -> None:
        self.lengths_P = np.array([len(codes_L) for codes_L in codes], dtype=np.int64)
        """int64 (P,): nucleotides."""
        self.frame_lengths_P = self.lengths_P // 3 + 1
        """int64 (P,): codons of a frame, as laid out."""
        self.frame_starts_P = np.cumsum(self.frame_lengths_P) - self.frame_lengths_P
        """int64 (P,): where the piece begins in each frame; a third of where it begins in each strand."""
        self.strands_2T = np.full((2, 3 * int(self.frame_lengths_P.sum()) + 2), OTHER, dtype=np.uint8)
        """uint8 (2, T): codes of the forward strand and of the reverse one; a piece begins at one place in both."""
        forward, reverse = self.strands_2T
        for start, codes_L in zip((3 * self.frame_starts_P).tolist(), codes, strict=True):
            forward[start : start + len(codes_L)] = codes_L
            reverse[start : start + len(codes_L)] = reverse_complement(codes_L)
        frames = [
            np.where(is_whole(strand, 3), words(strand, 3), NO_CODON).astype(np.uint8).reshape(-1, 3).T
            for strand in self.strands_2T
        ]
        self.codons_6F = np.concatenate(frames)
        """uint8 (6, F): codons of each of the six frames, the reverse strand last."""
        self.piece_F = np.repeat(np.arange(len(codes)), self.frame_lengths_P)
        """int64 (F,): piece of each codon of a frame."""

    def __len__(self) -> int:
        return len(self.lengths_P)

    def whole_words(self, k: int) -> tuple[IntArray, AnyArray]:
        """Return the k-mers of the forward strand without unknown letters: piece, int64, and number, uint32."""
        forward = self.strands_2T[0]
        at = np.flatnonzero(is_whole(forward, k))
        return self.piece_F[at // 3], words(forward, k)[at]

    def run_ends(self, ends_run: BoolArray) -> IntArray:
        """Return where open runs end, int64: ascending places in the six frames, end to end."""
        return np.flatnonzero(ends_run.take(self.codons_6F))


class Groups:
    """
    Which piece each item is of.

    Args:
        piece_X: int64 (X,), ascending.
        number: P.
    """

    def __init__(self, piece_X: IntArray, number: int) -> None:
        self.piece_X = piece_X
        self.counts_P = np.bincount(piece_X, minlength=number)
        """int64 (P,): items."""
        self.firsts_P = np.cumsum(self.counts_P) - self.counts_P
        self.there = np.flatnonzero(self.counts_P)
        """int64: pieces with items."""

    def take(self, is_taken_X: BoolArray) -> Groups:
        return Groups(self.piece_X[is_taken_X], len(self.counts_P))

    def sums(self, values_X: AnyArray) -> DoubleArray:
        """Return the sum of each piece's items, float64 (P,); or (P, columns) of values (X, columns)."""
        if values_X.ndim > 1:
            width = values_X.shape[1]
            keys = (self.piece_X[:, None] * width + np.arange(width)).ravel()
            sums = np.bincount(keys, weights=values_X.ravel(), minlength=len(self.counts_P) * width)
            return np.asarray(sums.reshape(-1, width), dtype=np.float64)
        sums = np.bincount(self.piece_X, weights=values_X, minlength=len(self.counts_P))
        if values_X.dtype.kind == "f":
            for piece in np.flatnonzero(self.counts_P >= _ADDED_IN_PAIRS).tolist():
                first = self.firsts_P[piece]
                sums[piece] = values_X[first : first + self.counts_P[piece]].sum()
        return np.asarray(sums, dtype=np.float64)

    def means(self, values_X: AnyArray) -> DoubleArray:
        """Return the mean of each piece's items, 0 without any, as ``sums``."""
        sums = self.sums(values_X)
        return np.asarray((sums.T / np.maximum(self.counts_P, 1)).T)

    def deviations(self, values_X: AnyArray) -> DoubleArray:
        """Return the standard deviation of each piece's items, 0 without any, as ``sums``."""
        return np.sqrt(self.means((values_X - self.means(values_X)[self.piece_X]) ** 2))

    def medians(self, values_X: IntArray) -> DoubleArray:
        """Return the median of each piece's items, 0 without any, float64 (P,)."""
        medians = np.zeros(len(self.counts_P))
        ordered = values_X[np.lexsort((values_X, self.piece_X))]
        firsts, counts = self.firsts_P[self.there], self.counts_P[self.there]
        medians[self.there] = (ordered[firsts + (counts - 1) // 2] + ordered[firsts + counts // 2]) / 2
        return medians

    def reduced(self, by: np.ufunc, values_X: AnyArray) -> AnyArray:
        """Reduce each piece's items by a ufunc; 0 without any, (P,) or (P, columns)."""
        reduced = np.zeros((len(self.counts_P), *values_X.shape[1:]), dtype=values_X.dtype)
        if len(self.there):
            reduced[self.there] = by.reduceat(values_X, self.firsts_P[self.there], axis=0)
        return reduced

    def first_greatest(self, values_X: IntArray) -> IntArray:
        """Return the first place of each piece's greatest item in X, int64 (P,); the number of items without any."""
        greatest_X = np.repeat(self.reduced(np.maximum, values_X), self.counts_P)
        places = np.where(values_X == greatest_X, np.arange(len(values_X)), len(values_X))
        firsts = np.full(len(self.counts_P), len(values_X))
        if len(self.there):
            firsts[self.there] = np.minimum.reduceat(places, self.firsts_P[self.there])
        return firsts

    def bins(self, values_X: AnyArray, number: int) -> IntArray:
        """Return how often each piece has each value below *number*, int64 (P, number)."""
        keys = self.piece_X * number + values_X
        return np.bincount(keys, minlength=len(self.counts_P) * number).reshape(-1, number)


def ranges(starts_X: AnyArray, lengths_X: AnyArray) -> IntArray:
    """Return, end to end, the numbers from each start on, as many as its length."""
    ends = np.cumsum(lengths_X)
    numbers = np.repeat(starts_X - ends + lengths_X, lengths_X)
    numbers += np.arange(len(numbers))
    return numbers
