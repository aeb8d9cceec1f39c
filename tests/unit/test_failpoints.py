"""Faults come when they were asked for, in the process that was meant, and never otherwise."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys

import pytest

from virnucpro import durable, failpoints
from virnucpro.errors import OutputError


@pytest.fixture(autouse=True)
def disarmed_afterwards():
    yield
    failpoints.arm(None)


def fails(times):
    """Which of that many steps fail, from 1."""
    failed = []
    for number in range(1, times + 1):
        try:
            failpoints.reach("step")
        except OSError as error:
            failed.append((number, error.errno))
    return failed


def test_nothing_happens_unless_it_was_asked_for():
    assert fails(5) == []


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("*/step:3:EIO", [(3, errno.EIO)]),
        ("MainProcess/st*:4+:ENOSPC", [(4, errno.ENOSPC), (5, errno.ENOSPC)]),
        ("gpu_worker_*/step:1:EDQUOT", []),
        ("*/other:1:EIO", []),
        ("*:6:EIO", []),
    ],
)
def test_the_nth_matching_step_fails(spec, expected):
    failpoints.arm(spec)
    assert fails(5) == expected


def test_with_a_file_the_fault_happens_once_over_all_processes(tmp_path):
    claim = tmp_path / "claim"
    failpoints.arm(f"*:2:EIO:{claim}")
    pid = os.fork()
    if pid == 0:
        os._exit(len(fails(3)))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert claim.read_text().endswith("/step\n")
    assert fails(5) == []


def test_a_trace_notes_every_matching_step(tmp_path):
    failpoints.arm(f"*/file.*:0:trace:{tmp_path / 'trace'}")
    durable.write_bytes(tmp_path / "file", b"data")
    steps = [line.split("/")[1] for line in (tmp_path / "trace").read_text().splitlines()]
    assert steps == ["file.open", "file.write", "file.fsync", "file.rename"]


def test_the_environment_arms_it_and_kill_kills(tmp_path):
    code = "from virnucpro import durable; import pathlib, sys; durable.write_bytes(pathlib.Path(sys.argv[1]), b'data')"
    environment = {**os.environ, failpoints.VARIABLE: "*/file.rename:1:kill"}
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "file"], env=environment, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize("action", ["ENOSPC", "EIO", "EDQUOT"])
def test_every_step_of_a_durable_write_can_fail_and_is_told_in_the_systems_words(tmp_path, action):
    for number in range(1, 20):
        claim = tmp_path / f"claim{number}"
        failpoints.arm(f"*:{number}:{action}:{claim}")
        path = tmp_path / f"folder{number}" / "file"
        if number == 1:
            durable.make_folder(path.parent.parent)
        told = {os.strerror(getattr(errno, action))}
        try:
            durable.write_bytes(path, b"data", seal=True)
        except OutputError as error:
            told.add(error.what)
        if not claim.exists():
            break
        assert len(told) == 1
        assert not path.exists() or path.read_bytes()[:4] == b"data"
        assert not path.parent.exists() or [name.name for name in path.parent.iterdir()] in ([], ["file"])
    assert number == 9


def test_a_specification_that_names_no_action_is_refused():
    with pytest.raises(ValueError, match="not an action"):
        failpoints.arm("*:1:explode")
