"""
Choose the proteins that a contig model keeps, and fit the weight of homology to them.

Proteins are the likely genes of the training part's genomes; the regression is fitted on contigs of other genomes,
those of validation. Legend: C contigs, J inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from virnucpro.models.contigs.fragments import Fragments
from virnucpro.models.contigs.gene_finding import Genes
from virnucpro.models.contigs.homology import SEARCHED_NT, Homology, inputs, is_ambiguous
from virnucpro.models.contigs.protein_search import SHORTEST_PROTEIN, KnownProteins

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from virnucpro.arrays import BoolArray, DoubleArray, FloatArray, IntArray
    from virnucpro.models.contigs.nucleotide_codes import CodeArray
    from virnucpro.training.fitting.contig_training import LabelledRecords

MOST_RESIDUES = 18_500_000
"""Of all proteins that are kept: what the package has room for. More would find more (docs/models.md)."""
LEAST_CONTIGS = 100
"""Contigs of each label with an ambiguous score, without which nothing is fitted."""
_STRETCH_NT = 200_000
_RIDGE = 1e-3
"""Penalty of the weights of standardised inputs, against the mean loss of a contig."""
_STEPS = 50


def fit_homology(
    proteins: KnownProteins,
    codes: Sequence[CodeArray],
    scores_C: FloatArray,
    is_virus_C: BoolArray,
    *,
    stop: threading.Event | None = None,
) -> Homology | None:
    """
    Return what refines the scores of contigs; None of too few with an ambiguous score, or no proteins.

    *codes*, *scores_C* (by composition) and labels are of contigs of other genomes than the proteins'.
    """
    ambiguous = np.flatnonzero(is_ambiguous(scores_C))
    labels = is_virus_C[ambiguous]
    if min(labels.sum(), (~labels).sum()) < LEAST_CONTIGS or not len(proteins.lengths_N):
        return None
    searched = [codes[number][:SEARCHED_NT] for number in ambiguous.tolist()]
    best_C2 = proteins.best_scores(searched, stop)
    x_CJ = inputs(scores_C[ambiguous], [len(codes_L) for codes_L in searched], best_C2)
    return Homology(proteins, fit_regression(x_CJ, labels))


def choose_proteins(genomes: LabelledRecords, seed: int) -> tuple[KnownProteins, IntArray]:
    """
    Return proteins of the likely genes, drawn from all up to ``MOST_RESIDUES``, and the genome of each.

    Genomes are given by their numbers in *genomes*, int64 (N,).
    """
    residues, lengths, genome_numbers = [], [], []
    for number, codes_L in enumerate(genomes.codes):
        for start in range(0, len(codes_L), _STRETCH_NT):
            genes = Genes.of(Fragments([codes_L[start : start + _STRETCH_NT]]))
            residues.append(genes.residues())
            lengths.append(genes.lengths_N)
            genome_numbers.append(np.full(len(genes.lengths_N), number))
    residues_R, lengths_N, genome_N = (np.concatenate(parts) for parts in (residues, lengths, genome_numbers))
    order = np.random.default_rng(seed).permutation(np.flatnonzero(lengths_N >= SHORTEST_PROTEIN))
    is_chosen_N = np.zeros(len(lengths_N), dtype=np.bool_)
    is_chosen_N[order[np.cumsum(lengths_N[order]) <= MOST_RESIDUES]] = True
    proteins = KnownProteins(residues_R, lengths_N.astype(np.int32), genomes.is_virus_C[genome_N])
    return proteins.take(is_chosen_N), genome_N[is_chosen_N]


def fit_regression(x_CJ: DoubleArray, is_virus_C: BoolArray) -> DoubleArray:
    """
    Return the weights of a logistic regression, both labels weighing the same, float64 (J,), by Newton's method.

    The last input is 1. Inputs are standardised for the fit; the weights are of the inputs as they are.
    """
    mean_J, deviation_J = x_CJ.mean(axis=0), np.maximum(x_CJ.std(axis=0), 1e-9)
    mean_J[-1], deviation_J[-1] = 0, 1
    z_CJ = (x_CJ - mean_J) / deviation_J
    share_C = np.where(is_virus_C, 0.5 / is_virus_C.sum(), 0.5 / (~is_virus_C).sum())
    ridge = np.diag(np.append(np.full(x_CJ.shape[1] - 1, _RIDGE), 0))
    weights_J = np.zeros(x_CJ.shape[1])
    for _ in range(_STEPS):
        p_C = 1 / (1 + np.exp(-(z_CJ @ weights_J)))
        slope_J = z_CJ.T @ (share_C * (p_C - is_virus_C)) + ridge @ weights_J
        curve_JJ = (z_CJ.T * (share_C * p_C * (1 - p_C))) @ z_CJ + ridge
        weights_J = weights_J - np.linalg.solve(curve_JJ, slope_J)
    weights_J = weights_J / deviation_J
    weights_J[-1] -= weights_J[:-1] @ mean_J[:-1]
    return np.asarray(weights_J)
