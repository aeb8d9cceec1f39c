"""run.json comes back as it was written, is replaced as a whole, and is refused when it is something else."""

from __future__ import annotations

import json

import pytest

from tests.strategies import edit_manifest
from virnucpro.errors import OutputError, ResultError
from virnucpro.store.manifest import PredictionManifest, RunManifest, TrainingManifest, with_checksum


def manifest(**changes):
    values = {
        "run_id": "abc",
        "state": "running",
        "started": "2026-11-21T04:00:00+00:00",
        "host": "here",
        "inputs": [{"path": "/ü/in.fa", "size_bytes": 3, "sha256": "0" * 64}],
        "settings": {"precision": "fp32", "token_budget": 64},
        "plan": {"blocks": 3, "token_budget": 64, "longest_sequence_tokens": 12},
        "versions": {"torch": "2"},
        "devices": ["cpu"],
        "counts": {"records": 9, "rows": 9, "copies": 0, "truncated": 0},
    }
    return RunManifest(**{**values, **changes})


def test_a_manifest_comes_back_as_it_was_written(tmp_path):
    written = manifest(files={"embeddings.h5": "1" * 64}, counts={"records": 4, "rows": 4}, stages_s={"index": 0.25})
    written.write(tmp_path / "run.json")
    assert RunManifest.read(tmp_path / "run.json") == written


def test_a_manifest_is_plain_ascii_json_that_other_tools_can_read(tmp_path):
    manifest().write(tmp_path / "run.json")
    text = (tmp_path / "run.json").read_bytes().decode("ascii")
    assert text.endswith("}\n")
    assert json.loads(text)["inputs"][0]["path"] == "/ü/in.fa"
    assert json.loads(text)["format"] == 1


def test_a_manifest_is_replaced_as_a_whole(tmp_path):
    manifest(counts={"records": 10**9}).write(tmp_path / "run.json")
    manifest(state="complete").write(tmp_path / "run.json")
    assert RunManifest.read(tmp_path / "run.json") == manifest(state="complete")
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_what_has_no_json_form_leaves_the_old_manifest(tmp_path):
    manifest().write(tmp_path / "run.json")
    with pytest.raises(TypeError):
        manifest(settings={"x": object()}).write(tmp_path / "run.json")
    assert RunManifest.read(tmp_path / "run.json") == manifest()


def test_a_manifest_that_cannot_be_written_is_an_output_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        manifest().write(tmp_path / "file" / "run.json")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"3",
        b"{}",
        b'{"format": 2}',
        b'{"format": 1}',
        with_checksum({"format": 1}),
        b'{"format": 1, "unknown": 2}',
        b"[" * 100_000,
    ],
)
def test_what_is_not_a_manifest_is_refused(tmp_path, content):
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(ResultError, match="not a run manifest"):
        RunManifest.read(tmp_path / "run.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"plan": {}},
        {"plan": None},
        {"plan": {"blocks": "3", "token_budget": 64, "longest_sequence_tokens": 12}},
        {"settings": {"precision": "fp32"}},
        {"counts": {}},
        {"counts": []},
        {"state": "complete", "counts": {"records": 9}},
        {"inputs": [{"path": "in.fa"}]},
        {"inputs": ["in.fa"]},
        {"files": None},
        {"state": ["complete"]},
        {"ranks": [1]},
        {"counts": {"records": 9, "missing": None}},
    ],
)
def test_a_manifest_without_what_a_later_start_relies_on_is_refused(tmp_path, changes):
    manifest(**changes).write(tmp_path / "run.json")
    with pytest.raises(ResultError, match="not a run manifest"):
        RunManifest.read(tmp_path / "run.json")


def test_an_absent_manifest_is_named(tmp_path):
    with pytest.raises(ResultError, match=r"run\.json: No such file"):
        RunManifest.read(tmp_path / "run.json")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"counts": {"contigs": "many"}}, "counts.contigs: .* integer"),
        ({"counts": []}, "counts: .* dictionary"),
        ({"outputs": ["../report.html"]}, "an output that no run writes"),
        ({"outputs": ["l/precious"]}, "an output that no run writes"),
        ({"outputs": ["notes.txt"]}, "an output that no run writes"),
        ({"outputs": ["a/b_chunked500.fa"]}, "an output that no run writes"),
        ({"state": "complete"}, "'counts' without 'chunks', 'contigs', 'frames'"),
        ({"stages": {"dna": []}}, "not a run manifest"),
        ({"stages": {"dna": {"fingerprint": "", "seconds": 1, "files": [], "counts": {}}}}, "stages.dna.files: "),
        ({"inputs": [{"path": "x"}]}, "an input without path or sha256"),
        ({"format": 2}, "its format is not 1"),
        ({"kind": "else"}, "unknown 'kind'"),
        ({"kind": ["prediction"]}, "unknown 'kind'"),
        ({"what": 1}, "what: "),
    ],
)
def test_an_edited_manifest_of_a_prediction_is_refused(tmp_path, changes, says):
    texts = dict.fromkeys(("run_id", "state", "started", "host", "fingerprint"), "")
    mappings = {name: {} for name in ("settings", "output_settings", "models", "versions")}
    whole = PredictionManifest(**texts, **mappings, inputs=[], devices=[])
    whole.write(tmp_path / "run.json")
    assert PredictionManifest.read(tmp_path / "run.json") == whole
    edit_manifest(tmp_path / "run.json", lambda values: values.update(changes))
    with pytest.raises(ResultError, match=says):
        PredictionManifest.read(tmp_path / "run.json")


def test_the_manifest_of_another_kind_of_run_is_named(tmp_path):
    manifest().write(tmp_path / "run.json")
    for kind, name in ((PredictionManifest, "a prediction"), (TrainingManifest, "a training")):
        with pytest.raises(ResultError, match=f"is of an embedding run, not of {name}: use another output folder"):
            kind.read(tmp_path / "run.json")
