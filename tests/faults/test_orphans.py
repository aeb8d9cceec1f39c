"""Row 10: a worker of a dead run wakes up while the next run works in the folder: it can change nothing there."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import signal
import subprocess
import sys

import psutil
import pytest

from tests.faults.processes import ROOT, hash_command, make_proteins, wait_until, workers_of
from virnucpro.errors import RunLockedError
from virnucpro.run_layout import RunLayout
from virnucpro.store import worker_lock
from virnucpro.store.run_lock import RunLock

HOLD = """
import sys, time
from pathlib import Path
from virnucpro.store.worker_lock import hold_worker_lock
hold_worker_lock(Path(sys.argv[1]), 3)
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def orphan(tmp_path):
    """A process that holds a worker's lock, as one that is stopped does."""
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout.readline() == b"held\n"
        process.send_signal(signal.SIGSTOP)
        yield process
        process.kill()


def test_a_new_run_ends_the_stopped_worker_of_a_dead_one_before_it_begins(tmp_path, orphan):
    with RunLock(RunLayout(tmp_path).lock, run_id="b"):
        assert orphan.wait(10) == -signal.SIGKILL
        assert list(RunLayout(tmp_path).worker_locks_dir.iterdir()) == []


@pytest.mark.parametrize("field", ["space", "started"])
def test_a_worker_that_is_not_ours_to_end_keeps_the_folder(tmp_path, orphan, monkeypatch, field):
    (path,) = RunLayout(tmp_path).worker_locks_dir.iterdir()
    path.write_text(json.dumps({**json.loads(path.read_text()), field: "another"}))
    monkeypatch.setattr(worker_lock, "END_TIMEOUT_S", 0.2)
    with pytest.raises(RunLockedError, match="a worker of a run that has ended") as caught:
        RunLock(RunLayout(tmp_path).lock, run_id="b").__enter__()
    assert caught.value.exit_code == 75
    assert orphan.poll() is None
    assert path.exists()


def test_a_worker_whose_number_another_process_has_taken_is_not_killed_for_it(tmp_path, orphan, monkeypatch):
    (path,) = RunLayout(tmp_path).worker_locks_dir.iterdir()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as innocent:
        path.write_text(json.dumps({**json.loads(path.read_text()), "pid": innocent.pid}))
        monkeypatch.setattr(worker_lock, "END_TIMEOUT_S", 0.2)
        with pytest.raises(RunLockedError):
            RunLock(RunLayout(tmp_path).lock, run_id="b").__enter__()
        assert innocent.poll() is None
        innocent.communicate(b"\n", timeout=30)


def test_a_process_of_another_host_with_the_same_number_is_not_killed(tmp_path, monkeypatch):
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout.readline() == b"held\n"
        monkeypatch.setenv("VIRNUCPRO_HOST_NAME", "another")  # we are on another host than it
        monkeypatch.setattr(worker_lock, "END_TIMEOUT_S", 0.2)
        with pytest.raises(RunLockedError):
            RunLock(RunLayout(tmp_path).lock, run_id="b").__enter__()
        assert process.poll() is None
        process.kill()


def test_without_locks_a_new_run_ends_the_worker_of_a_dead_one_all_the_same(tmp_path, orphan, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with RunLock(RunLayout(tmp_path).lock, run_id="b"):
        assert orphan.wait(10) == -signal.SIGKILL
        assert list(RunLayout(tmp_path).worker_locks_dir.iterdir()) == []
        worker_lock.hold_worker_lock(tmp_path, 0)
        assert len(list(RunLayout(tmp_path).worker_locks_dir.iterdir())) == 1


def test_a_worker_that_comes_when_the_folder_is_another_runs_does_not_begin(tmp_path):
    with RunLock(RunLayout(tmp_path).lock, run_id="b"):
        holder = json.loads(RunLayout(tmp_path).lock.read_text())
        RunLayout(tmp_path).lock.write_text(json.dumps({**holder, "pid": 1}))
        with pytest.raises(RunLockedError):
            worker_lock.hold_worker_lock(tmp_path, 0)


def test_a_run_leaves_no_lock_of_its_workers(tmp_path):
    layout = RunLayout(tmp_path)
    with RunLock(layout.lock, run_id="a"):
        layout.worker_locks_dir.mkdir(parents=True)
        (layout.worker_locks_dir / "0.17.abc.lock").write_text("{}")
    assert list(layout.worker_locks_dir.iterdir()) == []


@pytest.mark.slow
def test_a_stopped_worker_of_a_killed_run_cannot_replace_anything_of_the_next_one(tmp_path):
    sequences = make_proteins(tmp_path / "in.fasta", random.Random(5), 60)
    slow = hash_command(tmp_path / "slow", tmp_path / "in.fasta", slow_s=0.2)
    fast = hash_command(tmp_path / "fast", tmp_path / "in.fasta")
    assert fast.run(tmp_path / "undisturbed", workers=1) == 0
    out = tmp_path / "out"
    arguments = slow.arguments(out, workers=2)
    with subprocess.Popen(arguments, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}) as first:
        wait_until(lambda: len(list((out / "work" / "parts").glob("part_*.h5"))) >= 2, what="two parts")
        workers = workers_of(first.pid)
        assert len(workers) == 2
        for worker in workers:
            worker.suspend()
        first.kill()
        first.wait(30)
        assert psutil.wait_procs(workers, timeout=5)[1] == []  # the kernel ends them with their parent
        assert fast.run(out, workers=1) == 0
    assert (out / "embeddings.h5").read_bytes() == (tmp_path / "undisturbed" / "embeddings.h5").read_bytes()
    assert len(sequences) == 60
    assert list((out / "work" / "workers").iterdir()) == []
