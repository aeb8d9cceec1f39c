"""
A held-out part that is no echo of the training part.

Two proteins are linked when one contains half or more of the other's distinct 5-mers; whole groups of linked proteins
go to one side. So every held-out protein shares fewer than half of its 5-mers with each training protein, whatever
their lengths, and ``largest_overlaps`` proves it on the finished split. The split depends on the residues, the order
of the file and the seed, and on nothing else. Legend: R records, K distinct k-mers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import sparse
from scipy.sparse.csgraph import connected_components

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

KMER_RESIDUES = 5
OVERLAP_LIMIT = 0.5
"""Share of a protein's distinct 5-mers: the held-out part stays below it with every training protein."""
_LETTERS = 26
_ROWS_AT_ONCE = 1000  # bounds the memory of the sparse products


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


def hold_out_groups(
    groups: NDArray[np.int64],
    weights: NDArray[np.int64],
    *,
    eligible: NDArray[np.bool_],
    room: int,
    random: np.random.Generator,
    most: int | None = None,
) -> NDArray[np.bool_]:
    """
    Take whole groups in a random order, each if it still fits.

    Args:
        groups: Group of each record, int64, shape (R,).
        weights: What each record takes of *room*, int64, shape (R,).
        eligible: Whether a record may be held out; a group with one that may not is left, shape (R,).
        room: Most of the summed weights.
        random: Source of the order.
        most: Groups at most; None: as many as fit.

    Returns:
        Whether each record is held out, shape (R,).
    """
    group_weights = np.bincount(groups, weights).astype(np.int64)
    may = np.ones(len(group_weights), dtype=bool)
    may[groups[~eligible]] = False
    chosen = np.zeros(len(group_weights), dtype=bool)
    for group in random.permutation(len(group_weights)):
        if chosen.sum() == most:
            break
        if may[group] and group_weights[group] <= room:
            chosen[group] = True
            room -= int(group_weights[group])
    held_out: NDArray[np.bool_] = chosen[groups]
    return held_out


def linked_groups(sequences: Sequence[str]) -> NDArray[np.int64]:
    """
    Number the groups of linked proteins (connected components, so links of links count).

    Args:
        sequences: Residues of each protein.

    Returns:
        Group of each protein, int64, shape (R,).
    """
    return connected(linked_pairs([_kmer_numbers(residues) for residues in sequences], OVERLAP_LIMIT), len(sequences))


def linked_pairs(kmers_of: Sequence[NDArray[Any]], limit: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """
    Find the pairs of which one has *limit* or more of the other's distinct k-mers.

    Args:
        kmers_of: k-mers of each record, as numbers.
        limit: Share of a record's distinct k-mers.

    Returns:
        First and second record of each pair; a record with a k-mer is linked to itself.
    """
    kmers_RK = kmer_matrix(kmers_of)
    num_kmers_R = np.diff(kmers_RK.indptr)
    kmers_KR = kmers_RK.T.tocsr()
    firsts, seconds = [], []
    for start in range(0, len(kmers_of), _ROWS_AT_ONCE):
        shared = (kmers_RK[start : start + _ROWS_AT_ONCE] @ kmers_KR).tocoo()
        first, second = shared.row + start, shared.col
        linked = shared.data >= limit * np.minimum(num_kmers_R[first], num_kmers_R[second])
        firsts.append(first[linked])
        seconds.append(second[linked])
    return np.concatenate(firsts), np.concatenate(seconds)


def connected(pairs: tuple[NDArray[np.int64], NDArray[np.int64]], num_records: int) -> NDArray[np.int64]:
    """Return the number of each record's connected component under *pairs*, int64, shape (R,)."""
    links = sparse.coo_matrix((np.ones(len(pairs[0]), dtype=np.int8), pairs), shape=(num_records,) * 2)
    _, groups = connected_components(links, directed=False)
    numbers: NDArray[np.int64] = groups.astype(np.int64)
    return numbers


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


def largest_shares(held_out: Sequence[NDArray[Any]], training: Sequence[NDArray[Any]]) -> NDArray[np.float64]:
    """
    Return the largest share of each held-out record's distinct k-mers that is in one training record.

    Args:
        held_out: k-mers of each held-out record.
        training: k-mers of each training record.
    """
    kmers_RK = kmer_matrix([*held_out, *training])
    training_KR = kmers_RK[len(held_out) :].T.tocsr()
    num_kmers = np.maximum(np.diff(kmers_RK.indptr)[: len(held_out)], 1)
    most_shared = [
        (kmers_RK[start : min(start + _ROWS_AT_ONCE, len(held_out))] @ training_KR).max(axis=1).toarray().ravel()
        for start in range(0, len(held_out), _ROWS_AT_ONCE)
    ]
    shares: NDArray[np.float64] = np.concatenate(most_shared) / num_kmers
    return shares


def kmer_matrix(kmers_of: Sequence[NDArray[Any]]) -> sparse.csr_matrix:
    """
    Mark the distinct k-mers of each record.

    Args:
        kmers_of: k-mers of each record, as numbers.

    Returns:
        Sparse int32 matrix of ones, shape (R, K).
    """
    kmers_of = [np.unique(kmers) for kmers in kmers_of]
    row_ends = np.cumsum([0, *(len(kmers) for kmers in kmers_of)])
    known, columns = np.unique(np.concatenate(kmers_of), return_inverse=True)
    ones = np.ones(len(columns), dtype=np.int32)
    return sparse.csr_matrix((ones, columns.ravel(), row_ends), shape=(len(kmers_of), len(known)))


def _kmer_numbers(residues: str) -> NDArray[np.int64]:
    """Return each 5-mer of *residues* as a number in base 26."""
    letters = np.frombuffer(residues.encode("ascii"), dtype=np.uint8).astype(np.int64) - ord("A")
    num_kmers = max(len(letters) - KMER_RESIDUES + 1, 0)
    numbers = np.zeros(num_kmers, dtype=np.int64)
    for shift in range(KMER_RESIDUES):
        numbers = numbers * _LETTERS + letters[shift : shift + num_kmers]
    return numbers
