"""
What homology to known proteins adds to the composition score of a contig.

Contigs that composition does not show to be cellular are searched in proteins of the training genomes. P(virus) is
calibrated apart for those with a hit and for those without one: there composition alone decides, and the second
calibration knows how it fails on genomes of groups that trained nothing. Legend: C contigs, J inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from virnucpro.models.contigs.nucleotide_codes import OTHER
from virnucpro.models.contigs.protein_search import KnownProteins

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from virnucpro.arrays import BoolArray, DoubleArray, FloatArray
    from virnucpro.models.contigs.nucleotide_codes import CodeArray
    from virnucpro.models.contigs.protein_search import Hits, OnShare

CELLULAR = 0.01
"""Composition score up to which a contig is not searched."""
SEARCHED_NT = 20_000
"""Nucleotides of a contig that are searched, half of them from either end: the longest contigs in training."""
_LEAST_P = 1e-7
"""Of a composition score, and of one less it, as far as its log-odds count."""
_WITH_HITS, _WITHOUT = 6, 3
"""Inputs of the two regressions."""


class Judged(NamedTuple):
    """P(virus) of contigs, and what it rests on."""

    scores: FloatArray
    """float32 (C,): NaN without a composition score."""
    searched: BoolArray
    hits: Hits
    """Of those that were searched."""


@dataclass(frozen=True)
class Homology:
    proteins: KnownProteins
    with_hits_J: DoubleArray
    """float64 (J,): weights of ``inputs`` of contigs with a hit."""
    without_J: DoubleArray
    """float64 (J,): likewise of those without one."""

    def judge(self, scores_C: FloatArray, codes: Sequence[CodeArray], on_share: OnShare | None = None) -> Judged:
        """Return P(virus) of contigs with composition *scores_C* and *codes*, as of ``nucleotide_codes.masked``."""
        judged_C = np.array(scores_C, dtype=np.float32)
        searched_C = is_searched(scores_C)
        numbers = np.flatnonzero(searched_C).tolist()
        some = [ends_of(codes[number]) for number in numbers]
        hits = self.proteins.search(some, on_share=on_share)
        if numbers:
            judged_C[searched_C] = self.probabilities(*inputs(scores_C[searched_C], some, hits))
        return Judged(judged_C, searched_C, hits)

    def probabilities(self, has_hit_C: BoolArray, with_hits_CJ: DoubleArray, without_CJ: DoubleArray) -> DoubleArray:
        """Return P(virus) of searched contigs from what ``inputs`` gives, float64 (C,)."""
        log_odds_C = np.where(has_hit_C, with_hits_CJ @ self.with_hits_J, without_CJ @ self.without_J)
        return np.asarray(1 / (1 + np.exp(-log_odds_C)))

    def check(self) -> None:
        self.proteins.check()
        for weights_J, number in ((self.with_hits_J, _WITH_HITS), (self.without_J, _WITHOUT)):
            is_sound = weights_J.shape == (number,) and weights_J.dtype == np.float64
            if not is_sound or not np.isfinite(weights_J).all():
                raise ValueError("the weights of the contig model's homology do not fit")

    def tensors(self) -> dict[str, np.ndarray[Any, Any]]:
        weights = {"weights_with_hits": self.with_hits_J, "weights_without": self.without_J}
        return self.proteins.tensors() | weights

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, np.ndarray[Any, Any]]) -> Homology:
        """Return what ``tensors`` gave; KeyError where one is absent, ValueError for an earlier version."""
        if "weights" in tensors:
            raise ValueError("an earlier version made it: train it again with this one")
        return cls(KnownProteins.of_tensors(tensors), tensors["weights_with_hits"], tensors["weights_without"])


def is_searched(scores_C: FloatArray) -> BoolArray:
    """Return which contigs are searched; those without a score are not."""
    return np.asarray(scores_C > CELLULAR)


def ends_of(codes_L: CodeArray) -> CodeArray:
    """Return what is searched of a contig: all of it, or its two ends, apart."""
    if len(codes_L) <= SEARCHED_NT:
        return codes_L
    half = SEARCHED_NT // 2
    return apart(codes_L[:half], codes_L[-half:])


def apart(first_L: CodeArray, last_L: CodeArray) -> CodeArray:
    """Return two ends of a contig as one, with nothing that reaches from one into the other."""
    return np.concatenate([first_L, np.full(2, OTHER, dtype=np.uint8), last_L])


def inputs(scores_C: FloatArray, codes: Sequence[CodeArray], hits: Hits) -> tuple[BoolArray, DoubleArray, DoubleArray]:
    """
    Return which contigs have a hit, and the inputs of both regressions, float64 (C, J).

    Without a hit: log-odds of the composition score, logarithm of the length, and 1. With a hit, before the 1: also the
    logarithms of the viral and the cellular hit's excess bits, each plus one, and the viral hit's lead in bits, as a
    share of the better hit.
    """
    score_C = np.clip(scores_C.astype(np.float64), _LEAST_P, 1 - _LEAST_P)
    viral_C, cellular_C = hits.bits.T
    common = [np.log(score_C / (1 - score_C)), np.log([max(len(codes_L), 1) for codes_L in codes])]
    lead_C = (viral_C - cellular_C) / np.maximum(hits.bits.max(axis=1, initial=0), 1)
    one_C = np.ones(len(score_C))
    with_hits = np.stack([*common, *np.log1p(hits.excess).T, lead_C, one_C], axis=1)
    has_hit: BoolArray = np.any(hits.proteins >= 0, axis=1)
    return has_hit, with_hits, np.stack([*common, one_C], axis=1)
