"""The command itself, killed at any moment with everything below it: the next start gives the same tables."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.faults.processes import DEADLINE_S, family, seconds_until_gone
from tests.predictions import tables
from tests.strategies import write_fasta
from virnucpro.pipeline.run.verification import verify_run


@pytest.fixture(params=["off", "auto", "0.3,0.7"])
def job(request, examples_dir, tmp_path):
    """Contigs and a cascade: few contigs that are embedded, or 3 Mb of which two processes score the letters."""
    if request.param != "auto":
        return examples_dir / "contigs.fasta", request.param
    chooser = random.Random(11)
    lengths_nt = [int(chooser.lognormvariate(7.5, 1.0)) + 1 for _ in range(1000)]
    records = [(f"k{n}", "".join(chooser.choices("ACGT", k=length_nt))) for n, length_nt in enumerate(lengths_nt)]
    return write_fasta(tmp_path / "many.fa", records), request.param


def start(job, out, errors):
    contigs, cascade = job
    options = ["--devices", "cpu", "--workers", "2", "--cascade", cascade]
    return subprocess.Popen(
        [sys.executable, "-m", "virnucpro", "predict", contigs, "-o", out, *options],
        stdout=subprocess.DEVNULL,
        stderr=errors,
        process_group=0,
    )


def interrupted_run(job, tmp_path, moments_s, number) -> tuple[int, float]:
    """Send *number* at each of *moments_s* after a start, then run to the end; return how often it landed, and when."""
    out, landed, longest_s = tmp_path / "out", 0, 0.0
    with (tmp_path / "errors").open("ab") as errors:
        for moment_s in moments_s:
            process = start(job, out, errors)
            time.sleep(moment_s)
            below = family(process.pid)
            if process.poll() is None:
                os.kill(process.pid, number)
                landed += 1
            code = process.wait(DEADLINE_S)
            assert code in {-signal.SIGKILL, 130, 143, 0}, (tmp_path / "errors").read_text()
            longest_s = max(longest_s, seconds_until_gone(below))
        assert start(job, out, errors).wait(DEADLINE_S) == 0, (tmp_path / "errors").read_text()
    # a process whose parent is killed while it starts prints this before any code of ours runs
    of_python = r"Traceback [^\n]+\n(?:  [^\n]+\n)+?(?:EOFError|_pickle\.UnpicklingError)[^\n]*\n"
    errors = re.sub(of_python, "", (tmp_path / "errors").read_text())
    assert "Traceback" not in errors, errors
    return landed, longest_s


@pytest.fixture
def expected(job, tmp_path):
    with (tmp_path / "errors").open("ab") as errors:
        begun_s = time.monotonic()
        assert start(job, tmp_path / "whole", errors).wait(DEADLINE_S) == 0
    return tables(tmp_path / "whole"), time.monotonic() - begun_s


@pytest.mark.slow
@pytest.mark.long
def test_killed_and_interrupted_in_the_middle_it_gives_the_same_tables(job, tmp_path, expected):
    wanted, whole_s = expected
    stopped, _ = interrupted_run(job, tmp_path, [0.4 * whole_s], signal.SIGINT)
    assert tables(tmp_path / "out") == wanted
    shutil.rmtree(tmp_path / "out")
    killed, gone_s = interrupted_run(job, tmp_path, [0.6 * whole_s], signal.SIGKILL)
    print(f"a whole run {whole_s:.1f} s; workers outlived a killed parent by {gone_s:.2f} s")
    assert (stopped, killed) == (1, 1)
    assert gone_s < 3
    assert tables(tmp_path / "out") == wanted
    assert verify_run(tmp_path / "out").problems == []


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_killed_at_any_moment_it_gives_the_same_tables(job, tmp_path, expected, soak_table, seed):
    wanted, whole_s = expected
    chooser = random.Random(seed)
    differing = landed = 0
    for trial in range(5):
        folder = tmp_path / f"trial{trial}"
        folder.mkdir()
        moments_s = [chooser.uniform(0.05, 0.6) * whole_s for _ in range(4)]
        landed += interrupted_run(job, folder, moments_s, signal.SIGKILL)[0]
        differing += tables(folder / "out") != wanted
    soak_table("prediction killed (SIGKILL)", tries=landed, differing=differing)
    assert differing == 0
    assert landed >= 8
