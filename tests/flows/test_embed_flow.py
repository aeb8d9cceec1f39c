"""The flow on a real, private Prefect server: end to end, a retry, a partial result, stopping."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
import urllib.request

import pytest

pytest.importorskip("prefect")

from prefect import flow, get_client, states
from prefect.exceptions import Abort, Pause
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Completed, Suspended
from prefect.testing.utilities import prefect_test_harness

from flows.embed import embed, run_from_command_line
from flows.predict import predict
from flows.run import interrupts, telemetry
from flows.run import telemetry as flow_telemetry
from flows.run.outcome import ended
from flows.run.telemetry import LoggedTenths, ProgressArtifacts
from flows.train import train
from tests import fakes
from tests.clusters import free_port
from tests.flows.on_a_server import FirstWorkerKiller, artifact, artifacts, edges_of, logs_of_runs, worker_processes
from tests.prefect_service import wait_until
from tests.snapshots import rank_snapshot, run_snapshot, work_snapshot
from tests.strategies import write_fasta
from virnucpro.api import embed_fasta
from virnucpro.cli import command_line
from virnucpro.errors import BadInputError, UnknownModelError, WorkersFailedError
from virnucpro.pipeline.run.verification import verify_run
from virnucpro.report.prediction.artifacts import markdown_text
from virnucpro.store.reader import read_embeddings
from virnucpro.telemetry.snapshot import RankState


@pytest.fixture(scope="module", autouse=True)
def prefect_server():
    with prefect_test_harness(server_startup_timeout=180):
        yield


@pytest.fixture
def small(tmp_path, examples_dir):
    """The first 120 example proteins."""
    records = (examples_dir / "proteins.fasta").read_text().split(">")[1:121]
    path = tmp_path / "small.fasta"
    path.write_text("".join(f">{record}" for record in records))
    return path


class WorkerStopper(threading.Thread):
    """Tells the only worker of the run in *out* to stop, as a batch system would, once it is computing."""

    def __init__(self, out) -> None:
        super().__init__(daemon=True)
        self.log = out / "logs" / "worker_0.log"

    def run(self) -> None:
        while not self.log.exists() or "model.loaded" not in self.log.read_text():
            time.sleep(0.01)
        time.sleep(0.3)
        for pid in worker_processes():
            os.kill(pid, signal.SIGTERM)


@pytest.mark.slow
def test_dna_runs_through_the_flow_as_well(tmp_path):
    fasta = tmp_path / "dna.fasta"
    fasta.write_text(">long\n" + "ACGTTGCAAC" * 300 + "\n>bad\nACGU\n>short\nA-CG\n")
    state = embed(
        [str(fasta)],
        str(tmp_path / "out"),
        model="virnucpro-tiny-dna",
        hardware={"devices": "cpu"},
        sequences={"max_residues": 500, "long": "window", "gaps": "remove", "on_bad_record": "skip"},
        return_state=True,
    )
    assert state.is_completed(), state.message
    noticed = state.result().noticed
    assert (noticed["skipped"], noticed["windowed"], noticed["removed_gaps"]) == (1, 1, 1)
    assert "bad\t" in (tmp_path / "out" / "failed_sequences.tsv").read_text()
    with read_embeddings(tmp_path / "out") as rows:
        assert list(rows) == ["long", "short"]


def test_the_flow_embeds_real_proteins_and_leaves_its_artifacts(tmp_path, small):
    out = tmp_path / "out"
    state = embed([str(small)], str(out), hardware={"devices": "cpu", "workers": 2}, return_state=True)
    assert state.is_completed()
    assert state.name == "Completed"
    assert verify_run(out).problems == []
    with read_embeddings(out) as embeddings:
        assert len(embeddings) == 120
    page = artifact(f"embed-{MODEL}-summary")
    assert "# Embedding: complete" in page
    assert "120 of 120 sequences have their row" in page
    assert markdown_text(str(out / "embeddings.h5")) in page
    assert '"rank": 0' in artifact(f"embed-{MODEL}-ranks")
    assert '"retries": 0' in artifact(f"embed-{MODEL}-ranks")
    of_run = artifacts(f"embed-{MODEL}-summary")[0]["flow_run_id"]
    for rank in range(2):
        progress_of_rank = artifacts(f"cpu-{rank}-{MODEL}-progress")[0]
        assert (progress_of_rank["data"], progress_of_rank["flow_run_id"]) == (100.0, of_run)
        assert progress_of_rank["description"].startswith("100 % · complete · cpu · ")
    (of_cost,) = artifacts("embed-cost")
    recorded = json.loads((out / "run.json").read_text())["cost"]
    total, *rows = json.loads(of_cost["data"])
    assert of_cost["flow_run_id"] == of_run
    assert [total["stage"], total["CPU seconds"]] == ["sum", recorded["total"]["cpu_seconds"]]
    assert [(row["stage"], row["worker"], row["CPU seconds"], row["tokens"]) for row in rows] == [
        (row["stage"], row["worker"], row["cpu_seconds"], row["tokens"]) for row in recorded["rows"]
    ]
    assert list(total)[-2:] == ["peak memory MiB", "peak GPU memory MiB"]
    assert 50 < total["peak memory MiB"] == recorded["total"]["peak_memory_bytes"] >> 20
    with get_client(sync_client=True) as client:
        edges = dict(edges_of(client, of_run))
    ranks = ["embed_shard 0 on cpu", "embed_shard 1 on cpu"]
    assert edges == {
        "build_index": [],
        **{rank: ["build_index"] for rank in ranks},
        "aggregate_shards": ranks,
        "validate_embeddings": ["aggregate_shards"],
    }
    shares = [int(share) for share in re.findall(r'"share": "(\d+) %"', artifact(f"embed-{MODEL}-ranks"))]
    assert len(shares) == 2
    assert sum(shares) in {99, 100}, "each is rounded down"


@pytest.mark.slow
def test_the_flow_gives_the_bytes_that_the_command_line_gives(tmp_path, small):
    results = {
        "single": ["embeddings.h5"],
        "sharded": ["embeddings/shard-00000-of-00001.h5", "embeddings/ids.index"],
        "parquet": ["embeddings.parquet"],
    }
    for form, names in results.items():
        flow, plain = tmp_path / f"flow_{form}", tmp_path / f"plain_{form}"
        embed([str(small)], str(flow), hardware={"devices": "cpu", "workers": 2}, result={"form": form})
        embed_fasta(small, plain, devices="cpu", workers=1, result_form=form).close()
        for name in names:
            assert (flow / name).read_bytes() == (plain / name).read_bytes()


def by_the_library(fasta, out):
    embed_fasta(fasta, out, devices="cpu", workers=1).close()


def by_the_command(fasta, out):
    command_line()(["embed", str(fasta), "-o", str(out), "--devices", "cpu", "--workers", "1"], standalone_mode=False)


def by_the_flow(fasta, out):
    embed([str(fasta)], str(out), hardware={"devices": "cpu", "workers": 1})


class Scraper(threading.Thread):
    """Reads the metrics of the first run that announces itself in a folder, as Prometheus does."""

    def __init__(self, targets) -> None:
        super().__init__(daemon=True)
        self.targets, self.metrics, self.is_over = targets, "", threading.Event()

    def run(self) -> None:
        while not self.is_over.wait(0.01) and not self.metrics:
            for path in self.targets.glob("*.json"):
                (target,) = json.loads(path.read_text())
                with urllib.request.urlopen(f"http://{target['targets'][0]}/metrics") as answer:
                    self.metrics = answer.read().decode()


@pytest.mark.parametrize(
    "way",
    [
        by_the_library,
        *(pytest.param(way, marks=[pytest.mark.slow, pytest.mark.long]) for way in (by_the_command, by_the_flow)),
    ],
)
def test_the_environment_says_to_every_entry_point_where_metrics_go(tmp_path, monkeypatch, way):
    monkeypatch.setenv("VIRNUCPRO_METRICS_TARGETS", str(tmp_path / "targets"))
    scraper = Scraper(tmp_path / "targets")
    scraper.start()
    way(write_fasta(tmp_path / "in.fasta", [("one", "MKT" * 20)]), tmp_path / "out")
    scraper.is_over.set()
    scraper.join()
    assert "virnucpro_build_info" in scraper.metrics
    assert list((tmp_path / "targets").iterdir()) == []


@pytest.mark.slow
@pytest.mark.long
def test_a_rank_whose_process_is_killed_succeeds_on_the_tasks_retry(tmp_path, small):
    out = tmp_path / "out"
    killer = FirstWorkerKiller(kills=1)
    killer.start()
    result = run_from_command_line(
        fasta_files=[str(small)], output_dir=str(out), hardware={"devices": "cpu", "workers": 2}
    )
    killer.done.set()
    assert len(killer.killed) == 1
    assert result.state == "complete"
    retried = [rank for rank in result.ranks if rank.attempts == 2]
    assert len(retried) == 1
    assert retried[0].pids[0] == killer.killed[0] != retried[0].pids[1]
    assert '"retries": 1' in artifact(f"embed-{MODEL}-ranks")
    assert verify_run(out).problems == []


@pytest.mark.slow
@pytest.mark.long
def test_the_flow_fails_with_a_sentence_and_a_second_run_completes_it(tmp_path, small):
    out = tmp_path / "out"
    WorkerStopper(out).start()
    one = {"hardware": {"devices": "cpu", "workers": 1, "token_budget": 1200}, "return_state": True}
    state = embed([str(small)], str(out), limits={"worker_retries": 0}, **one)
    assert state.is_failed()
    assert "1 of 1 workers failed, " in state.message
    assert "of 120 sequences missing, partial result at" in state.message
    assert isinstance(state.result(raise_on_failure=False), WorkersFailedError)
    assert state.result(raise_on_failure=False).exit_code == 3
    assert "# Embedding: partial" in artifact(f"embed-{MODEL}-summary")
    allowed = embed([str(small)], str(out), limits={"worker_retries": 0}, result={"allow_partial": True}, **one)
    assert allowed.name == "Completed", "what was missing is computed"
    assert verify_run(out).problems == []


@pytest.mark.slow
def test_a_partial_result_that_was_allowed_is_completed_by_the_name_of_partial(tmp_path, small):
    out = tmp_path / "out"
    WorkerStopper(out).start()
    state = embed(
        [str(small)],
        str(out),
        hardware={"devices": "cpu", "workers": 1, "token_budget": 1200},
        limits={"worker_retries": 0},
        result={"allow_partial": True},
        return_state=True,
    )
    assert state.is_completed()
    assert state.name == "Partial"
    assert verify_run(out).state == "partial"


@pytest.mark.slow
@pytest.mark.long
def test_a_rank_that_is_lost_leaves_its_work_to_the_other(tmp_path, small):
    killer = FirstWorkerKiller(kills=1)
    killer.start()
    result = run_from_command_line(
        fasta_files=[str(small)],
        output_dir=str(tmp_path / "out"),
        hardware={"devices": "cpu", "workers": 2},
        limits={"worker_retries": 0},
    )
    killer.done.set()
    (lost,) = result.failed_ranks
    assert (result.state, result.num_rows, result.ranks[lost].failure) == ("complete", 120, "died")
    assert rf"the remaining workers did the work of rank {lost} on cpu \(died: " in artifact(f"embed-{MODEL}-summary")
    assert "failed: died" in artifact(f"embed-{MODEL}-ranks")
    assert verify_run(tmp_path / "out").problems == []


def test_bad_input_and_unknown_models_fail_without_a_worker(tmp_path, small, caplog):
    bad = tmp_path / "bad.fasta"
    bad.write_text("no header\n")
    with pytest.raises(BadInputError, match=r"bad\.fasta:1: "):
        run_from_command_line(fasta_files=[str(bad)], output_dir=str(tmp_path / "a"), hardware={"devices": "cpu"})
    assert f"{bad}:1: text before the first '>'" in caplog.text
    assert not re.search("Traceback|NoneType: None", caplog.text)
    with pytest.raises(UnknownModelError):
        run_from_command_line(
            fasta_files=[str(small)], output_dir=str(tmp_path / "b"), hardware={"devices": "cpu"}, model="nonsense"
        )
    assert not (tmp_path / "a" / "logs").exists()


MODEL = "virnucpro-tiny-protein"
HOOKED = []


@flow(name="watched", on_cancellation=[lambda _flow, run, _state: HOOKED.append(run.id)])
def watched_run(kind):
    """Get a state on the server that is not this process's, and compute on."""
    state = Suspended(timeout_seconds=60) if kind == "Suspended" else getattr(states, kind)()

    def work():
        with get_client(sync_client=True) as client:
            assert client.set_flow_run_state(flow_run.id, state, force=True).status == "ACCEPT"
        time.sleep(20)
        return Completed(message="nobody stopped it")

    return ended(work)


