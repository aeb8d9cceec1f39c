"""A classifier's contig model scores every contig, from letters and embeddings that anybody can put together again."""

from __future__ import annotations

import itertools
import json
import random
import shutil

import h5py
import numpy as np
import pytest

from tests.fakes import HASH_WIDTH, faulty_config
from tests.predictions import hash_prediction, make_contigs, predict, predict_forked, tables
from tests.settings import prediction_config
from tests.strategies import write_fasta
from virnucpro.calls import contig_scores, frame_order
from virnucpro.calls.contig_calls import TOO_LITTLE
from virnucpro.calls.viral_regions import bed_lines, find_regions
from virnucpro.data.frames import chunk_bounds
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.errors import ExitCode, SettingsChangedError, WeightsError
from virnucpro.models.classifier_files.card import CONTIG_WEIGHTS_NAME
from virnucpro.models.contigs.contig_model import load_contig_model
from virnucpro.models.contigs.nucleotide_codes import OTHER, masked
from virnucpro.pipeline.run.verification import verify_run
from virnucpro.run_layout import PredictionLayout
from virnucpro.store.contig_table import Call, read_contig_calls

SEQUENCES = {
    "unknown": "N" * 700,
    "no_word": "NNACGTANNNACG",
    "stops": "AGCCTTAGCTTACATCGCGGGATCGCCGCCGGACCTTGATCGGGCTCCTACTATGCCTTACGCCAGTAATTGAGTTGATAGTGACTAGCA",
    "lower": "",
    "upper": "",
    "holed": "",
}
"""What was written besides random contigs; the empty ones are of random codons."""


def run(inputs, out, config, *, code=0, **arguments):
    """Run in a forked process; return the manifest."""
    ended = predict_forked(inputs, out, config, **arguments)
    assert ended.code == code, ended.errors
    return json.loads((out / "run.json").read_text())


def copy_of(folder, tmp_path):
    """Copy a finished run's folder; return the copy."""
    return shutil.copytree(folder / "out", tmp_path / "out")


