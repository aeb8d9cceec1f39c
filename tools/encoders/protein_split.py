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

from virnucpro.training.genomes.related import connected, hold_out_groups, largest_shares, linked_pairs

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
    """Return the group of each protein, int64, shape (R,): connected components, so links of links count."""
    return connected(linked_pairs([_kmer_numbers(residues) for residues in sequences], OVERLAP_LIMIT), len(sequences))


def largest_overlaps(held_out: Sequence[str], training: Sequence[str]) -> NDArray[np.float64]:
    """
    Return the largest share of each held-out protein's distinct 5-mers that is in one training protein.

    0 for proteins too short to have a 5-mer.
    """
    return largest_shares(*([_kmer_numbers(residues) for residues in part] for part in (held_out, training)))


def _kmer_numbers(residues: str) -> NDArray[np.int64]:
    """Return each 5-mer as a number in base 26."""
    letters = np.frombuffer(residues.encode("ascii"), dtype=np.uint8).astype(np.int64) - ord("A")
    num_kmers = max(len(letters) - KMER_RESIDUES + 1, 0)
    numbers = np.zeros(num_kmers, dtype=np.int64)
    for shift in range(KMER_RESIDUES):
        numbers = numbers * _LETTERS + letters[shift : shift + num_kmers]
    return numbers
