"""One run at a time in a folder whose file system knows no locks: a lease, renewed by its holder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from virnucpro.errors import ExitCode, OutputError, RunLockedError
from virnucpro.store.locks.holder import holder_of
from virnucpro.store.locks.lease import LeaseLock
from virnucpro.store.locks.run_lock import RunLock

LEASE_S = 1.5

HOLD = """
    import errno, fcntl, signal, sys, time
    from pathlib import Path
    from virnucpro.store.locks.run_lock import RunLock

    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    fcntl.flock = flock
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with RunLock(Path(sys.argv[1]), run_id=sys.argv[2], lease_s=1.5):
        print("held", flush=True)
        while True:
            time.sleep(0.1)  # a signal just before a read that waits for ever would not be heard
"""


@pytest.fixture(autouse=True, params=[errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def no_locks(request, monkeypatch):
    def flock(*_):
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", flock)


@contextmanager
def held_on_host(name, path, run_id="the first"):
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLD), str(path), run_id],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "VIRNUCPRO_HOST_NAME": name},
    ) as process:
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("no_locks", [errno.ENOLCK], indirect=True)
def test_a_second_run_on_any_host_is_told_who_holds_the_folder(tmp_path, monkeypatch):
    path = tmp_path / "out" / ".run.lock"
    with held_on_host("host-a", path) as holder:
        for here in ("host-a", "host-b"):
            monkeypatch.setenv("VIRNUCPRO_HOST_NAME", here)
            with pytest.raises(RunLockedError) as caught, RunLock(path, run_id="second", lease_s=LEASE_S):
                pass
            assert caught.value.exit_code == ExitCode.RUN_LOCKED
            for word in ("host-a", str(holder.pid), "the first", '"expires_after_s": 1.5'):
                assert word in str(caught.value)
        assert holder_of(path).run_id == "the first"


@pytest.mark.parametrize("no_locks", [errno.ENOLCK], indirect=True)
def test_a_holder_that_was_killed_is_followed_at_once_on_its_host_and_elsewhere_after_its_lease(tmp_path, monkeypatch):
    for here, is_at_once in (("host-a", True), ("host-b", False)):
        path = tmp_path / here / ".run.lock"
        with held_on_host("host-a", path) as holder:
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            monkeypatch.setenv("VIRNUCPRO_HOST_NAME", here)
            began_s = time.monotonic()
            with RunLock(path, run_id="next", lease_s=LEASE_S):
                assert (time.monotonic() - began_s < LEASE_S) == is_at_once
                assert json.loads(path.read_text())["run_id"] == "next"


@pytest.mark.parametrize("no_locks", [errno.ENOLCK], indirect=True)
def test_a_holder_that_stood_still_until_another_took_over_is_stopped_when_it_goes_on(tmp_path, monkeypatch):
    path = tmp_path / ".run.lock"
    with held_on_host("host-a", path) as holder:
        holder.send_signal(signal.SIGSTOP)
        monkeypatch.setenv("VIRNUCPRO_HOST_NAME", "host-b")
        with RunLock(path, run_id="next", lease_s=LEASE_S):
            holder.send_signal(signal.SIGCONT)
            assert holder.wait(30) == 143
            assert '"next"' in path.with_suffix(".lease").read_text()
            with pytest.raises(RunLockedError), RunLock(path, run_id="a third", lease_s=LEASE_S):
                pass


def test_the_lease_is_renewed_while_held_and_gone_afterwards(tmp_path):
    path = tmp_path / "new" / ".run.lock"
    with RunLock(path, run_id="a", lease_s=0.6):
        lease = path.with_suffix(".lease")
        before = lease.read_bytes()
        time.sleep(0.5)
        assert lease.read_bytes() != before
        with pytest.raises(RunLockedError), RunLock(path, run_id="b", lease_s=0.6):
            pass
    assert not (tmp_path / "new").exists()
    with RunLock(path, run_id="c", lease_s=0.6):
        (tmp_path / "new" / "run.json").write_text("{}")
    assert sorted(item.name for item in (tmp_path / "new").iterdir()) == [".run.lock", "run.json"]
    assert json.loads(path.read_bytes()).keys() == {"mark"}


def test_the_lease_is_free_after_an_error(tmp_path):
    with pytest.raises(ZeroDivisionError), RunLock(tmp_path / ".run.lock", run_id="a"):
        1 / 0  # noqa: B018
    with RunLock(tmp_path / ".run.lock", run_id="b"):
        pass


def test_a_lock_that_is_lost_is_said_once(tmp_path):
    said = []
    lock = LeaseLock(tmp_path / "lease", {}, lease_s=0.3, on_lost=lambda: said.append("lost"))
    lock.acquire()
    (tmp_path / "lease").write_text('{"owner": "another"}')
    time.sleep(0.5)
    assert said == ["lost"]
    lock.release()
    assert said == ["lost"]
    assert (tmp_path / "lease").read_text() == '{"owner": "another"}'


def test_a_lock_that_is_refused_for_another_reason_is_an_output_error(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OutputError), RunLock(tmp_path / ".run.lock", run_id="a"):
        pass
