"""The file of a run for MultiQC, which takes the categories of one file for all, and no sample without a number."""

from __future__ import annotations

import json

from virnucpro.pipeline.prediction.result import _write_multiqc
from virnucpro.run_layout import PredictionLayout


def test_it_has_every_category_the_number_of_viruses_and_numbers_that_are_not_zero(tmp_path):
    layout = PredictionLayout(tmp_path / "gut")
    layout.output_dir.mkdir()
    _write_multiqc(layout, {"contigs": 3, "virus": 0, "not_virus": 3, "undecided": 0})
    content = json.loads(layout.multiqc.read_text())
    assert content["data"] == {"gut": {"virus": 0, "not_virus": 3}}
    assert [*content["categories"]] == ["virus", "not_virus", "undecided", "too_short", "no_open_frame"]
