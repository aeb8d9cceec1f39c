"""
What homology to known proteins adds to the composition score of a contig.

Contigs with an ambiguous score are searched in proteins of the training genomes. A logistic regression on the score's
log-odds, the length, and the best alignment scores to a viral and to a cellular protein gives the log-odds.
Legend: C contigs, J inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from virnucpro.models.contigs.protein_search import KnownProteins

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from virnucpro.arrays import BoolArray, DoubleArray, FloatArray, IntArray
    from virnucpro.models.contigs.nucleotide_codes import CodeArray

AMBIGUOUS = (0.01, 0.99)
"""Composition scores between which a contig is searched."""
SEARCHED_NT = 20_000
"""Nucleotides of a contig that are searched, from its start: the longest contigs in training."""
_INPUTS = 6


@dataclass(frozen=True)
class Homology:
    proteins: KnownProteins
    weights_J: DoubleArray
    """float64 (J,): of ``inputs``."""

    def refined(self, scores_C: FloatArray, codes: Sequence[CodeArray]) -> FloatArray:
        """
        Return P(virus), float32 (C,): the composition score, *scores_C*, where that is confident or absent.

        *codes* are the contigs' nucleotides, as ``nucleotide_codes.encode`` gives them.
        """
        refined_C = np.array(scores_C, dtype=np.float32)
        ambiguous = np.flatnonzero(is_ambiguous(scores_C))
        if len(ambiguous):
            searched = [codes[number][:SEARCHED_NT] for number in ambiguous.tolist()]
            x_CJ = inputs(
                scores_C[ambiguous], [len(codes_L) for codes_L in searched], self.proteins.best_scores(searched)
            )
            refined_C[ambiguous] = 1 / (1 + np.exp(-(x_CJ @ self.weights_J)))
        return refined_C

    def check(self) -> None:
        """Raise ValueError where the parts do not fit together, or numbers are not finite."""
        self.proteins.check()
        is_sound = self.weights_J.shape == (_INPUTS,) and self.weights_J.dtype == np.float64
        if not is_sound or not np.isfinite(self.weights_J).all():
            raise ValueError("the weights of the contig model's homology do not fit")

    def tensors(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the arrays by their names in a file."""
        return {
            "residues": self.proteins.residues_R,
            "lengths": self.proteins.lengths_N,
            "is_viral": self.proteins.is_viral_N.astype(np.uint8),
            "weights": self.weights_J,
        }

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, np.ndarray[Any, Any]]) -> Homology:
        """Return what ``tensors`` gave; KeyError where one is absent."""
        proteins = KnownProteins(tensors["residues"], tensors["lengths"], tensors["is_viral"].astype(np.bool_))
        return cls(proteins, tensors["weights"])


def is_ambiguous(scores_C: FloatArray) -> BoolArray:
    """Return which contigs are searched; those without a score are not."""
    low, high = AMBIGUOUS
    return np.asarray((scores_C > low) & (scores_C < high))


def inputs(scores_C: FloatArray, lengths_nt: Sequence[int], best_C2: IntArray) -> DoubleArray:
    """
    Return the inputs of the regression, float64 (C, J).

    The composition score's log-odds; the logarithm of the length; those of the best scores to a viral and to a cellular
    protein, each plus one; by how much the viral one is better, as a share of the better one; and 1.
    """
    score_C = scores_C.astype(np.float64)
    viral_C, cellular_C = best_C2.T
    lead_C = (viral_C - cellular_C) / np.maximum(best_C2.max(axis=1), 1)
    columns = [
        np.log(score_C / (1 - score_C)),
        np.log(np.array(lengths_nt, dtype=np.float64)),
        np.log1p(viral_C),
        np.log1p(cellular_C),
        lead_C,
        np.ones(len(score_C)),
    ]
    return np.stack(columns, axis=1)
