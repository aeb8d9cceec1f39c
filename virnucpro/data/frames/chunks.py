"""
Where the chunks of a contig are.

A contig of L nucleotides is cut into the fewest chunks of at most C nucleotides that cover it; neighbours overlap a
little, so that all but perhaps the last one have exactly C.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from virnucpro.arrays import IntArray


def chunks_per_contig(lengths_nt: IntArray, chunk_nt: int, min_nt: int = 0) -> IntArray:
    """Return the number of chunks of each contig, int64; a contig of less than *min_nt* nucleotides has none."""
    lengths = np.asarray(lengths_nt, dtype=np.int64)
    return np.where(lengths >= min_nt, -(-lengths // chunk_nt), 0)


def chunk_bounds(lengths_nt: int | IntArray, chunk_nt: int) -> tuple[IntArray, IntArray]:
    """
    Return starts and ends of all chunks, contig by contig, int64 (chunks,): 0-based in their contig, half open.

    Args:
        lengths_nt: Nucleotides of one contig, or int64 (contigs,).
        chunk_nt: Nucleotides of a chunk.
    """
    lengths = np.atleast_1d(np.asarray(lengths_nt, dtype=np.int64))
    counts = chunks_per_contig(lengths, chunk_nt)
    numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return bounds_of_chunks(np.repeat(lengths, counts), numbers, chunk_nt)


def bounds_of_chunks(lengths_nt: IntArray, numbers: IntArray, chunk_nt: int) -> tuple[IntArray, IntArray]:
    """
    Return starts and ends of single chunks, int64 (chunks,): 0-based in their contig, half open.

    With n chunks, R = n·C - L nucleotides too many and q, r = divmod(R, n), the first q + r chunks after the first one
    begin q + 1 nucleotides before the end of the one before, the others q.

    Args:
        lengths_nt: int64 (chunks,): nucleotides of the contig of each chunk, at least 1.
        numbers: int64 (chunks,): number of each chunk in its contig, from 0.
        chunk_nt: Nucleotides of a chunk.
    """
    counts = chunks_per_contig(lengths_nt, chunk_nt)
    quotients, remainders = np.divmod(counts * chunk_nt - lengths_nt, counts)
    starts = numbers * (chunk_nt - quotients) - np.minimum(numbers, quotients + remainders)
    return starts, np.minimum(starts + chunk_nt, lengths_nt)