def calls_of(out):
    return {call.contig: call for call in read_contig_calls(out / "contigs.tsv")}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of random and odd contigs: its folder, its settings and its contigs."""
    folder = tmp_path_factory.mktemp("finished")
    contigs = make_contigs(folder / "in.fa", count=8)
    codons = "".join(random.Random(3).choices([a + b + c for a in "ACG" for b in "ACGT" for c in "ACGT"], k=300))
    of_codons = {"lower": codons.lower(), "upper": codons, "holed": f"{codons[:400]}NNNNNN{codons[406:]}"}
    contigs |= SEQUENCES | of_codons
    contigs["holed_long"] = f"{contigs['long'][:3000]}{'N' * 5000}{contigs['long'][8000:]}"
    write_fasta(folder / "in.fa", list(contigs.items()))
    config = hash_prediction(folder, contig_model=True)
    run([folder / "in.fa"], folder / "out", config)
    return folder, config, contigs


@pytest.fixture(scope="module")
def scored_by_hand(finished):
    """The function from letters and some chunks of a contig to the model's score of them, one at a time."""
    folder, config, contigs = finished
    model = load_contig_model(config.classifier_dir, config.card)
    rows = []
    for name in ("dna", "protein"):
        with h5py.File(folder / "out" / name / "embeddings.h5") as file:
            ids = [one.decode() for one in file["sequence_ids"][()]]
            rows.append(dict(zip(ids, file["embeddings"][()].astype(np.float64), strict=True)))

    def score(name, first, last):
        starts, ends = chunk_bounds(len(contigs[name]), 500)
        start, end = int(starts[first]), int(ends[last - 1])
        number = 1 if end - start <= 20_000 else 3  # tiles
        limits = [start + (end - start) * tile // number for tile in range(number + 1)]
        codes = [masked(contigs[name][one:other].upper().encode()) for one, other in itertools.pairwise(limits)]
        weights = [int((one != OTHER).sum()) for one in codes]
        features = np.average([model.features.of(one) for one in codes], axis=0, weights=weights)
        chunks = {f"{name}_chunk_{number + 1}" for number in range(first, last)}
        frames = [one for one in rows[0] if one[:-2] in chunks]
        means = [np.mean([of[one] for one in frames], axis=0) if frames else np.zeros(HASH_WIDTH) for of in rows]
        (p_virus,) = model.probabilities(
            features[None].astype(np.float32),
            *(mean[None].astype(np.float32) for mean in means),
            np.array([len(frames)]),
            np.array([last - first]),
        )
        return float(p_virus)

    return score


def test_every_contig_with_a_word_has_a_score_that_can_be_made_by_hand(finished, scored_by_hand):
    folder, config, contigs = finished
    calls = calls_of(folder / "out")
    assert list(calls) == list(contigs)
    scores = {name: call.score for name, call in calls.items()}
    for name in set(contigs) - {"unknown", "no_word"}:
        expected = scored_by_hand(name, 0, -(-len(contigs[name]) // 500))
        assert scores[name] == pytest.approx(expected, abs=1e-6)
        assert calls[name].call == (Call.VIRUS if scores[name] >= config.threshold else Call.NOT_VIRUS)
    assert len({round(score, 3) for score in scores.values() if score is not None}) > 5
    assert scores["lower"] == scores["upper"] != scores["holed"]
    assert verify_run(folder / "out").problems == []


def test_a_contig_whose_score_is_the_threshold_is_called_viral(finished, tmp_path):
    folder, _, _ = finished
    score = calls_of(folder / "out")["long"].score
    out = copy_of(folder, tmp_path)
    called = []
    for threshold in (score, float(np.nextafter(score, 1))):
        run(
            [folder / "in.fa"],
            out,
            hash_prediction(folder, contig_model=True, threshold=threshold),
        )
        called.append(calls_of(out)["long"].call)
    assert [call == Call.VIRUS for call in called] == [True, False]


def test_contigs_without_an_open_frame_or_without_a_word_say_so(finished):
    folder, _, _ = finished
    calls = calls_of(folder / "out")
    for name in ("unknown", "no_word"):
        assert (calls[name].call, calls[name].score) == (Call.UNDECIDED, None)
        assert calls[name].reason == TOO_LITTLE
    stops = calls["stops"]
    assert (stops.frames, stops.max_score, stops.frame_support) == (0, None, None)
    assert stops.call in {Call.VIRUS, Call.NOT_VIRUS}
    assert stops.reason == "no open frame: scored by its sequence alone"
    assert calls["upper"].reason == ""
    counts = json.loads((folder / "out/run.json").read_text())["counts"]
    closed = [call for call in calls.values() if call.score is not None and not call.frames]
    assert counts["by_sequence"] == len(closed) > 1
    assert counts["no_open_frame"] == 0
    assert counts["undecided"] == 2


@pytest.mark.parametrize("name", ["long", "holed_long"])
def test_along_a_long_contig_a_chunk_scores_with_its_neighbours(finished, scored_by_hand, name):
    folder, _, contigs = finished
    chunks = len(contigs[name]) // 500
    lines = [line.split("\t") for line in (folder / "out/tracks.bedgraph").read_text().splitlines()[1:]]
    found = {(int(start) + int(end)) // 2 // 500: float(p) for of, start, end, p in lines if of == name}
    unknown = set(range(7, 15)) if name == "holed_long" else set()  # windows of unknown letters only
    assert set(range(chunks)) - set(found) == unknown
    expected = {chunk: scored_by_hand(name, max(chunk - 1, 0), min(chunk + 2, chunks)) for chunk in found}
    assert found == pytest.approx(expected, abs=1e-4)
    assert np.std(list(found.values())) > 0.005


def test_regions_are_of_windows_whatever_the_threshold_is(finished, tmp_path):
    folder, _, _ = finished
    windows = np.fromfile(folder / "out/work/window_scores.f32", np.float32)
    assert len(windows) == 48
    out = copy_of(folder, tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in (out / "work").iterdir()}
    (out / "dna/embeddings.h5").unlink()
    regions = []
    for threshold in (float(np.nanmin(windows)) / 2, 1 - (1 - float(np.nanmax(windows))) / 2):
        run(
            [folder / "in.fa"],
            out,
            hash_prediction(folder, contig_model=True, threshold=threshold),
        )
        regions.append((out / "viral_regions.bed").read_text().splitlines(keepends=True)[1:])
    bounds = chunk_bounds(12_000, 500)
    of_long, of_holed = (
        bed_lines(name, find_regions(*bounds, some))
        for name, some in zip(("long", "holed_long"), (windows[:24], windows[24:]), strict=True)
    )
    assert "".join(regions[0]) == "".join(regions[1]) == of_long + of_holed != ""
    after = {path.name: path.stat().st_mtime_ns for path in (out / "work").iterdir()}
    assert {name: after[name] for name in before if name.endswith("32")} == {
        name: at for name, at in before.items() if name.endswith("32")
    }


def test_scores_depend_neither_on_batches_nor_on_segments(finished, tmp_path, monkeypatch):
    folder, config, _ = finished
    written = PredictionLayout(folder / "out")
    expected = [path.read_bytes() for path in (written.contig_scores, written.window_scores)]
    model = load_contig_model(config.classifier_dir, config.card)
    again = PredictionLayout(tmp_path)
    again.work_dir.mkdir()

    def scores():
        index = SequenceIndex.open(written.contig_index)
        order = frame_order.FrameOrder(index, written.open_frames, chunk_nt=config.chunk_nt, min_nt=0)
        rows = {name: folder / "out" / name / "embeddings.h5" for name in ("dna", "protein")}
        contig_scores.score_contigs(order, model, (again.contig_scores, again.window_scores), **rows)
        return [path.read_bytes() for path in (again.contig_scores, again.window_scores)]

    assert scores() == expected
    monkeypatch.setattr(frame_order, "CHUNKS_AT_ONCE", 3)
    monkeypatch.setattr(frame_order, "CONTIGS_AT_ONCE", 2)
    assert scores() == expected
    for chunks in (1, 2, 5, 600):
        monkeypatch.setattr(contig_scores, "SEGMENT_NT", chunks * 500 - 499)
        contigs, windows = scores()
        assert windows == expected[1]
        assert contigs == expected[0]


def test_frames_are_scored_as_without_a_contig_model(finished, tmp_path):
    folder, config, _ = finished
    without = hash_prediction(tmp_path)
    run([folder / "in.fa"], tmp_path / "out", without)
    expected, found = tables(tmp_path / "out"), tables(folder / "out")
    same = {name for name in expected if name.startswith(("prediction_results", "in_identified"))}
    assert len(same) == 4
    assert {name: found[name] for name in same} == {name: expected[name] for name in same}
    assert not PredictionLayout(tmp_path / "out").contig_scores.exists()
    assert without.fingerprint != config.fingerprint
    assert calls_of(tmp_path / "out")["stops"].call is Call.NO_OPEN_FRAME
    with pytest.raises(SettingsChangedError, match="contig model sha256"):
        predict([folder / "in.fa"], tmp_path / "out", config)


def test_damaged_scores_are_made_again(finished, tmp_path):
    folder, config, _ = finished
    out = copy_of(folder, tmp_path)
    for name in ("contig_scores.f32", "window_scores.f32"):
        (out / "work" / name).write_bytes(b"")
        (out / "contigs.tsv").unlink()
        run([folder / "in.fa"], out, config)
        assert tables(out) == tables(folder / "out")


def test_what_could_not_be_embedded_is_missing_from_a_score_and_the_reason_says_so(tmp_path):
    make_contigs(tmp_path / "in.fa", count=3)
    healthy = faulty_config(tmp_path / "control.json", {"times": 0, "before_batch": -1}, allow_empty=True)
    run([tmp_path / "in.fa"], tmp_path / "good", hash_prediction(tmp_path, protein=healthy, contig_model=True))
    records = [one.split() for one in (tmp_path / "good/in_identified_protein.faa").read_text().split(">")[1:]]
    good = calls_of(tmp_path / "good")
    few = next(call for call in good.values() if 0 < call.frames < 20)
    lost = {protein: "error" for name, protein in records if name.startswith(f"{few.contig}_")}
    some = dict([next((protein, "error") for name, protein in records if name.startswith("long_"))])
    plan = {"poison": lost | some, "times": 0}
    poisoned = faulty_config(tmp_path / "control.json", plan, allow_empty=True)
    config = hash_prediction(tmp_path, protein=poisoned, contig_model=True)
    out = tmp_path / "out"
    run([tmp_path / "in.fa"], out, config, code=ExitCode.PARTIAL)
    calls = calls_of(out)
    alone = "none of its frames could be embedded, so scored by its sequence alone: see failed_sequences.tsv"
    assert calls[few.contig].reason == alone
    assert calls[few.contig].score not in {None, few.score}
    whole = good["long"].frames
    assert calls["long"].reason == f"1 of its {whole} frames could not be embedded: see failed_sequences.tsv"
    assert calls["long"].score is not None
    (tmp_path / "control.json").write_text(json.dumps({"times": 0, "before_batch": -1}))  # mended
    run([tmp_path / "in.fa"], out, config)
    assert tables(out) == tables(tmp_path / "good")


def test_weights_of_another_contig_model_are_refused_before_anything_is_written(finished):
    _, config, _ = finished
    path = config.classifier_dir / CONTIG_WEIGHTS_NAME
    data = path.read_bytes()
    path.write_bytes(data[:-1] + b"?")
    try:
        with pytest.raises(WeightsError, match="its card says"):
            prediction_config(classifier=config.classifier_dir)
    finally:
        path.write_bytes(data)


def test_contigs_are_called_by_the_share_of_viruses_that_was_given_and_resumed_runs_keep_it(finished, tmp_path):
    folder, config, _ = finished
    out = copy_of(folder, tmp_path)
    before = calls_of(out)
    assert {call.posterior for call in before.values()} == {call.fdr for call in before.values()} == {None}
    manifest = run([folder / "in.fa"], out, hash_prediction(folder, contig_model=True, prior="0.2"))
    assert manifest["sample"] | {"fdr": None} == {
        "share": 0.2,
        "interval": None,
        "why_off": "",
        "virus_from": pytest.approx(0.8),
        "not_virus_below": pytest.approx(0.8),
        "fdr": None,
    }
    given = calls_of(out)
    scored = sorted((call for call in given.values() if call.score is not None), key=lambda call: -call.score)
    others = 0.0
    for number, call in enumerate(scored, start=1):
        assert call.score == before[call.contig].score
        posterior = 0.2 * call.score / (0.2 * call.score + 0.8 * (1 - call.score))
        others += 1 - posterior
        assert call.posterior == pytest.approx(posterior, rel=1e-5)
        assert call.fdr == pytest.approx(others / number, abs=0.01)
        assert call.call == (Call.VIRUS if posterior >= config.threshold else Call.NOT_VIRUS)
    assert given["unknown"].posterior is given["unknown"].fdr is None
    assert any(call.call != before[call.contig].call for call in scored)
    kept = hash_prediction(folder, contig_model=True, not_given=frozenset({"prior", "fdr", "threshold"}))
    assert predict([folder / "in.fa"], out, kept).was_complete
    strict = run([folder / "in.fa"], out, hash_prediction(folder, contig_model=True, prior="0.9", fdr=1e-6))
    assert (strict["counts"]["virus"], strict["sample"]["virus_from"]) == (0, None)
    assert "no score has so low an expected false discovery rate" in {call.reason for call in calls_of(out).values()}
    lowest = scored[len(scored) // 2]
    some = run([folder / "in.fa"], out, hash_prediction(folder, contig_model=True, prior="0.2", fdr=lowest.fdr + 1e-5))
    assert {call.contig for call in calls_of(out).values() if call.call is Call.VIRUS} == {
        call.contig for call in scored if call.fdr <= lowest.fdr
    }
    assert some["sample"]["fdr"] == pytest.approx(lowest.fdr, abs=1e-5)
    off = run([folder / "in.fa"], out, hash_prediction(folder, contig_model=True, prior="off"))
    assert calls_of(out) == before
    assert not any("hare of viruses" in note for note in off["notes"])


def test_the_share_of_viruses_is_estimated_from_enough_scores_and_said(finished, tmp_path, monkeypatch):
    folder, _, _ = finished
    scored = sum(call.score is not None for call in calls_of(folder / "out").values())
    few = json.loads((folder / "out/run.json").read_text())
    assert few["sample"]["share"] is None
    note = "to estimate the share of viruses: calls use the threshold "
    assert f"Too few contigs ({scored}; 200 needed) {note}{few['sample']['virus_from']:g}" in few["notes"]
    monkeypatch.setattr("virnucpro.pipeline.prediction.sample.LEAST_PRIOR_CONTIGS", scored)
    again = run([folder / "in.fa"], tmp_path / "fresh", hash_prediction(folder, contig_model=True))
    low, high = again["sample"]["interval"]
    assert low <= again["sample"]["share"] <= high
    assert any("Share of viruses among the contigs, estimated" in note for note in again["notes"])
    page = (tmp_path / "fresh/report.html").read_text()
    assert "share of viruses, estimated" in page
    assert "expected share of others among all with this score" in page
