"""Boosted trees: as LightGBM computes them, whatever the other rows are, and refused where they do not fit together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.fakes import one_split
from virnucpro.errors import StoppedError
from virnucpro.models.contigs import boosted_trees
from virnucpro.training.fitting import tree_fitting
from virnucpro.training.fitting.tree_fitting import fit_trees
from virnucpro.training.training_settings import TreeSettings

INPUTS = 6
SETTINGS = TreeSettings(trees=20, leaves=7, least_contigs=5, inputs_share=0.5)


@pytest.fixture(scope="module")
def data():
    chooser = np.random.default_rng(3)
    x_CI = chooser.normal(size=(400, INPUTS)).astype(np.float32)
    return x_CI, (x_CI[:, 0] + x_CI[:, 1] * x_CI[:, 2] + chooser.normal(0, 0.3, 400) > 0.5)


def test_log_odds_are_those_of_lightgbm(data, monkeypatch):
    x_CI, is_virus_C = data
    fitted = []
    train = tree_fitting.lightgbm.train
    monkeypatch.setattr(tree_fitting.lightgbm, "train", lambda *a, **kw: fitted.append(train(*a, **kw)) or fitted[-1])
    trees = fit_trees(x_CI, is_virus_C, SETTINGS)
    expected = fitted[0].predict(x_CI, raw_score=True)
    np.testing.assert_allclose(trees.log_odds(x_CI), expected, atol=1e-12)
    right = (trees.log_odds(x_CI) > 0) == is_virus_C
    assert right.mean() > 0.8


def test_the_same_contigs_give_the_same_trees(data):
    first, again = (fit_trees(*data, SETTINGS).tensors() for _ in range(2))
    assert all(np.array_equal(first[name], again[name]) for name in first)


def test_a_row_does_not_depend_on_the_others(data, monkeypatch):
    trees = fit_trees(*data, SETTINGS)
    whole = trees.log_odds(data[0])
    monkeypatch.setattr(boosted_trees, "CONTIGS_AT_ONCE", 7)
    assert np.array_equal(trees.log_odds(data[0]), whole)
    assert np.array_equal(trees.log_odds(data[0][11:12]), whole[11:12])
    assert trees.log_odds(data[0][:0]).shape == (0,)


def test_an_input_at_the_threshold_goes_to_the_first_child():
    trees = one_split(1, 0.25)
    x_CI = np.array([[9, 0.25], [9, np.nextafter(np.float32(0.25), np.float32(1))]], dtype=np.float32)
    assert trees.log_odds(x_CI).tolist() == [-0.5, 0.5]


def test_both_labels_have_the_same_weight(data):
    """Fitted on labels that say nothing, of which most are not viral, trees lean to neither."""
    x_CI, _ = data
    rare_C = np.arange(len(x_CI)) % 10 == 0
    assert abs(np.mean(fit_trees(x_CI, rare_C, SETTINGS).log_odds(x_CI))) < 0.3


@pytest.mark.parametrize(
    "changes",
    [
        {"input_N": np.array([2], dtype=np.int16)},
        {"input_N": np.array([-1], dtype=np.int16)},
        {"input_N": np.array([0], dtype=np.int64)},
        {"children_N2": np.array([[0, ~1]], dtype=np.int32)},  # a way without an end
        {"children_N2": np.array([[1, ~1]], dtype=np.int32)},
        {"children_N2": np.array([[~2, ~1]], dtype=np.int32)},
        {"children_N2": np.array([~0, ~1], dtype=np.int32)},
        {"roots_T": np.array([1], dtype=np.int32)},
        {"threshold_N": np.array([np.nan])},
        {"threshold_N": np.array([0.0, 1.0])},
        {"values_L": np.array([0.0, np.inf])},
        {"input_N": np.array(0, dtype=np.int16)},
        {"roots_T": np.array(0, dtype=np.int32)},
        {"roots_T": np.empty(0, dtype=np.int32)},
        {"values_L": np.array(0.0)},
        {"values_L": np.zeros(2, dtype=np.float32)},
    ],
)
def test_trees_that_do_not_fit_together_are_refused(changes):
    one_split(1, 0.25).check(2)
    with pytest.raises(ValueError, match="trees of the contig model do not fit together"):
        replace(one_split(1, 0.25), **changes).check(2)


def test_a_fitting_that_is_stopped_ends(data):
    class Stop:
        def is_set(self):
            return True

    with pytest.raises(StoppedError):
        fit_trees(*data, SETTINGS, stop=Stop())
