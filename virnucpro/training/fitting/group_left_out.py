"""
Leave one group out: how contigs of a group rank that nothing like it has trained.

For every group, tables and boosted trees are made again without it, and its fragments are ranked against the test
part's fragments of the other label. Trees alone, fitted on some of the fragments, are near enough to the whole model to
compare groups. Where the model compares contigs with known proteins, they are judged as it does, by the proteins of the
other groups. What no hit says is the mean, in log-odds, of what validation's contigs and these contigs of unseen groups
say: a sample may be of either. Legend: C contigs, G groups, N proteins.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from virnucpro.models.contigs.homology import ends_of, inputs, is_searched
from virnucpro.models.contigs.sequence_features import SequenceFeatures
from virnucpro.training.evaluation.metrics import counts_of
from virnucpro.training.fitting.contig_training import features_out_of_fold
from virnucpro.training.fitting.homology_fitting import fit_regression
from virnucpro.training.fitting.tree_fitting import fit_trees

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping, Sequence

    from virnucpro.arrays import BoolArray, DoubleArray, FloatArray, IntArray
    from virnucpro.models.contigs.homology import Homology
    from virnucpro.models.contigs.nucleotide_codes import CodeArray
    from virnucpro.models.contigs.protein_search import KnownProteins
    from virnucpro.training.fitting.contig_training import LabelledRecords
    from virnucpro.training.fitting.kmer_log_odds import KmerCounts
    from virnucpro.training.training_settings import TreeSettings

FRAGMENTS = 12_000
"""Fragments that train, at most."""
FRAGMENTS_OF_GROUP = 300
"""Fragments of the group that are ranked, at most."""


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """How one group ranks that was left out."""

    label: str
    fragments: int
    others: int
    """Fragments of the other label."""
    auroc: float
    recall_at_1_percent_false_positives: float | None
    """None for a group that is not viral."""


def leave_each_group_out(
    names: Sequence[tuple[bool, str]],
    counted: tuple[KmerCounts, Mapping[str, int]],
    training: LabelledRecords,
    test: LabelledRecords,
    settings: TreeSettings,
    known: tuple[Homology | None, IntArray],
    *,
    stop: threading.Event | None = None,
) -> tuple[dict[str, dict[str, Any]], Homology | None]:
    """
    Return what was measured for every group that is not the only one of its label, ready for JSON; and the homology.

    *names*, *counted* and *training* as in ``train_contig_model``; its fragments are of both *training* and *test*.
    *known* is the model's homology to proteins, and the group of each of them.

    Raises:
        StoppedError: *stop* was set.
    """
    counts, fold_of_source = counted
    homology, group_N = known
    of_training, of_test = training.group_numbers(names), test.group_numbers(names)
    ranked_of: dict[str, _Ranked] = {}
    for group, (is_virus, name) in enumerate(names):
        if [label for label, _ in names].count(is_virus) == 1:  # without it there is nothing of its label
            continue
        chosen = np.flatnonzero(of_training != group)[:FRAGMENTS]
        others = np.flatnonzero(test.is_virus_C != is_virus)
        mine, mine_of_test = (np.flatnonzero(of == group)[:FRAGMENTS_OF_GROUP] for of in (of_training, of_test))
        is_viral_G = np.array([label for at, (label, _) in enumerate(names) if at != group])
        features = SequenceFeatures(counts.log_odds(without_group=group), is_viral_G)
        ranked = [*(test.codes[at] for at in [*others, *mine_of_test]), *(training.codes[at] for at in mine)]
        ranked = ranked[: len(others) + FRAGMENTS_OF_GROUP]
        x_CI = features_out_of_fold(
            training.take(chosen.tolist()), counts, fold_of_source, is_viral_G, without_group=group, stop=stop
        )
        fitted = fit_trees(x_CI, training.is_virus_C[chosen], settings.quick(), stop=stop)
        log_odds_C = fitted.log_odds(features.of_many(ranked))
        scores_C = np.asarray(1 / (1 + np.exp(-log_odds_C)), dtype=np.float32)
        ranked_of[name] = _Ranked(scores_C, is_virus, len(others))
        if homology is not None:
            ranked_of[name].search(homology.proteins.take(group_N != group), ranked, stop)
    if homology is not None:
        homology = replace(homology, without_J=_without_hits(list(ranked_of.values()), homology.without_J))
    found = {name: asdict(_measured(ranked, homology)) for name, ranked in ranked_of.items()}
    return found, homology


@dataclass
class _Ranked:
    """Contigs of the other label, and then those of a group, by a model that has not seen the group."""

    scores_C: FloatArray
    """By composition."""
    is_virus: bool
    others: int
    """Contigs of the other label."""
    inputs: tuple[BoolArray, DoubleArray, DoubleArray] | None = None
    """Of those that are searched, as ``homology.inputs`` returns them."""

    def search(self, proteins: KnownProteins, codes: Sequence[CodeArray], stop: threading.Event | None) -> None:
        searched = [ends_of(codes[number]) for number in np.flatnonzero(is_searched(self.scores_C)).tolist()]
        scores = self.scores_C[is_searched(self.scores_C)]
        self.inputs = inputs(scores, searched, proteins.search(searched, stop))

    def own_without_hits(self) -> DoubleArray:
        """Return the inputs of the group's contigs without a hit, float64 (C, J)."""
        assert self.inputs is not None
        has_hit, _, without = self.inputs
        is_own = np.flatnonzero(is_searched(self.scores_C)) >= self.others
        return np.asarray(without[is_own & ~has_hit])


def _without_hits(ranked: Sequence[_Ranked], before_J: DoubleArray) -> DoubleArray:
    """Return the mean of the weights *before_J* and of those fitted on unseen groups; as before of one label alone."""
    x_CJ = np.concatenate([one.own_without_hits() for one in ranked])
    labels_C = np.repeat([one.is_virus for one in ranked], [len(one.own_without_hits()) for one in ranked])
    of_label = {
        label: sum(len(r.scores_C) - r.others for r in ranked if r.is_virus is label) for label in (True, False)
    }
    if len(set(labels_C.tolist())) < len(of_label):
        return before_J
    weight_C = np.where(labels_C, 0.5 / of_label[True], 0.5 / of_label[False])
    return (before_J + fit_regression(x_CJ, labels_C, weight_C)) / 2


def _measured(ranked: _Ranked, homology: Homology | None) -> LeftOut:
    scores_C, is_virus, others = np.array(ranked.scores_C, dtype=np.float64), ranked.is_virus, ranked.others
    if homology is not None and ranked.inputs is not None:
        scores_C[is_searched(ranked.scores_C)] = homology.probabilities(*ranked.inputs)
    labels_C = np.where(np.arange(len(scores_C)) < others, not is_virus, is_virus)
    counts = counts_of(scores_C, labels_C)
    return LeftOut(
        label="virus" if is_virus else "nonviral",
        fragments=len(scores_C) - others,
        others=others,
        auroc=round(counts.auroc(), 4),
        recall_at_1_percent_false_positives=round(counts.strict_recall(), 4) if is_virus else None,
    )
