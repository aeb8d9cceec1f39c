"""A file system where every lock ends with ENOLCK, as NFS without its lock daemon: runs end well on it."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.processes import DEADLINE_S, ROOT, hash_command, make_proteins
from virnucpro import read_embeddings

NO_LOCKS = """
#include <errno.h>
int flock(int descriptor, int operation) { errno = ENOLCK; return -1; }
int lockf(int descriptor, int command, long size) { errno = ENOLCK; return -1; }
"""


@pytest.fixture(scope="module")
def no_locks(tmp_path_factory):
    """The environment of a process without locks."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("shim")
    (folder / "no_locks.c").write_text(NO_LOCKS)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "no_locks.so", "no_locks.c"], cwd=folder, check=True)
    return {**os.environ, "PYTHONPATH": str(ROOT), "LD_PRELOAD": str(folder / "no_locks.so")}


def run(arguments, environment):
    return subprocess.run(
        arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


@pytest.mark.parametrize("form", ["single", "sharded"])
def test_embed_needs_no_lock_of_a_file(tmp_path, no_locks, form):
    sequences = make_proteins(tmp_path / "in.faa", random.Random(1), 30)
    command = hash_command(tmp_path / "control", tmp_path / "in.faa")
    done = run(command.arguments(tmp_path / "out", workers=2, options=["--result-form", form]), no_locks)
    assert done.returncode == 0, done.stderr
    with read_embeddings(tmp_path / "out") as found:
        assert list(found) == list(sequences)
    read = f"import virnucpro; print(len(virnucpro.read_embeddings({str(tmp_path / 'out')!r}).to_numpy()))"
    read_there = run([sys.executable, "-c", read], no_locks)
    assert read_there.stdout == "30\n", read_there.stderr


def test_predict_with_both_encoders_needs_no_lock_of_a_file(tmp_path, no_locks):
    letters = random.Random(4)
    contigs = tmp_path / "contigs.fa"
    contigs.write_text("".join(f">c{n}\n{''.join(letters.choices('ACGT', k=600))}\n" for n in range(2)))
    command = [sys.executable, "-m", "virnucpro", "predict", contigs, "-o", tmp_path / "out", "--cascade", "off"]
    done = run([*map(str, command), "--devices", "cpu", "--workers", "1"], no_locks)
    assert done.returncode == 0, done.stderr


def test_hdf5_is_opened_in_one_place_which_takes_no_lock():
    found = {
        path.relative_to(ROOT).as_posix(): len(calls)
        for folder in ("virnucpro", "flows")
        for path in Path(ROOT, folder).rglob("*.py")
        if (calls := re.findall(r"h5py\.File\(|h5f\.(?:open|create)\(", path.read_text()))
    }
    assert found == {"virnucpro/store/schema.py": 1}
