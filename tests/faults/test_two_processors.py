"""Rows of two processors in one result: it promises the tolerance and names both, and ``verify`` says so."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from functools import partial

import pytest
import torch

from tests.faults.processes import RowsFound, compare_rows, hash_command, make_proteins, wait_until
from tests.predictions import hash_prediction, make_contigs, predict
from tests.strategies import MadeRun
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.hardware.device_claim import DeviceClaim
from virnucpro.pipeline.multi_gpu_inference import embed_job, run_embedding
from virnucpro.pipeline.run.verification import verify_run
from virnucpro.run_layout import RunLayout
from virnucpro.store import schema
from virnucpro.store.manifest import PredictionManifest
from virnucpro.store.parts import part_paths

HERE = f"CPU with {torch.backends.cpu.get_cpu_capability()}"
OTHER = "CPU with DEFAULT"
has_two = [
    pytest.mark.may_skip,
    pytest.mark.skipif(HERE == OTHER, reason="this processor has one capability"),
]


@pytest.fixture(autouse=True)
def _on_node_1(monkeypatch):
    monkeypatch.setenv("VIRNUCPRO_HOST_NAME", "node-1")


def go_to_another_processor(monkeypatch):
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    monkeypatch.setenv("VIRNUCPRO_HOST_NAME", "node-2")


@pytest.mark.parametrize("stopped", [pytest.param(True, marks=has_two), False])
def test_a_run_that_goes_on_with_another_processor_promises_the_tolerance_and_names_both(
    tmp_path, seed, monkeypatch, stopped
):
    sequences = make_proteins(tmp_path / "in.fasta", random.Random(seed), 80)
    command, out = hash_command(tmp_path / "run", tmp_path / "in.fasta", slow_s=0.05), tmp_path / "out"
    if stopped:
        with command.running(out, workers=1) as process:
            wait_until(lambda: part_paths(RunLayout(out).parts_dir), what="a part")
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 128 + signal.SIGTERM
        go_to_another_processor(monkeypatch)
    assert command.run(out, workers=1) == 0
    assert compare_rows(out, sequences) == RowsFound()
    manifest = json.loads((out / "run.json").read_text())
    verify = [sys.executable, "-m", "virnucpro", "verify", str(out)]
    said = subprocess.run(verify, capture_output=True, text=True, check=True, timeout=120).stdout
    assert "complete and intact" in said
    if stopped:
        assert manifest["promise"] == "tolerance"
        assert manifest["processors"] == {HERE: ["node-1"], OTHER: ["node-2"]}
        named = f"different processors ({HERE} on node-1; {OTHER} on node-2)"
        assert named in said
    else:
        assert (manifest["promise"], manifest["processors"]) == ("bytes", {HERE: ["node-1"]})
        assert "processors" not in said


@pytest.mark.parametrize("is_known", [True, False])
def test_rows_of_an_earlier_version_are_of_an_unknown_processor(tmp_path, monkeypatch, is_known):
    made = MadeRun(tmp_path, [(f"s{n}", "MKV" * n) for n in range(1, 20)])
    if not is_known:
        monkeypatch.setattr(schema, "PROCESSORS", "absent")
    made.write_part([0, 1])
    monkeypatch.undo()
    monkeypatch.setenv("VIRNUCPRO_HOST_NAME", "node-1")
    for _ in range(2):  # the second finds it complete
        result = run_embedding([made.fasta], made.layout.output_dir, made.config, [CPU])
        assert result.num_rows == 19
        assert result.promise == ("bytes" if is_known else "tolerance")
        named = "unknown processor on an unknown host" in " ".join(result.notes())
        assert named is not is_known
        assert bool(verify_run(made.layout.output_dir).notes) is not is_known


@pytest.mark.may_skip
@pytest.mark.skipif(HERE == OTHER, reason="this processor has one capability")
def test_a_prediction_whose_models_ran_on_two_processors_names_both(tmp_path, monkeypatch):
    make_contigs(tmp_path / "in.fasta", count=4)
    claim = DeviceClaim.of([CPU])

    def embed(job, **arguments):
        if job.stage == "protein":
            go_to_another_processor(monkeypatch)
        return embed_job(job, **arguments)

    config = hash_prediction(tmp_path)
    of_workers = partial(embed, claim=claim, workers=1, limits=None, telemetry=None, stop=None)
    result = predict([tmp_path / "in.fasta"], tmp_path / "out", config, embed=of_workers)
    (named,) = [note for note in result.notes if f"different processors ({HERE} on node-1; {OTHER} on node-2)" in note]
    stages = PredictionManifest.read(tmp_path / "out" / "run.json").stages
    assert (stages["dna"].processors, stages["protein"].processors) == ({HERE: ["node-1"]}, {OTHER: ["node-2"]})
    assert verify_run(tmp_path / "out").notes == [named]
