"""
Local alignment with gaps of many pairs of stretches of proteins at once, near one diagonal of each.

Smith and Waterman's recursion with affine gaps (Gotoh 1982), a row of all pairs at a time; scores are those of BLOSUM62
(Henikoff and Henikoff 1992). Legend: A pairs, W width of the band.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from virnucpro.models.contigs.nucleotide_codes import RESIDUES

if TYPE_CHECKING:
    from virnucpro.arrays import DoubleArray, IntArray
    from virnucpro.models.contigs.nucleotide_codes import CodeArray

    Int32Array = np.ndarray[Any, np.dtype[np.int32]]
    ScoreArray = np.ndarray[Any, np.dtype[np.int16]]
    AnyArray = np.ndarray[Any, np.dtype[Any]]

GAP_OPEN, GAP_EXTEND = 11, 1
"""Cost of the first residue of a gap, and of each further one: near BLAST's defaults for BLOSUM62."""
REACH = 80
"""Residues before and after the common place that are aligned."""
BAND = 12
"""Diagonals on each side of the one through the common place."""
SEPARATOR = len(RESIDUES)
"""Code of what is no residue; no alignment goes through it."""
SPACE = 10
"""Separators between two proteins."""
_PAIRS_AT_ONCE = 1 << 12
_STEPS = tuple(1 << n for n in range((2 * BAND).bit_length()))
"""Doubled: together they reach from the first diagonal to the last."""

_BLOSUM62 = """
4 0 -2 -1 -2 0 -2 -1 -1 -1 -1 -2 -1 -1 -1 1 0 0 -3 -2
9 -3 -4 -2 -3 -3 -1 -3 -1 -1 -3 -3 -3 -3 -1 -1 -1 -2 -2
6 2 -3 -1 -1 -3 -1 -4 -3 1 -1 0 -2 0 -1 -3 -4 -3
5 -3 -2 0 -3 1 -3 -2 0 -1 2 0 0 -1 -2 -3 -2
6 -3 -1 0 -3 0 0 -3 -4 -3 -3 -2 -2 -1 1 3
6 -2 -4 -2 -4 -3 0 -2 -2 -2 0 -2 -3 -2 -3
8 -3 -1 -3 -2 1 -2 0 0 -1 -2 -3 -2 2
4 -3 2 1 -3 -3 -3 -3 -2 -1 3 -3 -1
5 -2 -1 0 -1 1 2 0 -1 -2 -3 -2
4 2 -3 -3 -2 -2 -2 -1 1 -2 -1
5 -2 -2 0 -1 -1 -1 1 -1 -1
6 -2 0 0 1 0 -3 -4 -2
7 -1 -2 -1 -1 -2 -4 -3
5 1 0 -1 -2 -2 -1
5 -1 -1 -3 -3 -2
4 1 -2 -3 -2
5 0 -2 -2
4 -3 -1
11 2
7
"""
"""The upper triangle, in the order of ``RESIDUES``."""


def _substitutions() -> ScoreArray:
    scores = np.full((SEPARATOR + 1, SEPARATOR + 1), -100, dtype=np.int16)
    for row, line in enumerate(_BLOSUM62.split("\n")[1:-1]):
        scores[row, row:SEPARATOR] = scores[row:SEPARATOR, row] = [int(score) for score in line.split()]
    return scores.ravel()


SUBSTITUTIONS = _substitutions()
"""int16: the score of residues a and b is at ``(SEPARATOR + 1) * a + b``."""
_FIELD_BITS = 10
_FIELD = 1 << _FIELD_BITS
_SCORE = 1 << 2 * _FIELD_BITS
_COUNTED = _SCORE * SUBSTITUTIONS.astype(np.int64) - 1
"""The same with two more numbers in the low bits: residues that are the same, and columns, which count down."""
_COUNTED[[(SEPARATOR + 1) * residue + residue for residue in range(SEPARATOR)]] += _FIELD


