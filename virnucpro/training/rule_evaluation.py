"""
Scores contigs of known kind with every rule, and says what a card says of it.

The contigs are looked at once: to choose the rule, to settle the threshold and to tell what both are worth. The figures
are therefore a little better than those of contigs that nothing was chosen by. Legend: C contigs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from virnucpro.pipeline.contig_rule import RULE
from virnucpro.training.contig_rules import LENGTH_CLASSES, RULES
from virnucpro.training.metrics import BOOTSTRAP_SAMPLES, auroc, bootstrap, recall_at, threshold_at

if TYPE_CHECKING:
    from collections.abc import Callable

    from virnucpro.pipeline.contig_rule import DoubleArray, FloatArray, IntArray
    from virnucpro.training.frame_data import FrameSet
    from virnucpro.training.known_contigs import KnownContigs
    from virnucpro.training.metrics import BoolArray

CALLED_SHARE = 0.05
"""Share of contigs that are not viral, and are called so nevertheless, that the threshold aims at."""
PLAIN_RULE = "frames' mean log-odds"
"""What the other rules are compared with."""
CHOICE = (
    "The first two rules have the highest AUROC and cannot be told apart here, where few contigs have more than 16 "
    "open frames: the bound is a guard for contigs that are much longer than these. Rules that grow surer with the "
    "number of frames or chunks are better than plain means, which are better than what looks at the highest frame of "
    "a chunk."
)
"""Why the rule in use was chosen, said once the figures were there."""


def evaluate_rules(p_virus: FloatArray, frames: FrameSet, known: KnownContigs, *, seed: int) -> dict[str, Any]:
    """
    Measure every rule, and the one in use closely.

    Args:
        p_virus: float32 (frames,): P(virus) of each frame of the contigs.
        frames: Their chunks and frames.
        known: What they are.
        seed: Seed of the bootstrap samples.

    Returns:
        What the card says: numbers with their 95 % intervals as lists of three.
    """
    scores = {name: rule(p_virus, frames.frames_per_chunk, frames.chunks_per_contig) for name, rule in RULES.items()}
    virus = known.is_virus_C
    lengths = known.lengths_nt_C
    of_class = {name: (low <= lengths) & (lengths <= high) for name, (low, high) in LENGTH_CLASSES.items()}
    has_frame = ~np.isnan(scores[RULE])
    plain = scores[PLAIN_RULE]
    rules = {}
    for name, scores_C in scores.items():
        rules[name] = {
            "auroc": _auroc(scores_C, virus, seed),
            "auroc_by_length": {which: _auroc(scores_C[mine], virus[mine], seed) for which, mine in of_class.items()},
            "auroc_with_an_open_frame": _auroc(scores_C[has_frame], virus[has_frame], seed),
            "auroc_above_plain_mean": _difference(scores_C, plain, virus, seed),
            "recall_at_1_percent_false_positives": _strict_recall(scores_C, virus, seed),
        }
    in_use = scores[RULE]
    threshold = settle_threshold(in_use, virus)
    return {
        "contigs": len(virus),
        "viral": int(virus.sum()),
        "without_an_open_frame": int(np.isnan(scores[RULE]).sum()),
        "bootstrap_samples": BOOTSTRAP_SAMPLES,
        "rule": RULE,
        "choice": CHOICE,
        "rules": rules,
        "threshold": threshold,
        "threshold_rule": (
            f"the lowest of two decimals, from 0.5 up, at which at most {CALLED_SHARE:.0%} of the development contigs "
            "that are not viral are called viral"
        ),
        "by_length": {
            which: _closely(in_use[mine], virus[mine], in_use, virus, threshold) for which, mine in of_class.items()
        },
        "by_group": {
            group: _of_group(in_use, np.array([other == group for other in known.groups]), virus, threshold)
            for group in sorted(set(known.groups))
        },
    }


def _auroc(scores_C: DoubleArray, is_virus_C: BoolArray, seed: int) -> list[float]:
    return _with_interval(lambda drawn: auroc(scores_C[drawn], is_virus_C[drawn]), is_virus_C, seed)


def _difference(scores_C: DoubleArray, other_C: DoubleArray, is_virus_C: BoolArray, seed: int) -> list[float]:
    def measure(drawn: IntArray) -> float:
        return auroc(scores_C[drawn], is_virus_C[drawn]) - auroc(other_C[drawn], is_virus_C[drawn])

    return _with_interval(measure, is_virus_C, seed)


def _strict_recall(scores_C: DoubleArray, is_virus_C: BoolArray, seed: int) -> list[float]:
    return _with_interval(lambda drawn: recall_at(scores_C[drawn], is_virus_C[drawn]), is_virus_C, seed)


def _with_interval(measure: Callable[[IntArray], float], is_virus_C: BoolArray, seed: int) -> list[float]:
    found = bootstrap(lambda drawn: {"it": measure(drawn)}, is_virus_C, seed=seed, samples=BOOTSTRAP_SAMPLES)["it"]
    return [round(number, 4) for number in (found.value, found.low, found.high)]


def settle_threshold(scores_C: DoubleArray, is_virus_C: BoolArray) -> float:
    """Return the lowest threshold of two decimals, from 0.5 up, that lets ``CALLED_SHARE`` pass at the most."""
    lowest = threshold_at(scores_C, is_virus_C, CALLED_SHARE)
    return max(0.5, float(np.ceil(lowest * 100) / 100))


def _closely(
    scores_C: DoubleArray, is_virus_C: BoolArray, all_scores: DoubleArray, all_virus: BoolArray, threshold: float
) -> dict[str, Any]:
    strict = threshold_at(all_scores, all_virus)
    return {
        "viral": int(is_virus_C.sum()),
        "others": int((~is_virus_C).sum()),
        "without_an_open_frame": int(np.isnan(scores_C).sum()),
        "recall": _share(scores_C[is_virus_C] >= threshold),
        "false_positives": _share(scores_C[~is_virus_C] >= threshold),
        "recall_at_1_percent_false_positives": _share(scores_C[is_virus_C] >= strict),
    }


def _of_group(scores_C: DoubleArray, mine: BoolArray, is_virus_C: BoolArray, threshold: float) -> dict[str, Any]:
    strict = threshold_at(scores_C, is_virus_C)
    return {
        "label": "virus" if is_virus_C[mine].all() else "nonviral",
        "contigs": int(mine.sum()),
        "without_an_open_frame": int(np.isnan(scores_C[mine]).sum()),
        "called": _share(scores_C[mine] >= threshold),
        "called_at_1_percent_false_positives": _share(scores_C[mine] >= strict),
    }


def _share(called: BoolArray) -> float:
    return round(float(called.mean()), 4)
