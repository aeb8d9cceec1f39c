"""Numbers in the tables are those that numpy prints."""

from __future__ import annotations

import numpy as np
import pytest

from virnucpro.calls.classification import texts_of


def test_numbers_are_printed_as_numpy_prints_float32():
    chooser = np.random.default_rng(3)
    exponents = chooser.uniform(-46, 0, 20_000)
    values = np.concatenate(
        [
            chooser.random(20_000, dtype=np.float32),
            (10.0**exponents).astype(np.float32),
            1 - (10.0 ** chooser.uniform(-8, 0, 5_000)).astype(np.float32),
            np.nextafter(np.float32(1e-4), np.array([0, 1], np.float32)),
            np.array([0.0, 1.0, 0.5, 1e-4, 1e-5, 0.12100612, 0.8789939, 1e-45], np.float32),
        ]
    )
    assert texts_of(values) == [str(value) for value in values]
    assert texts_of(values[::2]) == [str(value) for value in values[::2]]
    assert texts_of(values[:0]) == []


@pytest.mark.data
def test_the_recorded_scores_are_printed_as_they_were_recorded(data_dir):
    lines = (data_dir / "golden/reference_vanilla_output_prediction_results.txt").read_text().splitlines()[1:]
    texts = [text for line in lines for text in line.split("\t")[2:]]
    assert texts_of(np.array([float(text) for text in texts], np.float32)) == texts
    assert len(texts) == 8
