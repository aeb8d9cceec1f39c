"""Several runs on one host with two GPUs (which are none): no GPU ever computes for two of them, and all complete."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId

from tests import fake_gpus
from tests.faults.processes import ROOT, compare_rows, make_proteins, wait_until
from tests.hash_flows import VARIABLE, control_file
from virnucpro.errors import ResultError
from virnucpro.pipeline.run.run_status import status_of

pytestmark = pytest.mark.slow


@pytest.fixture
def proteins(tmp_path):
    return make_proteins(tmp_path / "in.fasta", random.Random(7), 24)


@contextmanager
def command(tmp_path, control, name, devices):
    """``virnucpro embed`` with the hash model on the fake host; ``.said`` is what it has said on standard error."""
    log = tmp_path / f"{name}.stderr"
    arguments = ["embed", str(tmp_path / "in.fasta"), "--output", str(tmp_path / name), "--devices", devices]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.hash_command", str(control), *arguments],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                fake_gpus.VARIABLE: "2",
                "VIRNUCPRO_LOCK_DIR": str(tmp_path / "locks"),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            process_group=0,
        )
    process.said = log.read_text
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def doing(folder):
    """What the run in a folder says that it does."""
    try:
        return status_of(folder).to_json()["doing"] or ""
    except ResultError:
        return ""


@pytest.mark.long
def test_a_run_waits_for_the_gpus_of_another_and_has_them_when_that_one_is_killed(tmp_path, proteins):
    control = control_file(tmp_path / "control.json", gate=str(tmp_path / "never"))
    with command(tmp_path, control, "first", "auto") as first:
        wait_until(lambda: len(fake_gpus.uses_of(control)) == 2, what="the first run's workers")
        with command(tmp_path, control, "second", "0,1") as second:
            wait_until(lambda: "waiting for GPUs" in second.said(), what="the second run to wait")
            assert f"cuda:1: held by process {first.pid} of " in second.said()
            status = subprocess.run(
                [sys.executable, "-m", "virnucpro", "status", str(tmp_path / "second")],
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=False,
            )
            assert "waiting for devices that other runs hold" in status.stdout
            began_s = time.monotonic()
            second.send_signal(signal.SIGINT)
            assert second.wait(20) == 130
            assert time.monotonic() - began_s < 5
        assert not (tmp_path / "second" / "run.json").exists()
        with command(tmp_path, control, "second", "0,1") as second:
            wait_until(lambda: "waiting for GPUs" in second.said(), what="the second run to wait again")
            assert first.poll() is None
            killed_s = time.monotonic()
            first.kill()
            control_file(control)
            assert second.wait(60) == 0, second.said()
    uses = [use for use in fake_gpus.uses_of(control) if use["out"].endswith("second")]
    assert {use["device"] for use in uses} == {"0", "1"}
    assert all(use["begin"] > killed_s for use in uses)
    found = compare_rows(tmp_path / "second", proteins)
    assert (found.lost, found.duplicated, found.differing) == (0, 0, 0)


def test_runs_of_a_deployment_side_by_side_never_have_one_gpu_twice(prefect_server, tmp_path, proteins):
    gate = tmp_path / "gate"
    control = control_file(tmp_path / "control.json", gate=str(gate))
    deployment = prefect_server.deploy(
        "tests/hash_flows.py:embed",
        "two-gpus",
        **{
            VARIABLE: str(control),
            fake_gpus.VARIABLE: "2",
            "VIRNUCPRO_LOCK_DIR": str(tmp_path / "locks"),
            "VIRNUCPRO_DATA_ROOTS": str(tmp_path),
        },
    )

    def start(name, devices):
        return prefect_server.start(
            deployment,
            fasta_files=[str(tmp_path / "in.fasta")],
            output_dir=str(tmp_path / name),
            hardware={"devices": devices},
        )

    with prefect_server.worker():
        runs = [start("one", "auto:1"), start("other", "auto:1")]
        wait_until(lambda: len(fake_gpus.uses_of(control)) == 2, what="both runs to compute side by side")
        one, other = fake_gpus.uses_of(control)
        assert {one["device"], other["device"]} == {"0", "1"}
        assert one["end"] is other["end"] is None
        both, cancelled = start("both", "auto:2"), start("cancelled", "auto:2")
        for name in ("both", "cancelled"):
            wait_until(lambda name=name: "waiting for devices" in doing(tmp_path / name), what=f"{name} to wait")
        prefect_server.cancel(cancelled)
        gate.touch()
        for run in (*runs, both):
            prefect_server.wait_for_state(run, "Completed", limit_s=90)
        prefect_server.wait_for_state(cancelled, "Cancelled", limit_s=30)
        with prefect_server.client() as client:
            lines = client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[both])))
    assert any("waiting for GPUs (all of these): cuda:0: held by process" in line.message for line in lines)
    uses = fake_gpus.uses_of(control)
    assert {use["device"] for use in uses if use["out"].endswith("both")} == {"0", "1"}
    assert not [use for use in uses if use["out"].endswith("cancelled")]
    assert fake_gpus.shared(uses) == []
    for log in (tmp_path / "both" / "logs").glob("worker_*.log"):
        events = [json.loads(line)["event"] for line in log.read_text().splitlines()]
        assert (events.count("model.loaded"), events.count("model.kept")) == (1, 1), "other threads of Prefect took it"
    for name in ("one", "other", "both"):
        found = compare_rows(tmp_path / name, proteins)
        assert (found.lost, found.duplicated, found.differing) == (0, 0, 0)
