"""
Long sequences as windows: where they begin, and how many there are.

A sequence of at most ``max_residues`` letters is one window. A longer one has windows of exactly ``max_residues``
letters, each beginning half a window (rounded down, at least one letter) after the one before; the last one ends where
the sequence ends, and so may overlap more. Every letter is in a window, and all windows of a sequence have the same
number of letters. Its row is the unweighted mean of its windows' rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from virnucpro.arrays import IntArray


def count_windows(lengths: IntArray, max_residues: int) -> IntArray:
    """Return the windows of sequences of *lengths* letters, int64."""
    step = _step(max_residues)
    beyond = np.maximum(np.asarray(lengths, dtype=np.int64) - max_residues, 0)
    windows: IntArray = 1 + -(-beyond // step)
    return windows


def windows_of(sequence: str, max_residues: int) -> list[str]:
    step = _step(max_residues)
    last = max(0, len(sequence) - max_residues)
    return [sequence[start : start + max_residues] for start in (*range(0, last, step), last)]


def _step(max_residues: int) -> int:
    return max(1, max_residues // 2)
