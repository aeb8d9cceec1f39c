"""Predictions with a cascade: contigs with a confident composition score keep it, others have that of their frames."""

from __future__ import annotations

import csv
from dataclasses import replace

import numpy as np
import pytest

from tests.predictions import hash_prediction, make_contigs, predict
from virnucpro.choices import DEFAULT_CLASSIFIER
from virnucpro.models.classifier_files.card import locate_classifier, read_card
from virnucpro.models.contigs.contig_model import CompositionModel
from virnucpro.pipeline.prediction.settings import Cascade
from virnucpro.pipeline.run.verification import verify_run

OF_FRAMES = ("open_chunks", "viral_chunks", "frames", "viral_frames", "frame_support", "max_score")


def rows(out):
    with (out / "contigs.tsv").open() as file:
        return {row["contig"]: row for row in csv.DictReader(file, delimiter="\t")}


def by_composition(config, cascade):
    folder = locate_classifier(DEFAULT_CLASSIFIER)
    return replace(config, composition=CompositionModel(folder, read_card(folder)), cascade=cascade)


@pytest.mark.parametrize("contig_model", [pytest.param(False, marks=[pytest.mark.slow, pytest.mark.long]), True])
def test_embedded_contigs_are_scored_as_without_it_and_others_by_composition(tmp_path, contig_model):
    contigs = make_contigs(tmp_path / "in.fa", count=25)
    everything = hash_prediction(tmp_path, contig_model=contig_model)
    predict([tmp_path / "in.fa"], tmp_path / "off", everything)
    off = rows(tmp_path / "off")
    nothing = by_composition(everything, Cascade(2.0, 3.0))
    none = predict([tmp_path / "in.fa"], tmp_path / "none", nothing)
    composition = {name: row["score"] for name, row in rows(tmp_path / "none").items()}
    assert (none.counts["embedded"], none.counts["frames"]) == (sum(not score for score in composition.values()), 0)
    low, high = np.quantile([float(score) for score in composition.values() if score], [0.3, 0.7])
    between = by_composition(everything, Cascade(low, high))
    result = predict([tmp_path / "in.fa"], tmp_path / "between", between)
    found = rows(tmp_path / "between")
    assert list(found) == list(contigs)
    is_embedded = {name: not score or low <= float(score) <= high for name, score in composition.items()}
    assert 3 < sum(is_embedded.values()) == result.counts["embedded"] < len(contigs) - 3
    for name, row in found.items():
        assert row["embedded"] == ("yes" if is_embedded[name] else "no")
        expected = off[name] if is_embedded[name] else dict.fromkeys(OF_FRAMES, "") | {"score": composition[name]}
        assert {column: row[column] for column in (*OF_FRAMES, "score")} == {
            column: expected[column] for column in (*OF_FRAMES, "score")
        }
    frames = (tmp_path / "off" / "prediction_results.txt").read_text().splitlines()[1:]
    of_embedded = [line for line in frames if is_embedded[line.partition("_chunk_")[0]]]
    assert (tmp_path / "between" / "prediction_results.txt").read_text().splitlines()[1:] == of_embedded
    for out in ("none", "between"):
        assert verify_run(tmp_path / out).problems == []
    assert "tables of frames hold only these" in " ".join(result.notes)
    page = (tmp_path / "between" / "report.html").read_text()
    looked_at = sum(int(row["chunks"]) for row in found.values() if row["embedded"] == "yes")
    assert f"of {looked_at} chunks of embedded contigs (" in page
    assert f"not embedded it is the composition score by {DEFAULT_CLASSIFIER}" in page
    assert "not embedded it is" not in (tmp_path / "off" / "report.html").read_text()
    fingerprints = {next(iter(table.values()))["fingerprint"] for table in (off, found)}
    assert len(fingerprints) == 2, "scores of a cascade are not those of the classifier alone"


@pytest.mark.slow
@pytest.mark.long
def test_windows_along_long_contigs_come_from_what_scored_the_contig(tmp_path):
    make_contigs(tmp_path / "in.fa", count=3)
    config = hash_prediction(tmp_path)
    tracks = {}
    for name, cascade in (("all", Cascade(0.0, 1.0)), ("none", Cascade(2.0, 3.0))):
        predict([tmp_path / "in.fa"], tmp_path / name, by_composition(config, cascade))
        tracks[name] = (tmp_path / name / "tracks.bedgraph").read_text().splitlines()[1:]
    predict([tmp_path / "in.fa"], tmp_path / "off", config)
    assert tracks["all"] == (tmp_path / "off" / "tracks.bedgraph").read_text().splitlines()[1:]
    assert len(tracks["none"]) > 10
    assert tracks["none"] != tracks["all"]


def test_a_table_with_a_cascade_is_read_back(tmp_path):
    from virnucpro.store.contig_table import read_contig_calls

    make_contigs(tmp_path / "in.fa", count=6)
    predict([tmp_path / "in.fa"], tmp_path / "out", by_composition(hash_prediction(tmp_path), Cascade(2.0, 3.0)))
    calls = list(read_contig_calls(tmp_path / "out" / "contigs.tsv"))
    assert [(call.embedded, call.frames) for call in calls if call.score is not None] == [(False, None)] * sum(
        call.score is not None for call in calls
    )
