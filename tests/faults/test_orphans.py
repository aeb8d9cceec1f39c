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
from contextlib import contextmanager, suppress

import psutil
import pytest

from tests.fakes import sleep_long
from tests.faults.processes import ROOT, hash_command, make_proteins, wait_until, workers_of
from virnucpro import run_folders
from virnucpro.errors import OutputError, RunLockedError
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.work.worker_process import WorkerProcess
from virnucpro.run_layout import RunLayout
from virnucpro.store.locks import worker_lock
from virnucpro.store.locks.run_lock import RunLock

HOLD = """
import sys, time
from pathlib import Path
from virnucpro.store.locks.worker_lock import hold_worker_lock
hold_worker_lock(Path(sys.argv[1]), 3)
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def orphan(tmp_path):
    """A process that holds a worker's lock, as one that is stopped does."""
    with worker_of(tmp_path, tmp_path) as process:
        process.send_signal(signal.SIGSTOP)
        yield process


@contextmanager
def worker_of(folder, started_for):
    """A process that holds the lock of a worker in *folder*, and was started, its environment says, for another one."""
    environment = {**os.environ}
    if started_for is not None:
        run_folders.enter(started_for, "mark")
        environment |= run_folders.worker_environment()
        run_folders.leave(started_for)
    hold = [sys.executable, "-c", HOLD, folder]
    with subprocess.Popen(hold, stdout=subprocess.PIPE, cwd=ROOT, env=environment) as process:
        try:
            assert process.stdout.readline() == b"held\n"
            yield process
        finally:
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
    with worker_of(tmp_path, tmp_path) as process:
        monkeypatch.setenv("VIRNUCPRO_HOST_NAME", "another")  # we are on another host than it
        monkeypatch.setattr(worker_lock, "END_TIMEOUT_S", 0.2)
        with pytest.raises(RunLockedError):
            RunLock(RunLayout(tmp_path).lock, run_id="b").__enter__()
        assert process.poll() is None


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
        (layout.worker_locks_dir / "0.17.0123abcd.lock").write_text("{}")
        (layout.worker_locks_dir / "precious.lock").write_text("{}")
    assert [path.name for path in layout.worker_locks_dir.iterdir()] == ["precious.lock"]


def test_a_worker_carries_the_sign_of_the_folders_that_it_was_started_for(tmp_path):
    with RunLock(RunLayout(tmp_path).lock, run_id="a"):
        worker = WorkerProcess(sleep_long, rank=0, world_size=1, device=CPU, worker_args=())
        worker.start()
        pid = worker.process.pid
        wait_until(lambda: run_folders.is_worker_for(pid, tmp_path), deadline_s=30, what="the new program")
        assert not run_folders.is_worker_for(pid, tmp_path.parent)
        assert not run_folders.is_worker_for(os.getpid(), tmp_path)
        worker.kill()
        worker.close()


@pytest.mark.parametrize("started_for", [None, "another"])
def test_a_locked_file_that_names_another_process_of_the_user_ends_nobody(tmp_path, monkeypatch, started_for):
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "another").mkdir()
    monkeypatch.setattr(worker_lock, "END_TIMEOUT_S", 0.2)
    with worker_of(out, started_for and tmp_path / started_for) as innocent:  # whose lock file says all that is true
        with pytest.raises(RunLockedError, match="a worker of a run that has ended"):
            RunLock(RunLayout(out).lock, run_id="b").__enter__()
        assert innocent.poll() is None


@pytest.mark.soak
def test_forged_files_of_workers_end_nobody(tmp_path, monkeypatch, seed, soak_table):
    chooser, killed = random.Random(seed), 0
    monkeypatch.setattr(worker_lock, "END_TIMEOUT_S", 0.05)
    out, tries = tmp_path / "out", 50
    (tmp_path / "another").mkdir()
    for number in range(tries):
        out.mkdir()
        with worker_of(out, chooser.choice([None, tmp_path / "another"])) as innocent:
            (path,) = RunLayout(out).worker_locks()
            about = json.loads(path.read_text())
            for name in chooser.sample(sorted(about), k=chooser.randint(0, len(about))):
                about[name] = chooser.choice(
                    [None, 0, -1, "x", innocent.pid, str(innocent.pid), [], 10**30, about[name]]
                )
            path.write_text(json.dumps(about))
            with suppress(RunLockedError), RunLock(RunLayout(out).lock, run_id="b"):
                pass
            killed += innocent.poll() is not None
        out.rename(tmp_path / str(number))
    soak_table("a forged, locked file of a worker that names another process", tries=tries, differing=killed)
    assert killed == 0


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/etc/hostname")])
def test_what_is_no_file_in_place_of_a_workers_lock_is_left_alone(tmp_path, make):
    layout = RunLayout(tmp_path)
    layout.worker_locks_dir.mkdir(parents=True)
    make(layout.worker_locks_dir / "0.17.0123abcd.lock")
    with RunLock(layout.lock, run_id="a"):
        pass
    assert os.path.lexists(layout.worker_locks_dir / "0.17.0123abcd.lock")


@pytest.mark.parametrize("name", ["work", "work/parts", "work/workers", "work/unpacked", "work/rows", "work/contigs"])
def test_a_work_folder_that_leads_elsewhere_is_refused(tmp_path, name):
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "out" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OutputError, match="is a link or not a folder") as caught:
        RunLock(RunLayout(tmp_path / "out").lock, run_id="a").__enter__()
    assert caught.value.exit_code == 73
    assert not RunLayout(tmp_path / "out").lock.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_work_folder_of_another_user_is_refused(tmp_path):
    layout = RunLayout(tmp_path)
    layout.work_dir.mkdir()
    os.chown(layout.work_dir, 12345, -1)
    with pytest.raises(OutputError, match="belongs to another user \\(number 12345\\)") as caught:
        RunLock(layout.lock, run_id="a").__enter__()
    assert caught.value.exit_code == 73


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
