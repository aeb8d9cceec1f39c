"""
Leave one group out: how contigs of a group rank that nothing like it has trained.

For every group, tables and boosted trees are made again without it, and its fragments are ranked against the test
part's fragments of the other label. Trees alone, fitted on some of the fragments, are near enough to the whole model to
compare groups. Where the model compares contigs with known proteins, their scores are refined as it does, by the
proteins of the other groups. Legend: C contigs, G groups, N proteins.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from virnucpro.models.contigs.sequence_features import SequenceFeatures
from virnucpro.training.evaluation.metrics import counts_of
from virnucpro.training.fitting.contig_training import features_out_of_fold
from virnucpro.training.fitting.tree_fitting import fit_trees

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping, Sequence

    from virnucpro.arrays import BoolArray, FloatArray, IntArray
    from virnucpro.models.contigs.homology import Homology
    from virnucpro.training.fitting.contig_training import LabelledRecords
    from virnucpro.training.fitting.kmer_log_odds import KmerCounts
    from virnucpro.training.training_settings import TreeSettings

FRAGMENTS = 6_000
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
) -> dict[str, dict[str, Any]]:
    """
    Return what was measured for every group that is not the only one of its label, ready for JSON.

    *names*, *counted* and *training* as in ``train_contig_model``; its fragments are of both *training* and *test*.
    *known* is the model's homology to proteins, and the group of each of them.

    Raises:
        StoppedError: *stop* was set.
    """
    counts, fold_of_source = counted
    homology, group_N = known
    of_training, of_test = training.group_numbers(names), test.group_numbers(names)
    found = {}
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
        if homology is not None:
            others_know = replace(homology, proteins=homology.proteins.take(group_N != group))
            scores_C = others_know.refined(scores_C, ranked)
        labels_C = np.where(np.arange(len(ranked)) < len(others), not is_virus, is_virus)
        found[name] = asdict(_measured(scores_C, labels_C, is_virus=is_virus, others=len(others)))
    return found


def _measured(scores_C: FloatArray, labels_C: BoolArray, *, is_virus: bool, others: int) -> LeftOut:
    counts = counts_of(scores_C.astype(np.float64), labels_C)
    return LeftOut(
        label="virus" if is_virus else "nonviral",
        fragments=len(scores_C) - others,
        others=others,
        auroc=round(counts.auroc(), 4),
        recall_at_1_percent_false_positives=round(counts.strict_recall(), 4) if is_virus else None,
    )
