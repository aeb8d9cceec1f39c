"""
Tables of log-odds: how much likelier each k-mer is in one group of genomes than in all of them.

For group g and slot s the log-odds are log((c + a) / (p * n + a)): c is how often the group's genomes have the slot's
k-mers and n how many k-mers they have, every genome weighing as the root of its nucleotides; p is the slot's share in
all groups, a group weighing as it does in training and half of p being uniform; and a is ``PSEUDO_COUNT`` k-mers of
mean weight. A training contig must not be looked up in tables that have seen its genome: genomes are dealt to folds,
and a contig's log-odds come from the other folds. Legend: F folds, G groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from virnucpro.models.contigs.fragments import Fragments
from virnucpro.models.contigs.gene_finding import Genes
from virnucpro.models.contigs.sequence_features import TABLES, UNITS_PER_NAT, kmers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virnucpro.models.contigs.nucleotide_codes import CodeArray
    from virnucpro.models.contigs.sequence_features import TableArray

    IntArray = np.ndarray[Any, np.dtype[np.int64]]
    FloatArray = np.ndarray[Any, np.dtype[np.float32]]
    DoubleArray = np.ndarray[Any, np.dtype[np.float64]]

PSEUDO_COUNT = 2.0
_STRETCH_NT = 20_000
_MOST_UNITS = 127


class KmerCounts:
    """
    How often each group's genomes of each fold have the k-mers of every table.

    Per record: *codes* as ``nucleotide_codes.encode`` returns them, *groups* and *folds* from 0 (int64), *weights* of
    one k-mer (float64). *shares* are the groups' shares of the training, float64 (G,).
    """

    def __init__(
        self, codes: Sequence[CodeArray], groups: IntArray, weights: DoubleArray, folds: IntArray, shares: DoubleArray
    ) -> None:
        shape = int(folds.max()) + 1, len(shares)
        self._shares = shares / shares.sum()
        self._counts = {table.name: np.zeros((*shape, table.slots), dtype=np.float32) for table in TABLES}
        self._num_nt = np.zeros(shape)
        for codes_L, group, weight, fold in zip(codes, groups, weights, folds, strict=True):
            self._num_nt[fold, group] += len(codes_L)
            for start in range(0, len(codes_L), _STRETCH_NT):
                stretch = Fragments([codes_L[start : start + _STRETCH_NT]])
                for table, (slots, _, _) in zip(TABLES, kmers(stretch, Genes.of(stretch)), strict=True):
                    np.add.at(self._counts[table.name][fold, group], slots, np.float32(weight))

    @property
    def num_folds(self) -> int:
        """F."""
        return len(self._num_nt)

    def log_odds(self, without_fold: int | None = None, without_group: int | None = None) -> dict[str, TableArray]:
        """Return int8 tables (slots, G) by name, in units of 1 / ``UNITS_PER_NAT``; without a group it has one less."""
        used = np.arange(self.num_folds) != (-1 if without_fold is None else without_fold)
        groups = np.flatnonzero(np.arange(len(self._shares)) != (-1 if without_group is None else without_group))
        num_nt_G = self._num_nt[used].sum(axis=0)[groups]
        return {
            name: self._table(counts[used].sum(axis=0)[groups], num_nt_G, self._shares[groups])
            for name, counts in self._counts.items()
        }

    def _table(self, counts_GS: FloatArray, num_nt_G: DoubleArray, shares_G: DoubleArray) -> TableArray:
        totals_G = counts_GS.sum(axis=1, dtype=np.float64)
        known_G = totals_G > 0
        shares_G = np.where(known_G, shares_G, 0)
        in_all_S = (shares_G / np.where(known_G, totals_G, 1)) @ counts_GS.astype(np.float64)
        in_all_S = in_all_S / max(shares_G.sum(), np.finfo(float).tiny) / 2 + 1 / (2 * counts_GS.shape[1])
        pseudo_G = PSEUDO_COUNT * totals_G / np.maximum(num_nt_G, 1)
        table = np.zeros((counts_GS.shape[1], len(counts_GS)), dtype=np.int8)
        for group in np.flatnonzero(known_G):
            found, expected = counts_GS[group] + pseudo_G[group], in_all_S * totals_G[group] + pseudo_G[group]
            units = np.rint(UNITS_PER_NAT * np.log(found / expected))
            table[:, group] = np.clip(units, -_MOST_UNITS, _MOST_UNITS).astype(np.int8)
        return table
