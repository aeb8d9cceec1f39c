"""The training as a flow on a real, private Prefect server: the weights of the command, its artifacts, its errors."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("prefect")

from prefect.testing.utilities import prefect_test_harness

from flows.train import run_from_command_line, train
from tests.flows.on_a_server import FirstWorkerKiller, artifact, worker_processes
from tests.settings import training_config
from tests.trainings import make_genomes
from virnucpro.durable import sha256_of
from virnucpro.errors import BadInputError, SettingsChangedError
from virnucpro.pipeline.hardware.device_claim import claim_devices
from virnucpro.report.prediction.artifacts import markdown_text
from virnucpro.training.classifier_training import run_training

TRAINING = {"num_fragments": 60, "most_epochs": 2, "name": "mine"}


@pytest.fixture(scope="module", autouse=True)
def prefect_server():
    with prefect_test_harness(server_startup_timeout=180):
        yield


def weights(out):
    return {path.name: sha256_of(path) for path in out.glob("*.safetensors*")}


@pytest.mark.slow
@pytest.mark.long
def test_the_flow_gives_the_weights_of_the_command_though_a_worker_is_killed(tmp_path):
    files = make_genomes(tmp_path, codons=600)
    inputs, out = [str(path) for path in files], tmp_path / "flow"
    settings = {"training": TRAINING, "hardware": {"devices": "cpu", "workers": 1}}
    killer = FirstWorkerKiller(kills=1)
    killer.start()
    state = train(inputs, str(out), **settings, return_state=True)
    killer.done.set()
    assert state.is_completed(), state.message
    assert len(killer.killed) == 1
    assert state.message.startswith("mine: AUROC ")
    assert worker_processes() == {}
    assert "# mine" in artifact("train-card")
    assert artifact("train-classifier") == markdown_text(str(out / "MODEL_CARD.md"))
    total, *rows = json.loads(artifact("train-cost"))
    assert total["restarts"] == 1
    assert {"dna/embed", "train", "evaluate"} < {row["stage"] for row in rows if row["CPU seconds"] > 0.01}
    assert train(inputs, str(out), **settings, return_state=True).result().was_complete

    config = training_config(**TRAINING)
    run_training(files, tmp_path / "plain", config, claim_devices("cpu", workers=1))
    assert len(weights(out)) == 2
    assert weights(tmp_path / "plain") == weights(out)
    with pytest.raises(SettingsChangedError, match="seed was 1, now 2"):
        run_from_command_line(labelled=inputs, output_dir=str(out), **{**settings, "training": {**TRAINING, "seed": 2}})


@pytest.mark.slow
def test_labels_that_cannot_be_used_fail_with_the_sentence_of_the_command_line(tmp_path, caplog):
    (tmp_path / "genomes.fa").write_text(">a\nACGT\n")
    with pytest.raises(BadInputError, match="has no label"):
        run_from_command_line(
            labelled=[str(tmp_path / "genomes.fa")], output_dir=str(tmp_path / "out"), hardware={"devices": "cpu"}
        )
    assert "Traceback" not in caplog.text
    assert not (tmp_path / "out").exists()
