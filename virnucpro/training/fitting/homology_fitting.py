"""
Choose the proteins that a contig model keeps, and fit what hits to them, or none, say.

Proteins are the likely genes of the training part's genomes; the regressions are fitted on contigs of other genomes,
those of validation. Legend: C contigs, J inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from virnucpro.models.contigs.fragments import Fragments
from virnucpro.models.contigs.gene_finding import Genes
from virnucpro.models.contigs.homology import Homology, ends_of, inputs, is_searched
from virnucpro.models.contigs.nucleotide_codes import RESIDUES
from virnucpro.models.contigs.protein_search import SHORTEST_PROTEIN, KnownProteins

if TYPE_CHECKING:
    import threading

    from virnucpro.arrays import BoolArray, DoubleArray, FloatArray, IntArray
    from virnucpro.models.contigs.nucleotide_codes import CodeArray
    from virnucpro.training.fitting.contig_training import LabelledRecords

MOST_RESIDUES = 60_000_000
"""Of all proteins that are kept: what a search bears."""
_WORD, _WORD_BITS, _SAME_SHARE = 8, 30, 0.43
"""A protein with so large a share of its 8-mers in longer ones is left out: 0.9 to the power of 8, of 90 % identity."""
LEAST_CONTIGS = 100
"""Contigs of each label that are searched, without which nothing is fitted."""
_STRETCH_NT = 200_000
_RIDGE = 1e-3
"""Penalty of the weights of standardised inputs, against the mean loss of a contig."""
_STEPS = 50


def fit_homology(
    proteins: KnownProteins, contigs: LabelledRecords, scores_C: FloatArray, *, stop: threading.Event | None = None
) -> Homology | None:
    """
    Return what judges contigs by homology; None of too few that are searched, or no proteins.

    *contigs*, with scores by composition, are of other genomes than the proteins'.
    """
    searched_C, is_virus_C = is_searched(scores_C), contigs.is_virus_C
    labels = is_virus_C[searched_C]
    if min(labels.sum(), (~labels).sum()) < LEAST_CONTIGS or not len(proteins.lengths_N):
        return None
    searched = [ends_of(contigs.codes[number]) for number in np.flatnonzero(searched_C).tolist()]
    has_hit, with_hits, without = inputs(scores_C[searched_C], searched, proteins.search(searched, stop))
    group_C = contigs.group_numbers(contigs.group_names())

    def weights(shares_C: DoubleArray) -> DoubleArray:
        """Of all contigs a label has the same weight: how many of each have a hit counts, too."""
        of_label = np.where(is_virus_C, shares_C[is_virus_C].sum(), shares_C[~is_virus_C].sum())
        return np.asarray((shares_C / of_label)[searched_C])

    of_contigs, of_groups = weights(np.ones(len(group_C))), weights(1 / np.bincount(group_C)[group_C])
    return Homology(
        proteins,
        fit_regression(with_hits[has_hit], labels[has_hit], of_contigs[has_hit]),
        # without a hit groups differ more: one weighs as much as another
        fit_regression(without[~has_hit], labels[~has_hit], of_groups[~has_hit]),
    )


def choose_proteins(genomes: LabelledRecords, seed: int) -> KnownProteins:
    """Return the different proteins of the likely genes, up to ``MOST_RESIDUES``; records are those of *genomes*."""
    residues, lengths, genome_numbers = [], [], []
    for number, codes_L in enumerate(genomes.codes):
        for start in range(0, len(codes_L), _STRETCH_NT):
            genes = Genes.of(Fragments([codes_L[start : start + _STRETCH_NT]]))
            residues.append(genes.residues())
            lengths.append(genes.lengths_N)
            genome_numbers.append(np.full(len(genes.lengths_N), number))
    residues_R, lengths_N, genome_N = (np.concatenate(parts) for parts in (residues, lengths, genome_numbers))
    is_kept_N = (lengths_N >= SHORTEST_PROTEIN) & _is_new(residues_R, lengths_N)
    order = np.random.default_rng(seed).permutation(np.flatnonzero(is_kept_N))
    is_chosen_N = np.zeros(len(lengths_N), dtype=np.bool_)
    is_chosen_N[order[np.cumsum(lengths_N[order]) <= MOST_RESIDUES]] = True
    is_viral_N, record_N = genomes.is_virus_C[genome_N], genome_N.astype(np.int32)
    proteins = KnownProteins(residues_R, lengths_N.astype(np.int32), is_viral_N, record_N, tuple(genomes.names))
    return proteins.take(is_chosen_N)


def _is_new(residues_R: CodeArray, lengths_N: IntArray) -> BoolArray:
    """Return which proteins are no relatives of longer ones, bool (N,)."""
    hashes = np.zeros(max(len(residues_R) - _WORD + 1, 0), dtype=np.uint64)
    for place in range(_WORD):
        hashes *= np.uint64(len(RESIDUES))
        hashes += residues_R[place : place + len(hashes)]
    hashes *= np.uint64(0x9E3779B97F4A7C15)
    words = (hashes >> np.uint64(64 - _WORD_BITS)).astype(np.int64)
    is_seen = np.zeros(1 << _WORD_BITS, dtype=np.bool_)
    is_new_N = np.ones(len(lengths_N), dtype=np.bool_)
    starts_N = np.cumsum(lengths_N) - lengths_N
    for number in np.argsort(-lengths_N, kind="stable").tolist():
        own = words[starts_N[number] : starts_N[number] + max(lengths_N[number] - _WORD + 1, 0)]
        is_new_N[number] = not len(own) or is_seen.take(own).mean() < _SAME_SHARE
        if is_new_N[number]:
            is_seen[own] = True
    return is_new_N


def fit_regression(x_CJ: DoubleArray, is_virus_C: BoolArray, weight_C: DoubleArray) -> DoubleArray:
    """
    Return the weights of a logistic regression on contigs of such weights, float64 (J,), by Newton's method.

    The last input is 1. Inputs are standardised for the fit; the weights are of the inputs as they are.
    """
    mean_J, deviation_J = x_CJ.mean(axis=0), np.maximum(x_CJ.std(axis=0), 1e-9)
    mean_J[-1], deviation_J[-1] = 0, 1
    z_CJ = (x_CJ - mean_J) / deviation_J
    share_C = weight_C / weight_C.sum()
    ridge = np.diag(np.full(x_CJ.shape[1], _RIDGE))
    weights_J = np.zeros(x_CJ.shape[1])
    for _ in range(_STEPS):
        p_C = 1 / (1 + np.exp(-(z_CJ @ weights_J)))
        slope_J = z_CJ.T @ (share_C * (p_C - is_virus_C)) + ridge @ weights_J
        curve_JJ = (z_CJ.T * (share_C * p_C * (1 - p_C))) @ z_CJ + ridge
        weights_J = weights_J - np.linalg.solve(curve_JJ, slope_J)
    weights_J = weights_J / deviation_J
    weights_J[-1] -= weights_J[:-1] @ mean_J[:-1]
    return np.asarray(weights_J)
