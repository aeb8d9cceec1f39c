"""
A held-out part of proteins that shares fewer than half of its distinct 5-mers with any training protein.

Two proteins are linked when one contains half or more of the other's distinct 5-mers, whatever their lengths; whole
groups of linked proteins go to one side, and ``largest_overlaps`` measures the finished split. The split depends on
the residues, the order of the file and the seed only. Legend: R records.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from virnucpro.training.split import connected, hold_out_groups, largest_shares, linked_pairs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

KMER_RESIDUES = 5
OVERLAP_LIMIT = 0.5
"""Share of a protein's distinct 5-mers: the held-out part stays below it with every training protein."""
_LETTERS = 26


@dataclass(frozen=True)
class Split:
    """Which records train and which are held out, as increasing positions in the file."""

    training: NDArray[np.int64]
    held_out: NDArray[np.int64]
    num_groups: int
    """Groups of linked proteins in the whole file."""


def split_by_overlap(sequences: Sequence[str], *, seed: int, held_out_share: float = 0.1) -> Split:
    """
    Hold out about *held_out_share* of *sequences*, by whole groups of linked proteins.

    Groups are taken in a random order, each if it still fits: the held-out part is never larger than the share.
    Proteins too short to have a 5-mer always train.

    Args:
        sequences: Residues of each protein, upper-case letters.
        seed: Seed of the random order.
        held_out_share: Share of the sequences.

    Returns:
        The split.
    """
    groups = linked_groups(sequences)
    has_kmer = np.array([len(residues) >= KMER_RESIDUES for residues in sequences])
    is_held_out = hold_out_groups(
        groups,
        np.ones(len(sequences), dtype=np.int64),
        eligible=has_kmer,
        room=int(held_out_share * len(sequences)),
        random=np.random.default_rng(seed),
    )
    return Split(np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out), int(groups.max()) + 1)


def linked_groups(sequences: Sequence[str]) -> NDArray[np.int64]:
    """
    Number the groups of linked proteins (connected components, so links of links count).

    Args:
        sequences: Residues of each protein.

    Returns:
        Group of each protein, int64, shape (R,).
    """
    return connected(linked_pairs([_kmer_numbers(residues) for residues in sequences], OVERLAP_LIMIT), len(sequences))


def largest_overlaps(held_out: Sequence[str], training: Sequence[str]) -> NDArray[np.float64]:
    """
    Measure how much of each held-out protein any single training protein contains.

    Args:
        held_out: Residues of the held-out proteins.
        training: Residues of the training proteins.

    Returns:
        For each held-out protein, the largest share of its distinct 5-mers found in one training protein; 0 for
        proteins too short to have a 5-mer. Shape (len(held_out),).
    """
    return largest_shares(*([_kmer_numbers(residues) for residues in part] for part in (held_out, training)))


def _kmer_numbers(residues: str) -> NDArray[np.int64]:
    """Return each 5-mer of *residues* as a number in base 26."""
    letters = np.frombuffer(residues.encode("ascii"), dtype=np.uint8).astype(np.int64) - ord("A")
    num_kmers = max(len(letters) - KMER_RESIDUES + 1, 0)
    numbers = np.zeros(num_kmers, dtype=np.int64)
    for shift in range(KMER_RESIDUES):
        numbers = numbers * _LETTERS + letters[shift : shift + num_kmers]
    return numbers