@pytest.mark.parametrize(
    ("kind", "signal", "stays"),
    [
        ("Suspended", Pause, "Suspended"),
        ("Crashed", Abort, "Crashed"),
        ("Cancelled", Abort, "Cancelled"),
        ("Cancelling", Abort, "Cancelled"),  # which nothing else has ended for too long
        ("Running", Abort, "Running"),  # in another process
    ],
)
def test_a_run_that_the_server_no_longer_has_as_running_here_stops_and_leaves_its_state(
    monkeypatch, kind, signal, stays
):
    monkeypatch.setattr(interrupts, "LOOK_S", 0.2)
    monkeypatch.setattr(interrupts, "CANCELLING_S", 0.3)
    HOOKED.clear()
    with pytest.raises(signal) as caught:
        watched_run(kind)
    assert isinstance(caught.value.__cause__, interrupts.NotToRunError)
    (run_id,) = HOOKED
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(run_id).state.name == stays


def test_a_run_that_has_begun_again_outlives_the_second_report_of_the_crash_before(monkeypatch):
    monkeypatch.setattr(interrupts, "LOOK_S", 0.2)
    reported = states.Crashed(message="Flow run infrastructure exited with non-zero status")

    @flow(on_cancellation=[lambda *_: pytest.fail("it was stopped")])
    def begun_again():
        def work():
            with get_client(sync_client=True) as client:
                client.set_flow_run_state(flow_run.id, reported, force=True)
                while not client.read_flow_run(flow_run.id).state.is_running():
                    time.sleep(0.1)
            time.sleep(1)
            return Completed(message="went on")

        return ended(work)

    assert begun_again(return_state=True).message == "went on"


