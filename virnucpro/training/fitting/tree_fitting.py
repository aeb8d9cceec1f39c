"""
Fit the boosted trees of the contig model by LightGBM, and take them out of it.

Legend: as in ``virnucpro.models.contigs.boosted_trees``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch  # noqa: F401  first: it brings the libgomp that LightGBM needs and that not every system has

# isort: split
import lightgbm
import numpy as np

from virnucpro.errors import StoppedError
from virnucpro.models.contigs.boosted_trees import BoostedTrees

if TYPE_CHECKING:
    import threading

    from virnucpro.arrays import BoolArray, FloatArray
    from virnucpro.training.training_settings import TreeSettings


def fit_trees(
    x_CI: FloatArray,
    is_virus_C: BoolArray,
    settings: TreeSettings,
    *,
    weight_C: FloatArray | None = None,
    stop: threading.Event | None = None,
) -> BoostedTrees:
    """
    Fit trees that tell viral contigs from others, both labels with the same weight; the same data give the same trees.

    *weight_C* is by how much each contig's weight is multiplied, float32 (C,).

    Raises:
        StoppedError: *stop* was set.
    """

    def check(_: object) -> None:
        if stop is not None and stop.is_set():
            raise StoppedError

    label_weight_C = np.where(is_virus_C, 0.5 / is_virus_C.mean(), 0.5 / (~is_virus_C).mean())
    parameters = {
        "objective": "binary",
        "boost_from_average": False,
        "num_leaves": settings.leaves,
        "learning_rate": settings.learning_rate,
        "feature_fraction": settings.inputs_share,
        "bagging_fraction": settings.contigs_share,
        "bagging_freq": 1,
        "min_data_in_leaf": settings.least_contigs,
        "lambda_l2": settings.l2,
        "seed": settings.seed,
        "deterministic": True,
        "force_row_wise": True,
        "num_threads": 1,
        "verbosity": -1,
    }
    data = lightgbm.Dataset(x_CI, is_virus_C, weight=label_weight_C if weight_C is None else label_weight_C * weight_C)
    fitted = lightgbm.train(parameters, data, settings.trees, callbacks=[check])
    return _taken_from(fitted.dump_model())


def _taken_from(dumped: dict[str, Any]) -> BoostedTrees:
    """Return the trees of LightGBM's own description of its model."""
    inputs: list[int] = []
    thresholds: list[float] = []
    children: list[list[int]] = []
    values: list[float] = []

    def add(node: dict[str, Any]) -> int:
        if "split_feature" not in node:
            values.append(node["leaf_value"])
            return ~(len(values) - 1)
        assert node["decision_type"] == "<="
        number = len(inputs)
        inputs.append(node["split_feature"])
        thresholds.append(node["threshold"])
        children.append([])
        children[number] += [add(node["left_child"]), add(node["right_child"])]
        return number

    roots = [add(tree["tree_structure"]) for tree in dumped["tree_info"]]
    return BoostedTrees(
        input_N=np.array(inputs, dtype=np.int16),
        threshold_N=np.array(thresholds, dtype=np.float64),
        children_N2=np.array(children, dtype=np.int32).reshape(-1, 2),
        roots_T=np.array(roots, dtype=np.int32),
        values_L=np.array(values, dtype=np.float64),
    )
