"""
Which genomes are related.

Two records are linked when they are of the same genome (the assembly, or the accession without its range) or the same
organism (by the header), or when one has a tenth or more of the other's 21-mers, which two strains of about 90 %
identity have (0.9 to the 21st is 0.11). k-mers are of either strand, and one in twenty is used, chosen by its hash
(FracMinHash, Irber et al. 2022). Legend: R records, K distinct k-mers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import sparse
from scipy.sparse.csgraph import connected_components

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


KMER_NT = 21
KMER_LIMIT = 0.1
"""Share of a record's 21-mers from which on two records are linked."""
SKETCH_ONE_IN = 20
_ROWS_AT_ONCE = 1000  # bounds the memory of the sparse products
_COMPLEMENT = str.maketrans("ACGTRYSWKMBDHVN", "TGCAYRSWMKVHDBN")


def cluster(kmers_of: Sequence[NDArray[np.uint64]], *names_of: Sequence[str]) -> NDArray[np.int64]:
    """
    Return the cluster of each record, int64, shape (R,); links of links count.

    *kmers_of*: ``sketch`` of each record. *names_of*: lists of genomes, organisms and the like; records with the same
    name are linked, an empty name links nothing.
    """
    first, second = linked_pairs(kmers_of, KMER_LIMIT)
    pairs = [np.stack([first, second])]
    for names in names_of:
        numbers: dict[str, int] = {}
        links = [(at, numbers.setdefault(name, at)) for at, name in enumerate(names) if name]
        pairs.append(np.array(links, dtype=np.int64).reshape(-1, 2).T)
    first, second = np.concatenate(pairs, axis=1)
    return connected((first, second), len(kmers_of))


def reverse_complement(letters: str) -> str:
    """Return the other strand of *letters* (upper-case IUPAC)."""
    return letters.translate(_COMPLEMENT)[::-1]


def sketch(letters: str) -> NDArray[np.uint64]:
    """Return the hashes of one in twenty of the distinct 21-mers of either strand, of A, C, G and T only."""
    code_of = np.full(256, 4, dtype=np.uint64)
    code_of[np.frombuffer(b"ACGT", dtype=np.uint8)] = np.arange(4)
    codes = code_of[np.frombuffer(letters.encode("ascii"), dtype=np.uint8)]
    num_kmers = max(len(codes) - KMER_NT + 1, 0)
    forward, backward = np.zeros(num_kmers, dtype=np.uint64), np.zeros(num_kmers, dtype=np.uint64)
    whole = np.ones(num_kmers, dtype=bool)
    for shift in range(KMER_NT):
        part = codes[shift : shift + num_kmers]
        whole &= part < 4
        forward = (forward << np.uint64(2)) | (part & np.uint64(3))
        backward |= (np.uint64(3) - (part & np.uint64(3))) << np.uint64(2 * shift)
    hashes = _mixed(np.minimum(forward, backward)[whole])
    return np.unique(hashes[hashes % np.uint64(SKETCH_ONE_IN) == 0])


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return splitmix64's finaliser of each number (Steele et al. 2014)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(factor)
    return numbers ^ (numbers >> np.uint64(31))


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
