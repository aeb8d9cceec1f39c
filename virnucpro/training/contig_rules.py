"""
The rules that a contig's score could be made by, and what each is worth on contigs of known kind.

Every rule takes what ``pipeline.contig_rule.score_contigs`` takes and gives a number between 0 and 1 a contig; a contig
without an open frame has no score.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from virnucpro.pipeline.contig_rule import (
    RULE,
    frames_per_contig,
    log_odds,
    mean_by_group,
    probability,
    score_contigs,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from virnucpro.pipeline.contig_rule import DoubleArray, FloatArray, IntArray

    Rule = Callable[[FloatArray, IntArray, IntArray], DoubleArray]

LENGTH_CLASSES = {"300 to 500 nt": (300, 500), "800 to 1,000 nt": (501, 1000), "2,000 nt and more": (1001, 10**9)}
"""Nucleotides, both ends included, of the contigs that are told apart."""


def _mean_of_probabilities(p_virus: FloatArray, frames: IntArray, chunks: IntArray) -> DoubleArray:
    return mean_by_group(p_virus.astype(np.float64), frames_per_contig(frames, chunks))[0]


def _mean_log_odds(p_virus: FloatArray, frames: IntArray, chunks: IntArray) -> DoubleArray:
    return probability(mean_by_group(log_odds(p_virus), frames_per_contig(frames, chunks))[0])


def _root_of_frames(p_virus: FloatArray, frames: IntArray, chunks: IntArray) -> DoubleArray:
    means, counts = mean_by_group(log_odds(p_virus), frames_per_contig(frames, chunks))
    return probability(means * np.sqrt(counts))


def _mean_log_odds_of_chunks(p_virus: FloatArray, frames: IntArray, chunks: IntArray) -> DoubleArray:
    return probability(mean_by_group(_chunk_log_odds(p_virus, frames), chunks)[0])


def _root_of_chunks(p_virus: FloatArray, frames: IntArray, chunks: IntArray) -> DoubleArray:
    means, counts = mean_by_group(_chunk_log_odds(p_virus, frames), chunks)
    return probability(means * np.sqrt(counts))


def _shrunken(p_virus: FloatArray, frames: IntArray, chunks: IntArray) -> DoubleArray:
    """The mean log-odds of chunks with one more chunk of no evidence."""
    means, counts = mean_by_group(_chunk_log_odds(p_virus, frames), chunks)
    return probability(means * counts / (counts + 1))


def _mean_of_highest(p_virus: FloatArray, frames: IntArray, chunks: IntArray) -> DoubleArray:
    return mean_by_group(_highest(p_virus, frames), chunks)[0]


def _share_of_viral_chunks(p_virus: FloatArray, frames: IntArray, chunks: IntArray) -> DoubleArray:
    """Of those with an open frame; one is viral when its highest P(virus) is not below its highest P(other)."""
    highest, highest_other = _highest(p_virus, frames), _highest(1 - p_virus, frames)
    viral = np.where(np.isnan(highest), np.nan, (highest >= highest_other).astype(np.float64))
    return mean_by_group(viral, chunks)[0]


def _chunk_log_odds(p_virus: FloatArray, frames: IntArray) -> DoubleArray:
    """Return the mean log-odds of each chunk's frames, float64 (chunks,)."""
    return mean_by_group(log_odds(p_virus), frames)[0]


def _highest(p_virus: FloatArray, frames: IntArray) -> DoubleArray:
    """Return the highest P of each chunk, float64 (chunks,); NaN where it has no frame with a score."""
    result = np.full(len(frames), -np.inf)
    np.fmax.at(result, np.repeat(np.arange(len(frames)), frames), p_virus)
    return np.where(np.isneginf(result), np.nan, result)


RULES: dict[str, Rule] = {
    RULE: score_contigs,
    "frames' mean log-odds times the root of their number": _root_of_frames,
    "frames' mean log-odds": _mean_log_odds,
    "frames' mean P": _mean_of_probabilities,
    "chunks' mean log-odds times the root of their number": _root_of_chunks,
    "chunks' mean log-odds times n / (n + 1)": _shrunken,
    "chunks' mean log-odds": _mean_log_odds_of_chunks,
    "chunks' mean highest P": _mean_of_highest,
    "share of viral chunks": _share_of_viral_chunks,
}
"""By name; the first one is the one in use."""