def test_a_cancelled_run_whose_server_was_away_stops_without_waiting_for_prefects_worker(monkeypatch):
    looks, ask = [], interrupts.client_that_asks_once

    def away_at_first():
        looks.append(time.monotonic())
        if len(looks) == 1:
            raise OSError("away")
        return ask()

    monkeypatch.setattr(interrupts, "LOOK_S", 0.2)
    monkeypatch.setattr(interrupts, "client_that_asks_once", away_at_first)
    HOOKED.clear()
    with pytest.raises(Abort):
        watched_run("Cancelling")
    assert time.monotonic() - looks[0] < 15
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(HOOKED[0]).state.name == "Cancelled"


def test_a_server_that_does_not_answer_stops_no_run(monkeypatch):
    monkeypatch.setattr(interrupts, "LOOK_S", 0.1)

    @flow
    def alone():
        def work():
            with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{free_port()}/api"}), interrupts.watched():
                time.sleep(1)
            return Completed(message="done")

        return ended(work)

    assert alone(return_state=True).message == "done"


@pytest.mark.parametrize(
    ("work", "given", "wrong", "told"),
    [
        (embed, "fasta_files", {"fasta_files": ["/no/such.fasta"]}, "/no/such.fasta: No such file"),
        (embed, "fasta_files", {"model": "nonsense"}, "nonsense"),
        (predict, "input_files", {"input_files": ["/no/such.fasta"]}, "/no/such.fasta: No such file"),
        (train, "labelled", {"genomes": "/no/such.tsv"}, "/no/such.tsv: No such file"),
    ],
)
def test_a_mistake_is_told_before_a_cluster_is_asked_for(tmp_path, small, work, given, wrong, told):
    parameters = {given: [str(small)], "output_dir": str(tmp_path / "out"), **wrong}
    nobody = f"dask://127.0.0.1:{free_port()}"
    state = work(**parameters, hardware={"runner": nobody}, return_state=True)
    assert told in state.message


