"""
Fragments of sequence laid end to end, so that one pass reads many of them.

A NumPy call costs more than what it does for a fragment of a few hundred nucleotides. What is counted of one does not
depend on the others: unknown letters are between them, so that no k-mer or codon is of two. Statistics are, to the
bit, those that NumPy gives of each fragment alone. Legend: P fragments, T letters as laid out, F codons of a frame as
laid out, X items of fragments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from virnucpro.models.contigs.nucleotide_codes import LETTERS, NO_CODON, OTHER, is_whole, reverse_complement, words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virnucpro.arrays import BoolArray, DoubleArray, IntArray
    from virnucpro.models.contigs.nucleotide_codes import CodeArray

    AnyArray = np.ndarray[Any, np.dtype[Any]]

FRAMES = 6
_ADDED_IN_PAIRS = 8
"""NumPy adds up fewer numbers than these one after another."""


class Fragments:
    """
    The letters and codons of fragments, given as *codes* of ``nucleotide_codes.encode``.

    Unknown letters follow each fragment, at least one and up to a multiple of three. So each of its frames ends with
    ``NO_CODON``. A single unknown letter in a fragment breaks no frame: it is read as C, which no stop codon has, on
    either strand; no k-mer of nucleotides includes it.
    """

    def __init__(self, codes: Sequence[CodeArray]) -> None:
        self.lengths_P = np.array([len(codes_L) for codes_L in codes], dtype=np.int64)
        """int64 (P,): nucleotides."""
        self.frame_lengths_P = self.lengths_P // 3 + 1
        """int64 (P,): codons of a frame, as laid out."""
        self.frame_starts_P = np.cumsum(self.frame_lengths_P) - self.frame_lengths_P
        """int64 (P,): where the fragment begins in each frame; a third of where it begins in each strand."""
        self.strands_2T = np.full((2, 3 * int(self.frame_lengths_P.sum()) + 2), OTHER, dtype=np.uint8)
        """uint8 (2, T): codes of the forward strand and of the reverse one; a fragment begins at one place in both."""
        forward, reverse = self.strands_2T
        bridged_2T = np.full_like(self.strands_2T, OTHER)
        for start, codes_L in zip((3 * self.frame_starts_P).tolist(), codes, strict=True):
            at = slice(start, start + len(codes_L))
            forward[at], reverse[at] = codes_L, reverse_complement(codes_L)
            bridged_2T[0, at], bridged_2T[1, at] = _bridged(forward[at]), _bridged(reverse[at])
        frames = [
            np.where(is_whole(strand, 3), words(strand, 3), NO_CODON).astype(np.uint8).reshape(-1, 3).T
            for strand in bridged_2T
        ]
        self.codons_6F = np.concatenate(frames)
        """uint8 (6, F): codons of each of the six frames, the reverse strand last."""
        self.fragment_F = np.repeat(np.arange(len(codes)), self.frame_lengths_P)
        """int64 (F,): fragment of each codon of a frame."""

    def __len__(self) -> int:
        return len(self.lengths_P)

    def whole_words(self, k: int) -> tuple[IntArray, AnyArray]:
        """Return the k-mers of the forward strand without unknown letters: fragment, int64, and number, uint32."""
        forward = self.strands_2T[0]
        at = np.flatnonzero(is_whole(forward, k))
        return self.fragment_F[at // 3], words(forward, k)[at]

    def run_ends(self, ends_run: BoolArray) -> IntArray:
        """Return where open runs end, int64: ascending places in the six frames, end to end."""
        return np.flatnonzero(ends_run.take(self.codons_6F))


def _bridged(codes_L: CodeArray) -> CodeArray:
    """Return a strand with C for each unknown letter between two known ones."""
    is_known_L = codes_L != OTHER
    lone = np.flatnonzero(~is_known_L[1:-1] & is_known_L[:-2] & is_known_L[2:]) + 1
    if not len(lone):
        return codes_L
    bridged_L = codes_L.copy()
    bridged_L[lone] = LETTERS.index(b"C")
    return bridged_L


class Groups:
    """The fragment of each item, *fragment_X*: int64 (X,), ascending; *number* is P."""

    def __init__(self, fragment_X: IntArray, number: int) -> None:
        self.fragment_X = fragment_X
        self.counts_P = np.bincount(fragment_X, minlength=number)
        """int64 (P,): items."""
        self.firsts_P = np.cumsum(self.counts_P) - self.counts_P
        self.there = np.flatnonzero(self.counts_P)
        """int64: fragments with items."""

    def take(self, is_taken_X: BoolArray) -> Groups:
        return Groups(self.fragment_X[is_taken_X], len(self.counts_P))

    def sums(self, values_X: AnyArray) -> DoubleArray:
        """Return the sum of each fragment's items, float64 (P,); or (P, columns) of values (X, columns)."""
        if values_X.ndim > 1:
            width = values_X.shape[1]
            keys = (self.fragment_X[:, None] * width + np.arange(width)).ravel()
            sums = np.bincount(keys, weights=values_X.ravel(), minlength=len(self.counts_P) * width)
            return np.asarray(sums.reshape(-1, width), dtype=np.float64)
        sums = np.bincount(self.fragment_X, weights=values_X, minlength=len(self.counts_P))
        if values_X.dtype.kind == "f":
            for fragment in np.flatnonzero(self.counts_P >= _ADDED_IN_PAIRS).tolist():
                first = self.firsts_P[fragment]
                sums[fragment] = values_X[first : first + self.counts_P[fragment]].sum()
        return np.asarray(sums, dtype=np.float64)

    def means(self, values_X: AnyArray) -> DoubleArray:
        sums = self.sums(values_X)
        return np.asarray((sums.T / np.maximum(self.counts_P, 1)).T)

    def deviations(self, values_X: AnyArray) -> DoubleArray:
        return np.sqrt(self.means((values_X - self.means(values_X)[self.fragment_X]) ** 2))

    def medians(self, values_X: IntArray) -> DoubleArray:
        """Return the median of each fragment's items, 0 without any, float64 (P,)."""
        medians = np.zeros(len(self.counts_P))
        ordered = values_X[np.lexsort((values_X, self.fragment_X))]
        firsts, counts = self.firsts_P[self.there], self.counts_P[self.there]
        medians[self.there] = (ordered[firsts + (counts - 1) // 2] + ordered[firsts + counts // 2]) / 2
        return medians

    def reduced(self, by: np.ufunc, values_X: AnyArray) -> AnyArray:
        """Reduce each fragment's items by a ufunc; 0 without any, (P,) or (P, columns)."""
        reduced = np.zeros((len(self.counts_P), *values_X.shape[1:]), dtype=values_X.dtype)
        if len(self.there):
            reduced[self.there] = by.reduceat(values_X, self.firsts_P[self.there], axis=0)
        return reduced

    def first_greatest(self, values_X: IntArray) -> IntArray:
        """Return the first place of each fragment's greatest item in X, int64 (P,); the number of items without any."""
        greatest_X = np.repeat(self.reduced(np.maximum, values_X), self.counts_P)
        places = np.where(values_X == greatest_X, np.arange(len(values_X)), len(values_X))
        firsts = np.full(len(self.counts_P), len(values_X))
        if len(self.there):
            firsts[self.there] = np.minimum.reduceat(places, self.firsts_P[self.there])
        return firsts

    def bins(self, values_X: AnyArray, number: int) -> IntArray:
        """Return how often each fragment has each value below *number*, int64 (P, number)."""
        keys = self.fragment_X * number + values_X
        return np.bincount(keys, minlength=len(self.counts_P) * number).reshape(-1, number)


def ranges(starts_X: AnyArray, lengths_X: AnyArray) -> IntArray:
    """Return, end to end, the numbers from each start on, as many as its length."""
    ends = np.cumsum(lengths_X)
    numbers = np.repeat(starts_X - ends + lengths_X, lengths_X)
    numbers += np.arange(len(numbers))
    return numbers
