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
from virnucpro import durable
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
    with pytest.raises(ResultError, match="cut short"):
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


def test_only_temporary_files_are_strays(tmp_path):
    for name in (".part.h5.17.tmp", ".run.lock", "part.h5", "notes.tmp"):
        (tmp_path / name).write_text("x")
    (tmp_path / ".folder.tmp").mkdir()
    assert durable.remove_strays(tmp_path) == 1
    assert names_in(tmp_path) == [".folder.tmp", ".run.lock", "notes.tmp", "part.h5"]


def test_the_strays_of_processes_that_live_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "_run_id", "this")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as alive:
        kept = {f".a.h5.other.{alive.pid}.0123abcd.tmp", f".b.this.{os.getpid()}.0123abcd.tmp"}
        dead = {".c.h5.other.4194305.0123abcd.tmp", f".d.other.{os.getpid()}.0123abcd.tmp"}
        for name in kept | dead:
            (tmp_path / name).write_text("x")
        assert durable.remove_strays(tmp_path) == 2
        assert set(names_in(tmp_path)) == kept
        alive.communicate(b"\n", timeout=30)
    assert durable.remove_strays(tmp_path) == 1


def test_a_temporary_name_tells_its_run_and_its_process(tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "_run_id", "norun")
    durable.name_temporaries_after("1234abcd")
    with durable.replacing(tmp_path / "result") as file:
        assert file.path.name.startswith(f".result.1234abcd.{os.getpid()}.")


def test_a_folder_that_two_make_at_once_is_made(tmp_path):
    durable.make_folder(tmp_path / "a" / "b")
    durable.make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


FULL_DISK = """
    import resource, sys
    from pathlib import Path
    import numpy as np
    from virnucpro.errors import OutputError
    from virnucpro import durable
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