@pytest.mark.slow
@pytest.mark.long
def test_an_interrupt_leaves_no_process_and_a_folder_that_resumes(tmp_path, small):
    out = tmp_path / "out"

    def interrupt():
        while not worker_processes():
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        embed([str(small)], str(out), hardware={"devices": "cpu", "workers": 2, "token_budget": 1500})
    thread.join()
    assert worker_processes() == {}
    assert embed(
        [str(small)], str(out), hardware={"devices": "cpu", "workers": 2, "token_budget": 1500}, return_state=True
    ).is_completed()


@pytest.mark.slow
def test_what_workers_and_the_program_log_stands_with_the_run(tmp_path, monkeypatch):
    fasta, out = tmp_path / "in.fasta", tmp_path / "out"
    hostile = 'x"|`$(id)=1'
    fasta.write_text(f">{hostile}\nMKVPPP\n" + "".join(f">p{n}\n{'ACDEFGHIKL'[n % 10] * 20}\n" for n in range(40)))
    plan = {"rank": 0, "how": "device_error", "before_batch": 1, "poison": {"MKVPPP": "raise"}}
    config = fakes.faulty_config(tmp_path / "control.json", plan)
    monkeypatch.setattr("flows.embed.configure_model", lambda *_, **__: config)
    result = run_from_command_line(
        fasta_files=[str(fasta)],
        output_dir=str(out),
        hardware={"devices": "cpu", "workers": 1},
        result={"allow_partial": True},
    )
    assert (result.num_rows, result.num_missing) == (40, 1)
    lines = logs_of_runs()
    failed = r'sequence_id="x\"|`$(id)=1" failure=application_error'
    assert any(level == "ERROR" and text.startswith("sequence.failed ") and failed in text for level, text, _ in lines)
    assert any(level == "INFO" and text.startswith("result.written ") for level, text, _ in lines)
    (task,) = {task for _, text, task in lines if text.startswith("sequence.failed ")}
    ((level, report),) = {(level, text) for level, text, of in lines if of == task and text.startswith("rank 0 on ")}
    assert level == "ERROR"
    first, *rest = report.split("\n")
    assert first.startswith("rank 0 on cpu failed in attempt 1 (device_error): AcceleratorError: CUDA error: ")
    assert rest[0] == "  exit code 70; another process follows"
    assert re.fullmatch(r"  last batch: block \d+, \d+ sequences?, \d+ tokens", rest[1])
    assert rest[2].startswith("  exception: AcceleratorError: CUDA error: ")
    assert re.fullmatch(r"      at .*fakes\.py:\d+ in fail", rest[3])
    assert any(" worker.started blocks=" in line and f"task={task}" in line for line in rest)
    assert " ERROR   worker.failed failure=device_error " in rest[-1]
    started = [
        json.loads(line)
        for line in (out / "logs" / "worker_0.log").read_text().splitlines()
        if "worker.started" in line
    ]
    assert [(line["task"], line["attempt"]) for line in started] == [(task, 1), (task, 2)]


