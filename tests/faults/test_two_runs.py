"""Row 9: two runs on one folder: the second one ends with 75, says who works there, and touches nothing."""

from __future__ import annotations

import json
import os
import socket

import pytest

from tests.fakes import hash_config
from tests.faults.forked import left_over, run_forked, small_input
from virnucpro.run_layout import RunLayout
from virnucpro.store.locks.run_lock import RunLock


def snapshot(folder):
    """Every file below *folder*, with its content and its times."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [(path, path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino) for path in files]


@pytest.mark.parametrize("changes", [{}, {"max_residues": 5}])
def test_the_second_run_ends_with_75_and_touches_nothing(tmp_path, changes):
    fasta, out = small_input(tmp_path), tmp_path / "out"
    failed = run_forked(fasta, out, hash_config(), failpoint="gpu_worker_0/file.write:5+:EIO")
    assert failed.code == 73
    with RunLock(RunLayout(out).lock, run_id="first"):
        mark = json.loads(RunLayout(out).lock.read_text())["mark"]
        (out / "work" / f".half.{mark}.4194305.0123abcd.tmp").write_text("on its way")
        before = snapshot(out)
        second = run_forked(fasta, out, hash_config(**changes))
        assert second.code == 75
        for part in (str(os.getpid()), socket.gethostname(), "run first"):
            assert part in second.errors
        assert snapshot(out) == before
    assert run_forked(fasta, out, hash_config()).code == 0
    assert left_over(out) == []
