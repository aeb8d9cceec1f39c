"""The page of models: its tables can be made of registry and results."""

from __future__ import annotations

import json

import pytest

from benchmarks import model_zoo
from tests.conftest import REPOSITORY
from virnucpro.models.registry import MODELS

PAGE = REPOSITORY / "docs" / "models.md"


def test_every_combination_is_of_registered_models_and_has_its_rows_on_the_page():
    page = PAGE.read_text()
    for one in model_zoo.ZOO:
        assert page.count(f"| `{one.name}` |") == 2
        assert {one.dna, one.protein} <= set(MODELS)


def test_a_measured_classifier_has_its_figures_in_the_table(tmp_path, monkeypatch):
    interval = {"value": 0.98765, "low": 0.9, "high": 0.99}
    stratum = {"contigs": 600, "auroc": interval}
    overall = stratum | {"recall_at_1_percent_false_positives": interval | {"value": 0.81}, "calibration_error": None}
    table = {"overall": overall, "by_length": {"up to 500 nt": {"auroc": interval | {"value": 0.951}}}}
    (tmp_path / "evaluation_published-500.json").write_text(json.dumps({"tables": [table]}))
    monkeypatch.setattr(model_zoo, "RESULTS", tmp_path)
    rows = [line for line in model_zoo.accuracy().splitlines() if "`published-500`" in line]
    shown = ["0.988 (0.900 to 0.990)", "0.951 (0.900 to 0.990)", "", "", "0.810 (0.900 to 0.990)", ""]
    assert rows == [f"| `published-500` | 600 | {' | '.join(shown)} |"]
    assert model_zoo.accuracy().count("not measured") == len(model_zoo.ZOO) - 1


@pytest.mark.parametrize("name", model_zoo.MARKS)
def test_the_page_has_one_place_for_each_table(name):
    page = PAGE.read_text()
    assert [page.count(mark) for mark in model_zoo.MARKS[name]] == [1, 1]