# --- progress artifacts -----------------------------------------------------------------------------------------------


@pytest.fixture
def quick_artifacts(monkeypatch):
    monkeypatch.setattr(telemetry, "LOOK_S", 0.1)
    monkeypatch.setattr(telemetry, "INTERVAL_S", 0.0)


@flow(persist_result=False)
def show_progress(snapshots, api_url=None):
    """Show each of *snapshots* for a moment; return the flow run's id and the seconds that closing took."""
    with temporary_settings({} if api_url is None else {PREFECT_API_URL: api_url}):
        view = ProgressArtifacts()
    for snapshot in snapshots:
        view.update(snapshot)
        time.sleep(0.3)
    begun = time.monotonic()
    view.close()
    return str(flow_run.id), time.monotonic() - begun


def done_rank(rank):
    return rank_snapshot(rank, state=RankState.COMPLETE, tokens_left=0, sequences=500)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_artifacts")
def test_each_rank_has_one_artifact_of_the_flow_run_that_ends_at_a_hundred():
    cpu = rank_snapshot(9, device="cpu", tokens_left=87_654, seconds_left=4321.0)
    snapshots = [run_snapshot(), run_snapshot(rank_snapshot(0), cpu), run_snapshot(done_rank(0), cpu)]
    run_id, _ = show_progress(snapshots)
    (of_gpu,), (of_cpu,) = artifacts(f"gpu-0-{MODEL}-progress"), artifacts(f"cpu-9-{MODEL}-progress")
    assert (of_gpu["type"], of_gpu["flow_run_id"], of_gpu["data"]) == ("progress", run_id, 100.0)
    assert of_gpu["description"] == "100 % · complete · cuda:0 · virnucpro-tiny-protein · 500 sequences"
    assert (of_cpu["flow_run_id"], of_cpu["data"]) == (run_id, 12.3)
    of_cpu_says = "12 % · 1 h 12 min left · 5,000 tokens/s · cpu · virnucpro-tiny-protein · 200 sequences"
    assert of_cpu["description"] == of_cpu_says


