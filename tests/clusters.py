"""Commands and clusters of tests: ``virnucpro`` on Ray or Dask of this machine, in processes that end with a test."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

import psutil
from distributed import Client

from tests.faults.processes import ROOT, make_proteins
from tests.nodes import Node
from virnucpro.run_layout import RunLayout


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
def command(environment, fasta, out, *options, program=("virnucpro",)):
    """``virnucpro embed`` in a process of its own, or that of another *program*."""
    arguments = ["embed", str(fasta), "--output", str(out), "--workers", "2", *options]
    out.parent.mkdir(exist_ok=True)
    with (out.parent / "stderr").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", *program, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  also in a shell's background
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(60)


@dataclass(frozen=True)
class SlowRun:
    """A run of half a minute on two workers, with a part on disk every second: its input and the program for it."""

    fasta: Path
    program: tuple[str, ...]

    @classmethod
    def made(cls, folder, num_proteins=2000):
        """Write what it needs into *folder*."""
        make_proteins(folder / "slow.fasta", random.Random(3), num_proteins)
        control = folder / "control.json"
        control.write_text(json.dumps({"how": "none", "times": 0, "before_batch": -1, "slow_s": 0.1}))
        return cls(folder / "slow.fasta", ("tests.faults.hash_command", str(control)))

    def on(self, environment, out, *options):
        """Run it, as ``command`` does; with the runner of *options*."""
        return command(environment, self.fasta, out, *options, program=self.program)

    def expected(self, environment, out):
        """Return the bytes that the run gives without a cluster."""
        with self.on(environment, out, "--runner", "threads", "--devices", "cpu") as run:
            assert run.wait(240) == 0, said(out)
        return RunLayout(out).embeddings.read_bytes()


def said(out):
    """Return what a command has said on standard error so far."""
    return (out.parent / "stderr").read_text(errors="replace")


def free_port():
    """Return a port of 127.0.0.1 that nobody has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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

    return wait_until(started, seconds=240)


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


def dask_workers(stack, environments, address, folder):
    """Start a worker with one slot in each of these environments; return them once the scheduler knows them."""
    arguments = ["--no-nanny", "--nthreads", "1", "--no-dashboard", "--local-directory", str(folder)]
    url = f"tcp://{address}"
    workers = [started(stack, one, "distributed.cli.dask_worker", url, *arguments) for one in environments]
    with Client(url, set_as_default=False) as client:
        client.wait_for_workers(len(workers), timeout=120)
    return workers


@contextmanager
def ray_program():
    """Yield the words that start a node of Ray, and the folder for what the head writes."""
    temporary = Path(mkdtemp(prefix="vnp-ray-"))  # sockets' paths must be short
    (temporary / "venv").symlink_to(sys.prefix)  # Ray starts its client's server by a shell, unquoted
    python = str(temporary / "venv" / "bin" / "python")
    ports = ["--min-worker-port", "0", "--max-worker-port", "0"]
    try:
        yield [python, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *ports], temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def ray_head_and_node(stack, folder, environment, *, slots):
    """
    Start a head of Ray that computes nothing, and a node that does; return the head and its host and port.

    Both ask for the token of the environment.
    """
    head, node = (Node(f"{name}-{os.getpid()}", "127.0.0.1") for name in ("head", "node"))
    port, client_port = str(free_port()), str(free_port())
    ray, temporary = stack.enter_context(ray_program())
    of_head = ["--head", "--port", port, "--ray-client-server-port", client_port, "--include-dashboard", "false"]
    of_head += ["--temp-dir", str(temporary), "--num-cpus", "0"]
    for one, options in (
        (head, of_head),
        (node, ["--address", f"127.0.0.1:{port}", "--num-cpus", str(slots)]),
    ):
        log = folder / f"{one.name}.log"
        environ = {**environment, "RAY_AUTH_MODE": "token"}
        stack.enter_context(one.run([*ray, "--node-ip-address", "127.0.0.1", *options], log, environ))
        stack.callback(one.kill)
        wait_until(lambda log=log: "Ray runtime started" in log.read_text(), seconds=90)
    return head, f"127.0.0.1:{client_port}"


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
