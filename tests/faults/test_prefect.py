"""
Row 28: a task's retry, a flow that is run again, and an API that goes: nothing that is durable is computed again.

The model notes every batch that it computes, so that a row which lay on the disk and was computed again is seen. A
private Prefect server, the real flow, the hash model.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
import time

import psutil
import pytest

pytest.importorskip("prefect")

import flows.embed
from tests import fakes
from tests.faults.processes import (
    DEADLINE_S,
    RowsFound,
    compare_rows,
    hash_command,
    kill_landed,
    make_proteins,
    wait_until,
    workers_of,
)
from virnucpro.run_layout import RunLayout
from virnucpro.store.parts import SealedBlocks, part_paths

pytestmark = pytest.mark.slow  # a server of its own


@pytest.fixture(scope="module", autouse=True)
def prefect_server():
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=180):
        yield


@pytest.fixture
def proteins(tmp_path):
    fasta = tmp_path / "proteins.fasta"
    return fasta, make_proteins(fasta, random.Random(4), 60)


def durable_sequences(out, sequences):
    """The letters of every sequence whose row is in a part or a shard that validates."""
    layout = RunLayout(out)
    found = set()
    for path in [*part_paths(layout.parts_dir), *layout.shards()]:
        for names in SealedBlocks.open(path).iter_sequence_ids():
            found |= {sequences[name] for name in names}
    return found


def computed(control):
    """What the model was given: (pid, letters), in order."""
    lines = control.with_suffix(".calls").read_text().splitlines()
    return [(call["pid"], letters) for call in map(json.loads, lines) for letters in call["sequences"]]


class KillInTheMiddle(threading.Thread):
    """Once some of a run is durable: stop its workers, note what is durable, kill one, let the others go."""

    def __init__(self, out, sequences, control):
        super().__init__(daemon=True)
        self.out, self.sequences, self.control = out, sequences, control
        self.num_computed = 0
        self.durable: set[str] = set()
        self.killed: int | None = None

    def run(self):
        wait_until(lambda: len(part_paths(RunLayout(self.out).parts_dir)) >= 4, what="parts")
        workers = workers_of(psutil.Process().pid)
        for worker in workers:
            worker.suspend()
        wait_until(lambda: all(worker.status() == psutil.STATUS_STOPPED for worker in workers), what="a standstill")
        self.durable = durable_sequences(self.out, self.sequences)
        self.num_computed = len(computed(self.control))
        self.killed = workers[0].pid
        kill_landed(workers[0])
        for worker in workers[1:]:
            worker.resume()


@pytest.fixture
def hash_flow(monkeypatch, tmp_path):
    """The flow with the hash model; the file that controls it."""
    control = tmp_path / "control.json"
    plan = {"how": "none", "times": 0, "before_batch": -1, "slow_s": 0.1, "calls": True}
    config = fakes.faulty_config(control, plan)
    monkeypatch.setattr(flows.embed, "configure_model", lambda *_, **__: config)
    return control


def recomputed(control, killer):
    """What was durable when the process was killed and was computed afterwards."""
    return {letters for _, letters in computed(control)[killer.num_computed :]} & killer.durable


def test_a_tasks_retry_computes_nothing_again_that_is_durable(tmp_path, hash_flow, soak_table):
    fasta, out = tmp_path / "proteins.fasta", tmp_path / "out"
    sequences = make_proteins(fasta, random.Random(4), 240)  # the other rank is not through before the retry
    killer = KillInTheMiddle(out, sequences, hash_flow)
    killer.start()
    state = flows.embed.embed([str(fasta)], str(out), hardware={"devices": "cpu", "workers": 2}, return_state=True)
    killer.join(DEADLINE_S)
    assert state.is_completed(), state.message
    assert len(killer.durable) >= 4
    assert len({pid for pid, _ in computed(hash_flow)}) == 3
    again = recomputed(hash_flow, killer)
    found = compare_rows(out, sequences)
    soak_table("Prefect retries a task", tries=1, lost=found.lost, differing=len(again))
    assert again == set()
    assert found == RowsFound()


def test_a_flow_that_is_run_again_computes_nothing_again_that_is_durable(tmp_path, proteins, hash_flow, soak_table):
    fasta, sequences = proteins
    out = tmp_path / "out"
    killer = KillInTheMiddle(out, sequences, hash_flow)
    killer.start()
    state = flows.embed.embed(
        [str(fasta)],
        str(out),
        hardware={"devices": "cpu", "workers": 1},
        limits={"worker_retries": 0},
        return_state=True,
    )
    killer.join(DEADLINE_S)
    assert state.is_failed(), state.message
    state = flows.embed.embed([str(fasta)], str(out), hardware={"devices": "cpu", "workers": 2}, return_state=True)
    assert state.is_completed(), state.message
    again = recomputed(hash_flow, killer)
    found = compare_rows(out, sequences)
    soak_table("Prefect runs the flow again", tries=1, lost=found.lost, differing=len(again))
    assert len(killer.durable) >= 4
    assert again == set()
    assert found == RowsFound()


def test_a_time_limit_ends_the_workers_and_the_next_run_goes_on_from_what_is_durable(tmp_path, proteins, hash_flow):
    fasta, sequences = proteins
    out = tmp_path / "out"
    rung_s = []

    def ring():
        wait_until(lambda: len(part_paths(RunLayout(out).parts_dir)) >= 4, what="parts")
        rung_s.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGALRM)  # the clock, hours early

    thread = threading.Thread(target=ring)
    thread.start()
    state = flows.embed.embed(
        [str(fasta)],
        str(out),
        hardware={"devices": "cpu", "workers": 1},
        limits={"time_limit_minutes": 90},
        return_state=True,
    )
    seconds = time.monotonic() - rung_s[0]
    thread.join()
    print(f"ended {seconds:.1f} s after the clock rang")
    assert (state.type.value, state.name) == ("FAILED", "TimedOut")
    assert state.message == "the time limit of 90 minutes has passed: run it again to continue"
    assert seconds < 3 * 10
    assert workers_of(psutil.Process().pid) == []
    durable = durable_sequences(out, sequences)
    assert 0 < len(durable) < len(set(sequences.values()))
    assert json.loads((out / "run.json").read_text())["state"] == "stopped"
    state = flows.embed.embed([str(fasta)], str(out), hardware={"devices": "cpu", "workers": 2}, return_state=True)
    assert state.is_completed(), state.message
    pids = [pid for pid, _ in computed(hash_flow)]
    assert not durable & {letters for pid, letters in computed(hash_flow) if pid != pids[0]}
    assert compare_rows(out, sequences) == RowsFound()


def test_an_api_that_is_gone_in_the_middle_costs_no_row_and_the_result_is_there(tmp_path, proteins, monkeypatch):
    fasta, sequences = proteins
    out = tmp_path / "out"
    command = hash_command(tmp_path / "command", fasta, slow_s=0.1, calls=True)
    for name in ("PREFECT_API_URL", "PREFECT_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    with command.running(out, workers=1, options=["--flow"]) as process:
        wait_until(lambda: len(part_paths(RunLayout(out).parts_dir)) >= 4, what="parts")
        children = psutil.Process(process.pid).children()
        (server,) = [child for child in children if "uvicorn" in " ".join(child.cmdline())]
        assert kill_landed(server)
        began_s = time.monotonic()
        wait_until(lambda: json.loads((out / "run.json").read_text())["state"] == "complete", what="the result")
        print(f"complete {time.monotonic() - began_s:.1f} s after the API had gone")
        process.kill()  # Prefect goes on trying to reach its API for minutes
    assert not re.search(r"View at| \| INFO ", command.errors())  # of a server that goes with the command
    before = len(computed(command.control))
    assert before == len(set(sequences.values()))
    assert compare_rows(out, sequences) == RowsFound()
    assert command.run(out, workers=1) == 0, command.errors()
    assert len(computed(command.control)) == before
