"""Row 4: a disk that is really full, and a limit of the size of files: exit 73, why, and a manifest that tells."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from contextlib import contextmanager

import pytest

from tests.fakes import hash_config
from tests.faults.forked import left_over, run_forked, small_input, state_of
from tests.faults.processes import make_proteins
from virnucpro.pipeline.run import run as run_folder

TMPFS_BYTES = 4 << 20


@contextmanager
def small_file_system(folder):
    """A file system of 4 MiB, or a skip with the reason where there can be none."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], timeout=30, check=True)


@pytest.mark.parametrize("file_bytes", [300, 3_000, 20_000])
def test_a_limit_of_the_size_of_files_is_an_exit_73_that_says_so(tmp_path, file_bytes):
    fasta, out = small_input(tmp_path), tmp_path / "out"
    ended = run_forked(fasta, out, hash_config(), file_bytes=file_bytes)
    assert ended.code == 73, ended.errors
    assert "cannot write" in ended.errors.splitlines()[-1]
    assert "File too large" in ended.errors  # the file of standard error may end within its last line
    assert "Exception ignored" not in ended.errors
    assert not (out / "embeddings.h5").exists()
    assert state_of(out) != "running"
    assert run_forked(fasta, out, hash_config()).code == 0
    assert left_over(out) == []


@pytest.mark.parametrize("taken_at", ["before", "while it computes"])
def test_a_full_disk_is_an_exit_73_with_the_last_words_written(tmp_path, taken_at):
    make_proteins(tmp_path / "in.fasta", random.Random(2), 400)
    config = hash_config(token_budget=512, sequences_per_part=16)
    assert run_forked(tmp_path / "in.fasta", tmp_path / "whole", config).code == 0
    with small_file_system(tmp_path / "disk") as disk:
        out = disk / "out"
        if taken_at == "before":
            (disk / "ballast").write_bytes(bytes(TMPFS_BYTES - (1 << 20)))
            ended = run_forked(tmp_path / "in.fasta", out, config)
            assert "MiB are available: free some space" in ended.errors
            assert state_of(out) is None
        else:
            ended = run_forked(
                tmp_path / "in.fasta", out, config, file_bytes=None, failpoint=None, fill=disk / "ballast"
            )
            last = ended.errors.splitlines()[-1]
            assert "No space left on device" in last
            assert last.startswith(f"cannot write {out}/work/"), "what a worker could not write"
            assert state_of(out) in {"partial", "failed"}
        assert ended.code == 73, ended.errors
        assert "Exception ignored" not in ended.errors
        assert "Traceback" not in ended.errors
        assert not (out / "embeddings.h5").exists()
        assert not (out / "work" / ".reserved").exists()
        (disk / "ballast").unlink()
        again = run_forked(tmp_path / "in.fasta", out, config)
        assert again.code == 0, again.errors
        assert (out / "embeddings.h5").read_bytes() == (tmp_path / "whole" / "embeddings.h5").read_bytes()
        assert left_over(out) == []


def test_a_run_that_does_not_fit_is_refused_before_anything_is_computed(tmp_path, monkeypatch):
    fasta, out = small_input(tmp_path), tmp_path / "out"
    free = os.statvfs(tmp_path)
    wide = hash_config(hidden_dim=free.f_bavail * free.f_frsize // 15)
    ended = run_forked(fasta, out, wide)
    assert ended.code == 73
    assert "the run needs" in ended.errors
    assert "GiB" in ended.errors
    assert state_of(out) is None
    assert not (out / "logs").exists()
    assert shutil.disk_usage(tmp_path).free > run_folder.MANIFEST_BYTES
