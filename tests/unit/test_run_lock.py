"""One run at a time in a folder; the lock goes with its holder, however that ends."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path

import pytest

from virnucpro.errors import ExitCode, OutputError, RunLockedError
from virnucpro.store.locks.run_lock import RunLock

HOLD = """
    import sys
    from pathlib import Path
    from virnucpro.store.locks.run_lock import RunLock

    with RunLock(Path(sys.argv[1]), run_id="the first"):
        print("held", flush=True)
        sys.stdin.read()
"""


@contextmanager
def held_by_another_process(path):
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLD), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as process:
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def test_a_second_run_is_told_who_holds_the_folder_and_changes_nothing(tmp_path):
    path = tmp_path / "out" / ".run.lock"
    with held_by_another_process(path) as holder:
        before = path.read_bytes()
        with pytest.raises(RunLockedError) as caught, RunLock(path, run_id="the second"):
            pass
        assert caught.value.exit_code == ExitCode.RUN_LOCKED
        assert f"process {holder.pid} on " in str(caught.value)
        assert socket.gethostname() in str(caught.value)
        assert "the first" in str(caught.value)
        assert str(tmp_path / "out") in str(caught.value)
        assert path.read_bytes() == before


def test_the_lock_is_free_as_soon_as_its_holder_was_killed(tmp_path):
    path = tmp_path / ".run.lock"
    with held_by_another_process(path) as holder:
        os.kill(holder.pid, signal.SIGKILL)
        assert holder.wait(30) == -signal.SIGKILL
        with RunLock(path, run_id="next"):
            assert f'"pid": {os.getpid()}' in path.read_text()


def test_the_lock_is_free_after_its_holder_ended_well(tmp_path):
    path = tmp_path / ".run.lock"
    with held_by_another_process(path) as holder:
        holder.stdin.close()
        assert holder.wait(30) == 0
        with RunLock(path, run_id="next"):
            pass


def test_a_folder_is_locked_against_the_same_process_too(tmp_path):
    path = tmp_path / ".run.lock"
    with RunLock(path, run_id="a"):
        with pytest.raises(RunLockedError), RunLock(path, run_id="b"):
            pass
        assert '"run_id": "a"' in path.read_text()
    mark = json.loads(path.read_text())
    assert mark.keys() == {"mark"}
    with RunLock(path, run_id="b"):
        assert json.loads(path.read_text()).items() >= {"run_id": "b", **mark}.items()


def test_the_lock_is_free_after_an_error(tmp_path):
    path = tmp_path / ".run.lock"
    with pytest.raises(ZeroDivisionError), RunLock(path, run_id="a"):
        1 / 0  # noqa: B018
    with RunLock(path, run_id="b"):
        pass


def test_a_child_that_outlives_the_holder_does_not_keep_the_lock(tmp_path):
    path = tmp_path / ".run.lock"
    with RunLock(path, run_id="a"):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    try:
        with RunLock(path, run_id="b"):
            assert child.poll() is None
    finally:
        child.communicate(b"\n", timeout=30)


def test_two_folders_have_a_lock_each(tmp_path):
    with RunLock(tmp_path / "a" / ".run.lock", run_id="a"), RunLock(tmp_path / "b" / ".run.lock", run_id="b"):
        assert '"run_id": "b"' in (tmp_path / "b" / ".run.lock").read_text()


def test_a_folder_that_cannot_be_made_is_an_output_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError), RunLock(tmp_path / "file" / ".run.lock", run_id="a"):
        pass


def test_a_folder_whose_name_is_too_long_is_an_output_error(tmp_path):
    with pytest.raises(OutputError, match="File name too long"), RunLock(tmp_path / ("a" * 300) / "lock", run_id="a"):
        pass


def test_a_full_disk_is_an_output_error(tmp_path):
    program = """
        import resource, sys
        from pathlib import Path
        from virnucpro.errors import OutputError
        from virnucpro.store.locks.run_lock import RunLock

        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        try:
            with RunLock(Path(sys.argv[1]), run_id="a"):
                print("held")
        except OutputError as error:
            print(error.what)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / ".run.lock")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout == "File too large\n", done.stderr
    with RunLock(tmp_path / ".run.lock", run_id="b"):
        pass


def test_a_folder_that_was_made_for_a_run_that_never_began_goes_with_it(tmp_path):
    with RunLock(tmp_path / "new" / ".run.lock", run_id="one"):
        assert (tmp_path / "new").is_dir()
    assert not (tmp_path / "new").exists()
    with RunLock(tmp_path / "new" / ".run.lock", run_id="two"):
        (tmp_path / "new" / "run.json").write_text("{}")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [".run.lock", "run.json"]
    (tmp_path / "users").mkdir()
    with RunLock(tmp_path / "users" / ".run.lock", run_id="three"):
        pass
    assert (tmp_path / "users").is_dir()


def test_a_lock_whose_file_its_last_holder_removes_at_that_moment_is_not_taken(tmp_path, monkeypatch):
    path = tmp_path / "out" / ".run.lock"
    take = fcntl.flock

    def after_its_removal(descriptor, how):
        path.unlink()
        path.parent.rmdir()
        take(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", after_its_removal)
    with pytest.raises(RunLockedError, match="just ending"), RunLock(path, run_id="late"):
        pass
    monkeypatch.undo()
    with RunLock(path, run_id="later"):
        assert path.exists()
