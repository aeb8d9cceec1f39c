"""Files are absent or whole, and a damaged one is seen."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import textwrap

import pytest

from tests.strategies import flip_bit
from virnucpro import durable, run_folders
from virnucpro.errors import ExitCode, OutputError, ResultError


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_has_its_name_only_once_it_is_whole(tmp_path):
    path = tmp_path / "new" / "result"
    with durable.replacing(path) as temporary:
        temporary.write(b"half")
        assert not path.exists()
        temporary.write(b"whole")
    assert path.read_bytes() == b"halfwhole"
    assert names_in(path.parent) == ["result"]


@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt(), ResultError("other", "bad")])
def test_an_error_inside_leaves_the_old_file_and_no_temporary_one(tmp_path, error):
    path = tmp_path / "result"
    path.write_bytes(b"old")

    def write_and_fail():
        with durable.replacing(path, seal=True) as temporary:
            temporary.write(b"new")
            raise error

    with pytest.raises(type(error)) as caught:
        write_and_fail()
    assert caught.value is error
    assert path.read_bytes() == b"old"
    assert names_in(tmp_path) == ["result"]


def test_an_error_of_the_system_inside_becomes_an_output_error_that_names_the_final_file(tmp_path):
    path = tmp_path / "result"

    def write_and_fail():
        with durable.replacing(path):
            raise OSError(28, "No space left on device")

    with pytest.raises(OutputError) as caught:
        write_and_fail()
    assert caught.value.path == str(path)
    assert caught.value.what == "No space left on device"
    assert caught.value.exit_code == ExitCode.CANNOT_WRITE


def test_bytes_come_out_as_they_went_in(tmp_path):
    data = random.Random(1).randbytes(3_000_001)
    durable.write_bytes(tmp_path / "plain", data)
    durable.write_bytes(tmp_path / "sealed", data, seal=True)
    assert (tmp_path / "plain").read_bytes() == data
    sealed = (tmp_path / "sealed").read_bytes()
    assert sealed[: -durable.SEAL_BYTES] == data
    assert len(sealed) == len(data) + durable.SEAL_BYTES
    durable.check_seal(tmp_path / "sealed")
    assert durable.sha256_of(tmp_path / "plain") == hashlib.sha256(data).hexdigest()


def test_a_sealed_file_without_content_is_whole(tmp_path):
    durable.write_bytes(tmp_path / "empty", b"", seal=True)
    durable.check_seal(tmp_path / "empty")
    assert (tmp_path / "empty").stat().st_size == durable.SEAL_BYTES


def test_every_single_flipped_bit_is_seen(tmp_path):
    path = tmp_path / "sealed"
    durable.write_bytes(path, random.Random(2).randbytes(5_000), seal=True)
    whole = path.read_bytes()
    seed = 20261121
    for bit in random.Random(seed).sample(range(len(whole) * 8), 200):
        flip_bit(path, bit)
        with pytest.raises(ResultError):
            durable.check_seal(path)
        flip_bit(path, bit)
    assert path.read_bytes() == whole
    durable.check_seal(path)


@pytest.mark.parametrize("kept", [0, 1, durable.SEAL_BYTES - 1, durable.SEAL_BYTES, 4096, -1, -durable.SEAL_BYTES])
def test_a_dropped_tail_is_seen(tmp_path, kept):
    path = tmp_path / "sealed"
    durable.write_bytes(path, random.Random(3).randbytes(9_000), seal=True)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ResultError, match="truncated"):
        durable.check_seal(path)


def test_a_tail_that_another_file_sealed_is_seen(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    durable.write_bytes(first, b"a" * 100, seal=True)
    durable.write_bytes(second, b"b" * 100, seal=True)
    first.write_bytes(first.read_bytes()[:100] + second.read_bytes()[100:])
    with pytest.raises(ResultError, match="damaged"):
        durable.check_seal(first)


def test_an_absent_file_is_not_called_damaged(tmp_path):
    with pytest.raises(FileNotFoundError):
        durable.check_seal(tmp_path / "absent")


def test_a_folder_that_cannot_be_made_is_an_output_error(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(OutputError, match="cannot write"):
        durable.write_bytes(tmp_path / "file" / "result", b"data")
    assert (tmp_path / "file").read_text() == "not a folder"


@pytest.fixture
def of_a_run(tmp_path):
    """A folder that this process has entered as that of a run."""
    run_folders.enter(tmp_path, "ours")
    yield tmp_path
    run_folders.leave(tmp_path)


def test_only_temporary_files_with_the_mark_of_the_run_are_strays(of_a_run):
    of_others = {
        ".x.tmp",
        ".part.h5.17.tmp",
        ".a.theirs.4194305.0123abcd.tmp",
        "part.h5",
        "a.ours.4194305.0123abcd.tmp",
    }
    for name in (*of_others, ".a.h5.ours.4194305.0123abcd.tmp"):
        (of_a_run / name).write_text("x")
    (of_a_run / ".folder.ours.4194305.0123abcd.tmp").mkdir()
    (of_a_run / ".link.ours.4194305.0123abcd.tmp").symlink_to("part.h5")
    before = set(names_in(of_a_run))
    assert durable.remove_strays(of_a_run) == 1
    assert before - set(names_in(of_a_run)) == {".a.h5.ours.4194305.0123abcd.tmp"}


def test_in_a_folder_of_no_run_nothing_is_a_stray(tmp_path):
    (tmp_path / ".a.norun.4194305.0123abcd.tmp").write_text("x")
    assert durable.remove_strays(tmp_path) == 0
    assert names_in(tmp_path) == [".a.norun.4194305.0123abcd.tmp"]


def test_nothing_is_removed_through_a_link_below_the_folder_of_a_run(of_a_run, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for name in ("precious", ".a.ours.4194305.0123abcd.tmp"):
        (elsewhere / name).write_text("x")
    (elsewhere / "folder").mkdir()
    (of_a_run / "link").symlink_to(elsewhere)
    with pytest.raises(OutputError, match="link is a link or not a folder: remove it"):
        durable.remove(of_a_run / "link" / "precious")
    assert durable.remove_strays(of_a_run / "link") == 0
    for remove in (durable.remove_tree, durable.remove_empty):
        remove(of_a_run / "link" / "folder")
        remove(of_a_run / "link")
    assert names_in(elsewhere) == [".a.ours.4194305.0123abcd.tmp", "folder", "precious"]
    assert (of_a_run / "link").is_symlink()


def test_the_strays_of_processes_that_live_are_left_alone(of_a_run):
    tmp_path = of_a_run
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as alive:
        kept = f".a.h5.ours.{alive.pid}.0123abcd.tmp"
        dead = {".c.h5.ours.4194305.0123abcd.tmp", f".d.ours.{os.getpid()}.0123abcd.tmp"}
        for name in {kept, *dead}:
            (tmp_path / name).write_text("x")
        with durable.replacing(tmp_path / "result") as mine:
            assert mine.path.name.startswith(f".result.ours.{os.getpid()}.")
            assert durable.remove_strays(tmp_path) == 2
            assert names_in(tmp_path) == sorted([kept, mine.path.name])
        alive.communicate(b"\n", timeout=30)
    assert durable.remove_strays(tmp_path) == 1
    assert names_in(tmp_path) == ["result"]


def test_a_folder_that_two_make_at_once_is_made(tmp_path):
    durable.make_folder(tmp_path / "a" / "b")
    durable.make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


FULL_DISK = """
    import resource, sys
    from pathlib import Path
    import numpy as np
    from virnucpro.errors import OutputError
    from virnucpro import durable, run_folders
    from virnucpro.store.parts import BlockRows, SealedBlocks, write_part, write_shard

    folder = Path(sys.argv[1])
    rows = BlockRows(0, np.arange(500), [f"id{n}" for n in range(500)], np.ones((500, 64), np.float32))
    part = write_part(folder / "parts", [rows], plan_fingerprint="plan")
    source = SealedBlocks.open(part)
    durable.write_bytes(folder / "old", b"old")
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
    attempts = {
        "bytes": lambda: durable.write_bytes(folder / "old", b"x" * 60_000, seal=True),
        "seal": lambda: durable.write_bytes(folder / "old", b"x" * 49_990, seal=True),
        "part": lambda: write_part(folder / "other", [rows], plan_fingerprint="plan"),
        "shard": lambda: write_shard(folder / "shard_0.h5", [source], plan_fingerprint="plan", hidden_dim=64),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except OutputError as error:
            print(name, error.what)
"""


def test_a_full_disk_is_an_output_error_and_changes_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FULL_DISK), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    refused = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert list(refused) == ["bytes", "seal", "part", "shard"]
    assert all("File too large" in what for what in refused.values()), refused
    assert (tmp_path / "old").read_bytes() == b"old"
    assert names_in(tmp_path) == ["old", "other", "parts"]
    assert names_in(tmp_path / "other") == []