@flow(persist_result=False)
def show_before_and_after(first, last):
    """Show two snapshots, and return the artifacts of rank 5 before the end and after it."""
    view = ProgressArtifacts()
    view.update(first)
    wait_until(lambda: artifacts(f"gpu-5-{MODEL}-progress"), limit_s=30)
    view.update(last)
    time.sleep(1)
    before = artifacts(f"gpu-5-{MODEL}-progress")
    view.close()
    return before, artifacts(f"gpu-5-{MODEL}-progress")


@pytest.mark.slow
def test_an_artifact_is_updated_every_15_seconds_at_most_and_exact_at_the_end(monkeypatch):
    monkeypatch.setattr(telemetry, "LOOK_S", 0.1)
    lost = rank_snapshot(5, state=RankState.LOST, tokens_left=0, sequences=250)
    last = run_snapshot(embeddings=(work_snapshot(lost, is_over=True),))
    (before,), (after,) = show_before_and_after(run_snapshot(rank_snapshot(5)), last)
    assert before["description"] == "60 % · 8 s left · 5,000 tokens/s · cuda:5 · virnucpro-tiny-protein · 200 sequences"
    assert (before["id"], before["data"], after["data"]) == (after["id"], 60.0, 60.0)
    assert after["description"] == "60 % · lost · cuda:5 · virnucpro-tiny-protein · 250 sequences"


@flow(persist_result=False)
def log_progress(lefts):
    view = LoggedTenths()
    for left in lefts:
        view.update(run_snapshot(rank_snapshot(tokens_left=left)))


@pytest.mark.slow
def test_the_flows_log_has_one_line_for_each_tenth(monkeypatch):
    monkeypatch.setattr(flow_telemetry, "LINE_INTERVAL_S", 0.0)
    log_progress([99_000, 90_000, 85_000, 80_000, 41_000, 10_000, 0])
    lines = [text for level, text, task in logs_of_runs() if " % " in text or " %, " in text]
    assert [line.partition(", 5,000 tokens/s, ")[0] for line in lines[-4:]] == [
        f"virnucpro-tiny-protein: {percent} %" for percent in ("10.0", "20.0", "59.0", "90.0")
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_artifacts")
def test_the_second_embedding_of_a_prediction_has_artifacts_of_its_own():
    first, second = work_snapshot(done_rank(7), is_over=True), work_snapshot(rank_snapshot(7))
    show_progress([run_snapshot(embeddings=(first,)), run_snapshot(embeddings=(first, second))])
    assert [item["data"] for item in artifacts(f"gpu-7-{MODEL}-progress")] == [60.0, 100.0]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_artifacts")
def test_an_api_that_is_gone_is_said_once_and_nothing_else_happens(caplog):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and never listens
        _, seconds = show_progress(
            [run_snapshot(rank_snapshot(3))] * 3, f"http://127.0.0.1:{nobody.getsockname()[1]}/api"
        )
    assert seconds < 5
    assert caplog.text.count("progress artifacts are not up to date") == 1
    assert artifacts(f"gpu-3-{MODEL}-progress") == []


@pytest.mark.slow
@pytest.mark.usefixtures("quick_artifacts")
def test_an_api_that_hangs_holds_up_nobody(monkeypatch):
    monkeypatch.setattr(telemetry, "PATIENCE_S", 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        begun = time.monotonic()
        _, seconds = show_progress(
            [run_snapshot(rank_snapshot(4))] * 3, f"http://127.0.0.1:{silent.getsockname()[1]}/api"
        )
        assert 0.2 < seconds < 5, "an answer would have been waited for 10 s"
        assert time.monotonic() - begun < 10
