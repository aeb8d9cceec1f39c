"""``embed --flow`` as a process of its own: with a server of its own, which goes with it however it goes."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import ExitStack, closing

import psutil
import pytest

pytest.importorskip("prefect")

from virnucpro.pipeline.run.verification import verify_run

pytestmark = [pytest.mark.slow, pytest.mark.long]  # each starts a server of its own


@pytest.mark.parametrize(
    ("number", "to_the_group", "code"),
    [
        (signal.SIGINT, True, 130),
        (signal.SIGTERM, False, 143),
        (signal.SIGHUP, True, 143),
        (signal.SIGKILL, False, -9),
    ],
)
def test_a_signal_ends_the_flow_its_workers_and_its_server(tmp_path, examples_dir, number, to_the_group, code):
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "virnucpro",
        "embed",
        examples_dir / "proteins.fasta",
        "-o",
        out,
        "--devices",
        "cpu",
    ]
    command += ["--workers", "2", "--token-budget", "1500"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    flow = subprocess.Popen(
        [*command, "--flow"],
        env={**environment, "PREFECT_HOME": str(tmp_path / "prefect")},
        stdout=subprocess.DEVNULL,
        stderr=(tmp_path / "errors").open("wb"),
        process_group=0,
    )
    logs = [out / "logs" / f"worker_{rank}.log" for rank in range(2)]
    deadline_s = time.monotonic() + 120
    while not all(log.exists() and "model.loaded" in log.read_text() for log in logs):
        assert time.monotonic() < deadline_s, (tmp_path / "errors").read_text()
        time.sleep(0.05)
    family = psutil.Process(flow.pid).children(recursive=True)
    assert sum("uvicorn" in " ".join(process.cmdline()) for process in family) == 1
    assert sum("spawn_main" in " ".join(process.cmdline()) for process in family) == 2
    began_s = time.monotonic()
    (os.killpg if to_the_group else os.kill)(flow.pid, number)
    assert flow.wait(60) == code, (tmp_path / "errors").read_text()
    seconds = time.monotonic() - began_s
    _, alive = psutil.wait_procs(family, timeout=12)
    print(f"gone {seconds:.1f} s after the signal, all of it after {time.monotonic() - began_s:.1f} s")
    assert alive == []
    assert seconds < 3 * 10
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert verify_run(out).problems == []


def test_two_flows_at_once_make_one_database_and_both_end_well(tmp_path, examples_dir):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    environment["PREFECT_HOME"] = str(tmp_path / "prefect")
    command = [
        sys.executable,
        "-m",
        "virnucpro",
        "embed",
        examples_dir / "proteins.fasta",
        "--devices",
        "cpu",
        "--flow",
    ]
    with ExitStack() as stack:
        flows = [
            stack.enter_context(
                subprocess.Popen([*command, "-o", tmp_path / name], env=environment, stderr=subprocess.PIPE)
            )
            for name in ("one", "two")
        ]
        errors = [flow.communicate(timeout=240)[1].decode() for flow in flows]
    assert [flow.returncode for flow in flows] == [0, 0], errors
    with closing(sqlite3.connect(tmp_path / "prefect" / "prefect.db")) as database:
        states = database.execute("SELECT state_type FROM flow_run").fetchall()
    assert states == [("COMPLETED",)] * 2
