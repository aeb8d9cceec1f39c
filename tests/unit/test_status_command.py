"""How a run is, told from its folder while it goes on, after it was killed, and when it is over; disturbing nothing."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.snapshots import NOW, rank_snapshot, run_snapshot, work_snapshot
from tests.strategies import edit_manifest
from virnucpro.commands.status import status
from virnucpro.errors import ResultError
from virnucpro.pipeline.run import run_status
from virnucpro.pipeline.run.run_status import status_of
from virnucpro.run_layout import PredictionLayout, RunLayout
from virnucpro.store.locks.holder import holder_of
from virnucpro.store.locks.run_lock import RunLock
from virnucpro.store.manifest import COUNTED, PredictionManifest, RunManifest, StageRecord
from virnucpro.telemetry.show.status_file import StatusFile
from virnucpro.telemetry.snapshot import GpuSample, RankState

HOLD = """
import sys, time
from pathlib import Path
from virnucpro.store.locks.run_lock import RunLock
with RunLock(Path(sys.argv[1]), run_id="killed"):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def layout(tmp_path):
    made = RunLayout(tmp_path / "out")
    made.work_dir.mkdir(parents=True)
    return made


def manifest(state, **changes):
    return RunManifest(
        run_id="abc",
        state=state,
        started="2026-11-21T10:00:00+00:00",
        finished=None if state == "running" else "2026-11-21T11:12:00+00:00",
        host="node17",
        inputs=[],
        settings={"token_budget": 4096},
        plan={"token_budget": 4096, "blocks": 3, "longest_sequence_tokens": 99},
        versions={},
        devices=["cpu"],
        counts={"records": 1000, "rows": 990, "missing": 10, "copies": 0, "truncated": 0},
        **changes,
    )


def write_live(layout, snapshot):
    StatusFile(layout.live_status).update(snapshot)


