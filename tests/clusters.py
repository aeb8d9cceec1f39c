"""Commands and clusters of tests: ``virnucpro`` on Ray or Dask of this machine, in processes that end with a test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil

from tests.faults.processes import ROOT


def environment_of_commands(home):
    """Return the environment of a command that has a Prefect of its own in the folder *home*."""
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
