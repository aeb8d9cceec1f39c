"""The prediction as a flow on a real, private Prefect server: its tables, its artifacts, its final states."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from types import SimpleNamespace

import pytest

from virnucpro.store.results import forms

pytest.importorskip("prefect")

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.context import FlowRunContext
from prefect.states import Running, Scheduled
from prefect.testing.utilities import prefect_test_harness

from flows.predict import predict, run_from_command_line
from flows.run.artifacts import REPORTS_URL
from flows.run.names import run_name
from tests.flows.on_a_server import FirstWorkerKiller, artifact, artifacts, worker_processes
from tests.predictions import real_classifier, tables
from tests.strategies import write_fasta
from virnucpro.allowed_roots import DATA_ROOTS
from virnucpro.errors import BadInputError, ClassifierMismatchError
from virnucpro.pipeline.prediction.composition import Composition
from virnucpro.pipeline.run.verification import verify_run
from virnucpro.report.prediction.artifacts import markdown_text
from virnucpro.run_layout import PredictionLayout


@pytest.fixture(scope="module", autouse=True)
def prefect_server():
    with prefect_test_harness(server_startup_timeout=180):
        yield


@pytest.fixture
def contigs(tmp_path):
    """Two contigs with open frames and one without."""
    records = [("a", "ATGGCC" * 200), ("none", "CTAACTAACTAGTTAGTTAG" * 4), ("b", "GCAGTT" * 120)]
    return write_fasta(tmp_path / "in.fa", records)


@pytest.mark.slow
def test_the_flow_calls_contigs_survives_a_killed_worker_and_leaves_its_artifacts(tmp_path, contigs, monkeypatch):
    monkeypatch.setattr(forms, "AUTO_SHARDED_ROWS", 1)  # the classification reads single files, however large
    out = tmp_path / "out"
    settings = {"classifier": str(real_classifier(tmp_path)), "hardware": {"devices": "cpu", "workers": 1}}
    killer = FirstWorkerKiller(kills=1)
    killer.start()
    state = predict([str(contigs)], str(out), **settings, return_state=True)
    killer.done.set()
    assert state.is_completed(), state.message
    assert len(killer.killed) == 1
    assert "of 3 contigs are called viral" in state.message
    assert worker_processes() == {}
    assert verify_run(out).problems == []
    assert "3" in artifact("predict-summary")
    assert (out / "dna" / "embeddings.h5").exists()
    (of_cost,) = artifacts("predict-cost")
    total, *rows = json.loads(of_cost["data"])
    assert total["CPU seconds"] == json.loads((out / "run.json").read_text())["cost"]["total"]["cpu_seconds"]
    assert {"dna/embed", "protein/embed", "classify"} < {row["stage"] for row in rows}
    assert total["restarts"] == 1
    assert artifacts("embed-cost") == [], "those of its parts are in this one"
    assert '"contig": "a"' in artifact("predict-contigs")
    assert artifact("predict-report") == markdown_text(str(out / "report.html"))
    monkeypatch.setenv(REPORTS_URL, "https://prefect.example.org/reports/")
    monkeypatch.setenv(DATA_ROOTS, str(tmp_path))
    again = predict([str(contigs)], str(out), **settings, return_state=True)
    assert again.result().was_complete
    assert len(artifacts("predict-cost")) == 1, "it computed nothing"
    assert artifact("predict-report") == f"[report.html](https://prefect.example.org/reports{out}/report.html)"


@pytest.mark.slow
@pytest.mark.long
def test_the_flow_gives_the_tables_that_the_library_gives(tmp_path, contigs):
    from virnucpro import predict_fasta

    classifier = real_classifier(tmp_path)
    predict(
        [str(contigs)], str(tmp_path / "flow"), classifier=str(classifier), hardware={"devices": "cpu", "workers": 2}
    )
    calls = predict_fasta(contigs, tmp_path / "plain", classifier=classifier, devices="cpu", workers=1)
    assert tables(tmp_path / "flow") == tables(tmp_path / "plain")
    assert [call.contig for call in calls] == ["a", "none", "b"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_contigs_are_scored_by_as_many_processes_as_the_form_says(tmp_path, contigs, workers, monkeypatch):
    for name in ("worker_nt", "unit_nt"):
        monkeypatch.setitem(Composition.__init__.__kwdefaults__, name, 1)
    hardware = {"devices": "cpu", "workers": workers}
    state = predict([str(contigs)], str(tmp_path / "out"), hardware=hardware, return_state=True)
    assert state.is_completed(), state.message
    logs = PredictionLayout(tmp_path / "out").worker_logs()
    assert len(logs) == workers
    tasks = {json.loads(line)["task"] for log in logs for line in log.read_text().splitlines()}
    assert len(tasks) == workers
    assert verify_run(tmp_path / "out").problems == []


@pytest.mark.slow
def test_a_worker_on_contigs_that_is_killed_starts_again_and_is_seen(tmp_path, contigs, monkeypatch, caplog):
    plain = predict([str(contigs)], str(tmp_path / "plain"), hardware={"devices": "cpu"}, return_state=True)
    assert plain.is_completed(), plain.message
    for name in ("worker_nt", "unit_nt"):
        monkeypatch.setitem(Composition.__init__.__kwdefaults__, name, 1)
    caplog.clear()
    killer = FirstWorkerKiller(kills=1)
    killer.start()
    out = tmp_path / "out"
    state = predict([str(contigs)], str(out), hardware={"devices": "cpu", "workers": 2}, return_state=True)
    killer.done.set()
    assert state.is_completed(), state.message
    assert len(killer.killed) == 1
    assert tables(out) == tables(tmp_path / "plain")
    layout = PredictionLayout(out)
    restarts = re.findall(
        r'virnucpro_worker_restarts_total\{.*failure="died".*model="composition".*\} (\d+)\.0',
        layout.metrics_textfile.read_text(),
    )
    assert restarts == ["1"]
    assert "failed in attempt 1 (died)" in caplog.text
    assert "the log holds nothing of it" in caplog.text or "end of" in caplog.text
    with get_client(sync_client=True) as client:
        runs = client.read_task_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[state.state_details.flow_run_id]))
        )
    counts = {run.name: run.run_count for run in runs}
    assert sorted(counts[f"score_contigs {rank} on cpu"] for rank in range(2)) == [1, 2]
    assert {*counts} >= {"index_contigs", "aggregate_scores", "validate_scores"}


@pytest.mark.slow
def test_its_time_limit_ends_the_embedding_run_within_it_too_and_is_named_as_it_was_given(tmp_path, contigs):
    def ring():
        while not worker_processes():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGALRM)  # the clock, hours early

    thread = threading.Thread(target=ring, daemon=True)
    thread.start()
    state = predict(
        [str(contigs)],
        str(tmp_path / "out"),
        classifier=str(real_classifier(tmp_path)),
        hardware={"devices": "cpu", "workers": 1},
        limits={"time_limit_minutes": 90},
        return_state=True,
    )
    thread.join()
    assert (state.type.value, state.name) == ("FAILED", "TimedOut")
    assert state.message == "the time limit of 90 minutes has passed: run it again to continue"
    assert worker_processes() == {}


@pytest.mark.slow
def test_what_cannot_be_used_fails_with_the_sentence_of_the_command_line(tmp_path, contigs, caplog):
    settings = {"classifier": str(real_classifier(tmp_path)), "hardware": {"devices": "cpu"}}
    (tmp_path / "bad.fa").write_text("no header\n")
    with pytest.raises(BadInputError, match=r"bad\.fa:1: "):
        run_from_command_line(input_files=[str(tmp_path / "bad.fa")], output_dir=str(tmp_path / "a"), **settings)
    with pytest.raises(ClassifierMismatchError, match="300 nt"):
        run_from_command_line(
            input_files=[str(contigs)], output_dir=str(tmp_path / "b"), models={"chunk": 300}, **settings
        )
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("name", "message", "becomes"),
    [
        ("vehement-crane", None, "predict into runs/{7}"),
        ("vehement-crane", "Run from the Prefect UI with defaults", "predict into runs/{7}"),
        ("vehement-crane", "Flow run scheduled", "predict into runs/{7}"),
        ("wild-boar", "", "wild-boar"),  # typed into a form, whose own names are others
        ("wild-boar", "the second sample", "wild-boar"),
        ("Rustic-Gecko", "", "predict into runs/{7}"),
        ("sample 7", "", "sample 7"),
        ("predict into runs/{7}", None, "predict into runs/{7}"),  # of a retry
    ],
)
def test_only_a_generated_name_is_replaced(monkeypatch, name, message, becomes):
    with get_client(sync_client=True) as client:
        run = client.create_flow_run(predict, name=name, state=Scheduled(message=message))
        client.set_flow_run_state(run.id, Running(message="now"))
        found = client.read_flow_run(run.id)
    context = SimpleNamespace(flow=predict, flow_run=found, parameters={"output_dir": "runs/{7}"})
    monkeypatch.setattr(FlowRunContext, "get", lambda: context)
    assert run_name("predict into {output_dir}")() == becomes