def shown(folder, *arguments):
    """What the command prints; it must not fail."""
    app = typer.Typer()
    app.command()(status)
    done = CliRunner().invoke(app, [str(folder), *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.output
    assert all(line.isprintable() for line in done.output.split("\n"))
    return done.output


def killed_holder(lock):
    """A process that held the lock and was killed; what it wrote into the lock file stays."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    alive = holder_of(lock)
    process.kill()
    process.wait()
    return alive


# --- who holds the folder ---------------------------------------------------------------------------------------------


def test_a_holder_is_alive_until_it_is_killed_and_nobody_after_it_has_ended(layout):
    alive = killed_holder(layout.lock)
    assert (alive.is_alive, alive.run_id) == (True, "killed")
    assert holder_of(layout.lock) == replace(alive, is_alive=False)
    with RunLock(layout.lock, run_id="next"):
        held = holder_of(layout.lock)
        assert (held.is_alive, held.pid, held.run_id) == (True, os.getpid(), "next")
    assert holder_of(layout.lock) is None


def test_a_process_that_got_the_number_of_a_dead_holder_is_not_taken_for_it(layout):
    about = {"host": os.uname().nodename, "pid": os.getpid(), "run_id": "x", "since": "2020-01-01T00:00:00+00:00"}
    layout.lock.write_text(json.dumps(about))
    assert holder_of(layout.lock).is_alive is False


def test_of_a_holder_on_another_host_only_a_lock_that_the_system_knows_tells(layout):
    about = {"host": "node17", "pid": 1, "run_id": "x", "since": "2026-11-21T10:00:00+00:00"}
    layout.lock.write_text(json.dumps(about))
    assert holder_of(layout.lock).is_alive is None
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    process = context.Process(target=hold_as_nfs_does, args=(str(layout.lock), ready, done))
    process.start()
    ready.wait(30)
    assert holder_of(layout.lock).is_alive is True
    done.set()
    process.join()


def hold_as_nfs_does(path, ready, done):
    with Path(path).open("r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        ready.set()
        done.wait(30)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"host": 1}', b"[" * 4000, b"\xff"])
def test_a_lock_file_that_says_nothing_names_no_holder(layout, content):
    layout.lock.write_bytes(content)
    assert holder_of(layout.lock) is None


def test_whoever_asks_never_makes_a_run_fail_that_starts(layout):
    manifest("complete").write(layout.manifest)
    is_over = threading.Event()

    def ask():
        while not is_over.is_set():
            status_of(layout.output_dir)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(100):
            with RunLock(layout.lock, run_id="x"):
                pass
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


# --- states -----------------------------------------------------------------------------------------------------------


def test_where_ranks_are_on_other_hosts_each_is_shown_with_its_own(layout):
    ranks = [rank_snapshot(0), rank_snapshot(1, host="node-7"), rank_snapshot(2, host="")]
    manifest("running").write(layout.manifest)
    with RunLock(layout.lock, run_id="abc"):
        write_live(layout, run_snapshot(*ranks))
        lines = shown(layout.output_dir).splitlines()
        as_json = json.loads(shown(layout.output_dir, "--json"))
    assert lines[3].split()[:3] == ["rank", "host", "device"]
    assert [line.split()[1] for line in lines[4:7]] == [os.uname().nodename, "node-7", "cuda:2"]
    assert [rank["host"] for rank in as_json["ranks"]] == [os.uname().nodename, "node-7", None]


def test_a_running_run_shows_its_ranks_its_speed_and_what_is_wrong(layout):
    ranks = [
        rank_snapshot(0, restarts={"died": 1}, seconds_left=83.0),
        rank_snapshot(1, state=RankState.LOADING, rows=None, sequences=0, tokens_left=100_000),
        rank_snapshot(2, last_progress=NOW - 900),
    ]
    about = {"utilization": 0.97, "memory_used_bytes": 61 * 2**30, "temperature_celsius": 71.0}
    gpu = GpuSample(device="cuda:0", uuid="x", host=os.uname().nodename, **about)
    tokens = {"tokens": 600_000, "tokens_before": 300_000}
    embedding = work_snapshot(*ranks, **tokens, failed={"not_finite": 2}, seconds_left=4321.0)
    manifest("running").write(layout.manifest)
    with RunLock(layout.lock, run_id="abc"):
        write_live(layout, run_snapshot(*ranks, embeddings=(embedding,), gpus=(gpu,), disk_free_bytes=2**30))
        lines = shown(layout.output_dir).splitlines()
    assert lines[0] == f"{layout.output_dir}: running (embedding run), 70.0 %, about 1 h 12 min left"
    assert lines[1].startswith(
        f"  process {os.getpid()} on {os.uname().nodename}, has run for 1 min 10 s, last heartbeat "
    )
    assert lines[2] == "  computing embeddings with virnucpro-tiny-protein, for 1 min 3 s"
    assert lines[3].split() == ["rank", "device", "done", "computed", "rows", "tokens/s", "restarts", "GPU", "state"]
    assert lines[4].rstrip().endswith("  1:23 left")
    assert "97 %, 61.0 GiB, 71 C" in lines[4]
    assert lines[5].rstrip().endswith("loading the model")
    assert lines[6].rstrip().endswith("no batch for 15 min")
    text = "\n".join(lines[7:])
    assert "10,000 tokens/s, 300 of 1,000 rows on disk, 50 % was done before, 1 restart, 2 sequences failed" in text
    assert "sequences that failed: 2 not_finite" in text
    assert "the disk is nearly full: 1.0 GiB of 1,000.0 GiB are left" in text
    assert lines[-1] == f"next: nothing; follow the logs of its workers with `tail -F {layout.log_dir}/worker_*.log`"


def test_a_run_that_has_only_begun_is_running(layout):
    layout.work_dir.rmdir()
    with RunLock(layout.lock, run_id="abc"):
        assert shown(layout.output_dir).startswith(f"{layout.output_dir}: running\n")


def test_a_killed_run_is_interrupted_and_shows_how_far_it_was(layout, monkeypatch):
    monkeypatch.setattr(run_status, "NEXT_WRITE_S", 0.1)
    killed_holder(layout.lock)
    write_live(layout, run_snapshot(rank_snapshot()))
    text = shown(layout.output_dir)
    assert text.startswith(f"{layout.output_dir}: interrupted, 60.0 %\n")
    assert "0:08 left" not in text
    assert "was computing" in text, "nothing computes any more"
    assert text.endswith("next: start the same command again to continue; finished work is kept\n")


def test_a_status_that_is_written_again_is_of_a_run_whose_process_is_hidden(layout):
    killed_holder(layout.lock)
    write_live(layout, run_snapshot(rank_snapshot()))
    timer = threading.Timer(0.3, write_live, (layout, run_snapshot(rank_snapshot())))
    timer.start()
    assert status_of(layout.output_dir).state == "running"
    timer.join()


def test_a_run_on_another_host_is_running_as_long_as_it_sends_heartbeats(layout, monkeypatch):
    manifest("running").write(layout.manifest)
    about = {"host": "node17", "pid": 1, "run_id": "x", "since": "2026-11-21T10:00:00+00:00"}
    layout.lock.write_text(json.dumps(about))
    assert status_of(layout.output_dir).state == "silent"
    write_live(layout, run_snapshot(rank_snapshot()))
    assert status_of(layout.output_dir).state == "running"
    later = time.time() + 900
    monkeypatch.setattr(time, "time", lambda: later)
    text = shown(layout.output_dir)
    assert text.startswith(f"{layout.output_dir}: silent (embedding run), 60.0 %\n")
    assert "process 1 on node17, had run for 1 min 10 s, last heartbeat 15 min ago" in text
    assert "next: look whether process 1 on node17 still runs" in text


@pytest.mark.parametrize(
    ("state", "expected", "step"),
    [
        ("complete", "complete", "checks the result again"),
        ("partial", "partial", "failed_sequences.tsv lists"),
        ("failed", "failed", "see why with `tail "),
        ("stopped", "stopped", "start the same command again to continue"),
        ("running", "interrupted", "start the same command again to continue"),
        ("of tomorrow", "interrupted", "start the same command again to continue"),
    ],
)
def test_a_run_that_is_over_is_told_from_its_manifest(layout, state, expected, step):
    ranks = [
        {"rank": 0, "device": "cpu", "state": "complete", "sequences": 990, "tokens_per_second": 1234.5, "attempts": 1},
        {"rank": 1, "device": "cpu", "state": "failed", "failure": "died", "reason": "signal 9", "failures": ["died"]},
    ]
    manifest(state, ranks=ranks).write(layout.manifest)
    text = shown(layout.output_dir)
    assert text.startswith(f"{layout.output_dir}: {expected} (embedding run)\n")
    assert "1,000 records, 990 rows, 10 missing" in text
    assert step in text.splitlines()[-1]
    if expected == state:
        assert "took 1 h 12 min" in text
        assert "failed: died: signal 9" in text


def test_a_worker_that_was_told_to_stop_has_not_failed(layout):
    ending = {"state": "stopped", "failure": "stopped", "reason": "stopped; start again", "failures": ["stopped"]}
    manifest("stopped", ranks=[{"rank": 0, "device": "cpu", "attempts": 1, **ending}]).write(layout.manifest)
    _, _, names, worker, *_ = shown(layout.output_dir).splitlines()
    assert names.split() == ["rank", "device", "attempts", "state"]
    assert worker.split() == ["0", "cpu", "1", "stopped"]
    assert status_of(layout.output_dir).restarts == {}


def test_the_command_that_is_proposed_can_be_pasted(tmp_path):
    layout = RunLayout(tmp_path / "my run; ls")
    layout.work_dir.mkdir(parents=True)
    manifest("failed").write(layout.manifest)
    layout.log_dir.mkdir()
    layout.worker_log(1).write_text("the last line\n")
    command = shown(layout.output_dir).splitlines()[-1].split("`")[1]
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == "the last line\n"


def test_a_folder_with_work_and_no_manifest_was_interrupted_before_it_had_one(layout):
    layout.lock.touch()
    assert status_of(layout.output_dir).state == "interrupted"


def test_a_folder_without_a_run_is_none(tmp_path, layout):
    for folder in (tmp_path / "absent", tmp_path, layout.output_dir):
        with pytest.raises(ResultError) as caught:
            status_of(folder)
        assert caught.value.exit_code == 65
    layout.manifest.write_text("{}")
    with pytest.raises(ResultError, match="not a run manifest"):
        status_of(layout.output_dir)


def prediction(tmp_path, state):
    layout = PredictionLayout(tmp_path / "identified")
    layout.output_dir.mkdir()
    PredictionManifest(
        run_id="abc",
        state=state,
        started="2026-11-21T10:00:00+00:00",
        host="node17",
        inputs=[],
        settings={},
        output_settings={},
        models={},
        fingerprint="f",
        versions={},
        devices=["cpu"],
        stages={"fragments": StageRecord(fingerprint="f", seconds=1.0, files={})},
        counts=dict.fromkeys(COUNTED, 600) if state == "complete" else {},
    ).write(layout.manifest)
    return layout


def test_the_logs_of_a_prediction_are_those_of_its_two_embedding_runs(tmp_path):
    layout = prediction(tmp_path, "failed")
    logs = [RunLayout(folder).worker_log(0) for folder in (layout.dna_dir, layout.protein_dir)]
    for log in logs:
        log.parent.mkdir(parents=True)
        log.touch()
    command = f"printf '%s\\n' {status_of(layout.output_dir).worker_logs}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == list(map(str, logs))


def test_a_prediction_shows_its_stages_and_counts(tmp_path):
    layout = prediction(tmp_path, "stopped")
    text = shown(layout.output_dir)
    assert text.startswith(f"{layout.output_dir}: stopped (prediction)\n")
    assert "finished stages: fragments" in text


def test_a_finished_prediction_took_what_its_stages_took_whenever_they_were_done(tmp_path):
    layout = prediction(tmp_path, "complete")
    assert "  took 1.0 s (fragments 1.0 s)\n" in shown(layout.output_dir)


def test_a_stopped_prediction_took_at_least_what_its_finished_stages_took(tmp_path):
    layout = prediction(tmp_path, "stopped")
    edit_manifest(layout.manifest, lambda values: values.update(finished=values["started"]))
    assert "  took 1.0 s (fragments 1.0 s)\n" in shown(layout.output_dir)


def test_the_part_of_a_prediction_whose_turn_it_is_shows_the_whole(tmp_path):
    layout = prediction(tmp_path, "running")
    dna = RunLayout(layout.dna_dir)
    with RunLock(layout.lock, run_id="abc"):
        layout.work_dir.mkdir()
        write_live(layout, run_snapshot(rank_snapshot()))
        head = shown(layout.output_dir).splitlines()[0]
        assert head.endswith("running (prediction), 60.0 % of this embedding, about 8 s left of it")
        with RunLock(dna.lock, run_id="abc"):
            dna.work_dir.mkdir()
            found = status_of(dna.output_dir)
            assert (found.output_dir, found.part_of, found.state) == (layout.output_dir, layout.output_dir, "running")
            assert "belongs to this run, which computes it now" in shown(dna.output_dir)
        manifest("complete").write(dna.manifest)
        assert status_of(dna.output_dir).state == "complete"


# --- what cannot be believed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["", "{", '{"format": 2}', '{"format": 1, "written": "soon"}', "[]"])
def test_a_status_that_cannot_be_read_is_a_problem_that_is_told(layout, content):
    manifest("running").write(layout.manifest)
    with RunLock(layout.lock, run_id="abc"):
        layout.live_status.write_text(content)
        text = shown(layout.output_dir)
    assert text.startswith(f"{layout.output_dir}: running (embedding run)\n")
    assert "status.json: says nothing that this version understands" in text


def test_names_and_numbers_from_outside_forge_nothing(layout):
    evil = "cuda\x1b[2J\n[red]rank 9\u202e\r"
    ranks = [rank_snapshot(0, device=evil, restarts={evil: 1}, tokens_left=-(10**18), rows=-5, seconds_left=1e15)]
    embedding = work_snapshot(*ranks, model=evil, failed={evil: 10**18}, tokens=1)
    with RunLock(layout.lock, run_id=evil):
        write_live(layout, run_snapshot(*ranks, embeddings=(embedding,), disk_free_bytes=-1, output_dir=evil))
        text = shown(layout.output_dir)
        as_json = shown(layout.output_dir, "--json")
    assert r"cuda\x1b[2J\n[red]rank 9\u202e\r" in text
    assert json.loads(as_json)["ranks"][0]["device"] == evil
    evil_rank = {
        "rank": evil,
        "device": [evil],
        "state": evil,
        "sequences": "12",
        "tokens_per_second": {},
        "failures": 7,
    }
    manifest("failed", ranks=[evil_rank, {}]).write(layout.manifest)
    assert evil.encode("unicode_escape").decode() in shown(layout.output_dir)


def test_json_has_everything_under_names_that_stay(layout):
    manifest("running").write(layout.manifest)
    with RunLock(layout.lock, run_id="abc"):
        write_live(layout, run_snapshot(rank_snapshot()))
        running = json.loads(shown(layout.output_dir, "--json"))
    manifest("complete", ranks=[{"rank": 0, "device": "cpu"}]).write(layout.manifest)
    complete = json.loads(shown(layout.output_dir, "--json"))
    assert running.keys() == complete.keys()
    assert running["ranks"][0].keys() == complete["ranks"][0].keys()
    documented = run_status.RunStatus.to_json.__doc__
    for name in [*running, *running["ranks"][0]]:
        assert name in documented, name
    assert (running["state"], running["progress"], running["rows"], running["pid"]) == (
        "running",
        0.6,
        150,
        os.getpid(),
    )
    assert (complete["state"], complete["seconds"], complete["snapshot"]) == ("complete", 4320.0, None)


@pytest.mark.slow
def test_a_real_run_is_watched_killed_and_completed(tmp_path, examples_dir):
    out, fasta = tmp_path / "out", tmp_path / "proteins.fasta"
    records = (examples_dir / "proteins.fasta").read_text().split(">")[1:81]
    fasta.write_text("".join(f">{record}" for record in records))
    command = [sys.executable, "-m", "virnucpro", "embed", str(fasta), "-o", str(out)]
    command += ["--devices", "cpu", "--workers", "2", "--token-budget", "1200"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, **quiet)
    deadline_s = time.monotonic() + 60
    found = None
    while time.monotonic() < deadline_s and (found is None or found.embedding is None):
        time.sleep(0.02)
        with suppress(ResultError):  # it has not begun
            found = status_of(out)
    process.kill()
    process.wait()
    assert (found.state, found.problems, found.holder.pid) == ("running", (), process.pid)
    assert [rank.device for rank in found.embedding.ranks] == ["cpu", "cpu"]
    text = shown(out)
    assert text.startswith(f"{out}: interrupted (embedding run), ")
    assert subprocess.run(command, check=False, **quiet).returncode == 0
    complete = status_of(out)
    assert (complete.state, complete.live, complete.to_json()["counts"]["missing"]) == ("complete", None, 0)
    assert not RunLayout(out).live_status.exists()


def test_an_outcome_that_nobody_reads_any_more_is_still_that_outcome(layout):
    manifest("complete", ranks=[{"rank": 0, "device": "cpu", "state": "complete"}]).write(layout.manifest)
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "virnucpro", "status", str(layout.output_dir)]
    with os.fdopen(writing, "w") as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