@dataclass(frozen=True)
class LaidOut:
    """Proteins end to end, with ``SPACE`` separators between them and ``REACH + BAND`` around all."""

    residues_T: CodeArray
    """uint8 (T,): places in ``RESIDUES``, or ``SEPARATOR``."""
    owner_T: Int32Array
    """int32 (T,): the protein of a residue, or before a separator."""

    @classmethod
    def of(cls, residues_R: CodeArray, lengths_N: IntArray | Int32Array) -> LaidOut:
        """Lay out end-to-end proteins of these lengths."""
        number, margin = len(lengths_N), REACH + BAND
        ends_N = np.cumsum(lengths_N + SPACE, dtype=np.int64)
        is_residue = np.ones(len(residues_R) + SPACE * number, dtype=np.bool_)
        is_residue[ends_N[:, None] - np.arange(1, SPACE + 1)] = False
        residues = np.full(len(is_residue) + 2 * margin, SEPARATOR, dtype=np.uint8)
        residues[margin : margin + len(is_residue)][is_residue] = residues_R
        owner = np.zeros(len(residues), dtype=np.int32)
        owner[margin : margin + len(is_residue)] = np.repeat(np.arange(number, dtype=np.int32), lengths_N + SPACE)
        return cls(residues, owner)

    def around(self, place_A: IntArray, reach: int) -> IntArray:
        """Return the *reach* residues before and after each place, int64 (2 * reach, A)."""
        place_RA = place_A + np.arange(-reach, reach)[:, None]
        is_own_RA = self.owner_T[place_RA] == self.owner_T[place_A]
        return np.where(is_own_RA, self.residues_T[place_RA], SEPARATOR).astype(np.int64)


def align(first: LaidOut, second: LaidOut, place_A: IntArray, other_A: IntArray) -> IntArray:
    """Return the best score of a local alignment near each pair of places in two proteins, int64 (A,)."""
    return _best(first, second, place_A, other_A, SUBSTITUTIONS, 1, 0)


def identities(first: LaidOut, second: LaidOut, place_A: IntArray, other_A: IntArray) -> DoubleArray:
    """Return the share of columns with the same residue in each pair's best alignment, float64 (A,); slower."""
    best_A = _best(first, second, place_A, other_A, _COUNTED, _SCORE, 1)
    columns_A = -best_A % _FIELD
    return np.asarray(((best_A + columns_A) // _FIELD % _FIELD) / np.maximum(columns_A, 1))


def _best(
    first: LaidOut,
    second: LaidOut,
    place_A: IntArray,
    other_A: IntArray,
    substitutions: AnyArray,
    unit: int,
    per_column: int,
) -> IntArray:
    opens, extends = (cost * unit + per_column for cost in (GAP_OPEN, GAP_EXTEND))
    parts = [slice(at, at + _PAIRS_AT_ONCE) for at in range(0, len(place_A), _PAIRS_AT_ONCE)]
    found = [
        _align(
            first.around(place_A[at], REACH), second.around(other_A[at], REACH + BAND), substitutions, opens, extends
        )
        for at in parts
    ]
    return np.concatenate([np.zeros(0, dtype=np.int64), *found])


def _align(rows_RA: IntArray, columns_CA: IntArray, substitutions: AnyArray, opens: int, extends: int) -> IntArray:
    width, kind = 2 * BAND + 1, substitutions.dtype
    along_W1 = (extends * np.arange(width, dtype=kind))[:, None]
    scores_WA = np.zeros((width + 1, rows_RA.shape[1]), dtype=kind)  # a diagonal more, which stays 0
    gaps_WA = np.zeros_like(scores_WA)
    best_A = np.zeros(rows_RA.shape[1], dtype=kind)
    for row, codes_A in enumerate((SEPARATOR + 1) * rows_RA):
        np.maximum(scores_WA[1:] - opens, gaps_WA[1:] - extends, out=gaps_WA[:-1])
        scores_WA[:-1] += substitutions.take(columns_CA[row : row + width] + codes_A)
        np.maximum(scores_WA[:-1], gaps_WA[:-1], out=scores_WA[:-1])
        np.maximum(scores_WA, 0, out=scores_WA)
        reached_WA = scores_WA[:-1] + along_W1
        for step in _STEPS:  # up to each diagonal the greatest: faster than ``np.maximum.accumulate``
            np.maximum(reached_WA[step:], reached_WA[:-step].copy(), out=reached_WA[step:])
        np.maximum(scores_WA[1:-1], reached_WA[:-1] - along_W1[:-1] - opens, out=scores_WA[1:-1])
        scores_WA[-1] = 0
        np.maximum(best_A, scores_WA.max(axis=0), out=best_A)
    return best_A.astype(np.int64)
