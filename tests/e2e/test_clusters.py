"""Real clusters of Ray and Dask on this machine: the bytes of a run on threads, also when a process is killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager

import psutil
import pytest

from tests.faults.processes import ROOT
from virnucpro.run_layout import RunLayout

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Of the commands: a Prefect of their own, and Ray's files in a short path."""
    home = tmp_path_factory.mktemp("prefect")
    return {
        **os.environ,
        "PREFECT_HOME": str(home),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
        "DO_NOT_TRACK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }


@pytest.fixture(scope="module")
def expected(examples_dir, tmp_path_factory, environment):
    """Return the bytes that a run without a cluster gives."""
    folder = tmp_path_factory.mktemp("threads")
    with command(environment, examples_dir / "proteins.fasta", folder / "out", "--devices", "cpu") as run:
        assert run.wait() == 0
    return RunLayout(folder / "out").embeddings.read_bytes()


@contextmanager
def command(environment, fasta, out, *options):
    """``virnucpro embed`` in a process of its own."""
    arguments = ["embed", str(fasta), "--output", str(out), "--workers", "2", *options]
    out.parent.mkdir(exist_ok=True)
    with (out.parent / "stderr").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "virnucpro", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(60)


def wait_until(condition, *, seconds):
    """Return what *condition* returns, once that is something."""
    end_s = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end_s, f"waited {seconds} s in vain"
        time.sleep(0.1)
    return found


def worker_process(layout, rank):
    """Return the process that computes for a rank, once there is one that has finished something."""
    path = layout.worker_log(rank)

    def started():
        lines = path.read_text().splitlines() if path.exists() else []
        pids = [json.loads(line)["pid"] for line in lines if '"worker.started"' in line]
        return psutil.Process(pids[-1]) if pids and psutil.pid_exists(pids[-1]) else None

    return wait_until(started, seconds=120)


def rows_done(layout):
    """Return how many parts are durable."""
    return len(list(layout.parts_dir.glob("*.h5"))) if layout.parts_dir.exists() else 0


def test_ray_gives_the_same_bytes_also_when_the_process_of_a_task_is_killed(
    examples_dir, tmp_path, environment, expected
):
    layout = RunLayout(tmp_path / "ray" / "out")
    began_s = time.monotonic()
    with command(environment, examples_dir / "proteins.fasta", layout.output_dir, "--runner", "ray") as run:
        worker = worker_process(layout, 0)
        wait_until(lambda: rows_done(layout), seconds=120)
        task = worker.parent()
        assert "ray" in task.name()
        task.kill()
        assert run.wait(240) == 0, (tmp_path / "ray" / "stderr").read_text()
    print(f"a run of 400 proteins on Ray, one task killed: {time.monotonic() - began_s:.0f} s")
    assert layout.embeddings.read_bytes() == expected
    assert not psutil.pid_exists(worker.pid)


@pytest.mark.long
def test_a_standing_cluster_of_dask_that_loses_a_worker_gives_the_same_bytes(
    examples_dir, tmp_path, environment, expected
):
    layout = RunLayout(tmp_path / "dask" / "out")
    with ExitStack() as stack:
        scheduler, address = dask_scheduler(stack, tmp_path, environment)
        workers = [dask_worker(stack, environment, address, tmp_path) for _ in range(2)]
        runner = ("--runner", f"dask://{address}")
        with command(environment, examples_dir / "proteins.fasta", layout.output_dir, *runner) as run:
            worker_process(layout, 0)
            wait_until(lambda: rows_done(layout), seconds=120)
            workers[0].kill()
            assert run.wait(300) == 0, (tmp_path / "dask" / "stderr").read_text()
        assert scheduler.poll() is None
    assert layout.embeddings.read_bytes() == expected


@pytest.mark.long
def test_a_cluster_of_dask_for_the_time_of_a_run_gives_the_same_bytes(examples_dir, tmp_path, environment, expected):
    layout = RunLayout(tmp_path / "dask" / "out")
    with command(environment, examples_dir / "proteins.fasta", layout.output_dir, "--runner", "dask") as run:
        assert run.wait(300) == 0, (tmp_path / "dask" / "stderr").read_text()
    assert layout.embeddings.read_bytes() == expected


def dask_scheduler(stack, folder, environment):
    """Start a scheduler on a free port; return it and its host and port."""
    told = folder / "scheduler.json"
    arguments = ["--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(told)]
    process = started(stack, environment, "distributed.cli.dask_scheduler", *arguments)
    address = wait_until(lambda: told.exists() and json.loads(told.read_text())["address"], seconds=60)
    return process, address.removeprefix("tcp://")


def dask_worker(stack, environment, address, folder):
    """Start a worker with one slot."""
    arguments = ["--no-nanny", "--nthreads", "1", "--no-dashboard", "--local-directory", str(folder)]
    return started(stack, environment, "distributed.cli.dask_worker", f"tcp://{address}", *arguments)


def started(stack, environment, module, *arguments):
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def end():
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(60)

    stack.callback(end)
    return process


@pytest.mark.parametrize("name", ["ray://127.0.0.1:1", "dask://127.0.0.1:1"])
@pytest.mark.long
def test_a_cluster_that_is_not_there_is_an_error_of_the_configuration(examples_dir, tmp_path, environment, name):
    out = tmp_path / "absent" / "out"
    with command(environment, examples_dir / "proteins.fasta", out, "--runner", name) as run:
        assert run.wait(200) == 78
    assert "no cluster of" in (tmp_path / "absent" / "stderr").read_text()
    shutil.rmtree(out, ignore_errors=True)
