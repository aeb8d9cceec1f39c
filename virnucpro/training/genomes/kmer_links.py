"""
Links between records that share k-mers, groups of linked records, and which groups are held out.

Depends on the records, their order and the random generator only. Legend: R records, K distinct k-mers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import sparse
from scipy.sparse.csgraph import connected_components

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_ROWS_AT_ONCE = 1000  # bounds the memory of the sparse products


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
    Return which records are held out, bool (R,): whole groups in a random order, each if it still fits.

    *weights* count against *room*. A group with a record that is not *eligible* is skipped. *most* limits the number of
    groups; None: no limit.
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


def linked_pairs(kmers_of: Sequence[NDArray[Any]], limit: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """
    Return the pairs of records of which one has a share of *limit* or more of the other's distinct k-mers.

    A record with a k-mer is paired with itself.
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


def largest_shares(held_out: Sequence[NDArray[Any]], training: Sequence[NDArray[Any]]) -> NDArray[np.float64]:
    """Return the largest share of each held-out record's distinct k-mers that is in one training record."""
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
    """Return a sparse int32 matrix, shape (R, K), with ones for the distinct k-mers of each record."""
    kmers_of = [np.unique(kmers) for kmers in kmers_of]
    row_ends = np.cumsum([0, *(len(kmers) for kmers in kmers_of)])
    known, columns = np.unique(np.concatenate(kmers_of), return_inverse=True)
    ones = np.ones(len(columns), dtype=np.int32)
    return sparse.csr_matrix((ones, columns.ravel(), row_ends), shape=(len(kmers_of), len(known)))
