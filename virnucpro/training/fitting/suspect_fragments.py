"""
Find the fragments that look viral although their genomes are not.

Prophages in bacteria and viral elements in plants and animals are such fragments, and so are those of hosts that merely
resemble viruses. Boosted trees judge each fragment without having seen its genome. Legend: C contigs, I inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from virnucpro.training.fitting.tree_fitting import fit_trees

if TYPE_CHECKING:
    import threading

    from virnucpro.arrays import BoolArray, DoubleArray, FloatArray, IntArray
    from virnucpro.training.training_settings import TreeSettings

SUSPECT = 0.95
"""P(virus) from which a fragment that is not viral is suspect."""
SUSPECT_WEIGHT = 0.5
"""Of a suspect fragment in training, where others weigh 1."""
PARTS = 4
"""Of the genomes: each is judged by trees that learnt from the others."""


def judge(
    x_CI: FloatArray,
    is_virus_C: BoolArray,
    fold_C: IntArray,
    settings: TreeSettings,
    *,
    stop: threading.Event | None = None,
) -> DoubleArray:
    """
    Return P(virus) of each fragment by trees that have not seen its genome, float64 (C,).

    A genome's fragments have the same number in *fold_C*.

    Raises:
        StoppedError: *stop* was set.
    """
    log_odds_C = np.zeros(len(is_virus_C))
    for part in range(PARTS):
        mine = fold_C % PARTS == part
        others = is_virus_C[~mine]
        if mine.any() and others.any() and not others.all():
            log_odds_C[mine] = fit_trees(x_CI[~mine], others, settings.quick(), stop=stop).log_odds(x_CI[mine])
    return np.asarray(1 / (1 + np.exp(-log_odds_C)))
