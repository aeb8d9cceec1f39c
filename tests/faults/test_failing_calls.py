"""
The n-th system call of a class fails, over ``predict`` and ``embed``: the run ends with its cause or is complete.

``failing_calls.c`` is what fails them, on files of input and output, counted over all processes of the run.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.faults.processes import DEADLINE_S, ROOT
from tests.predictions import make_contigs, tables
from virnucpro.pipeline.run.verification import verify_run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SHORT = 0
READING = {"open": [errno.EIO, errno.EMFILE, errno.EACCES, errno.ENOMEM], "read": [errno.EIO, errno.EINTR, SHORT]}
WRITING = {
    "write": [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EINTR, SHORT],
    "fsync": [errno.EIO, errno.ENOSPC],
    "close": [errno.EIO, errno.ENOSPC],
    "resize": [errno.ENOSPC, errno.EIO],
    "rename": [errno.EIO, errno.ENOSPC, errno.EACCES],
    "mkdir": [errno.ENOSPC, errno.EIO],
    "unlink": [errno.EIO, errno.EACCES],
}
OTHER = {"mmap": [errno.ENOMEM, errno.EIO], "flock": [errno.EIO, errno.ENOLCK]}
HARMLESS = {errno.EINTR, SHORT}
"""What a program repeats or continues without a word."""
CODES = {0, 3, 65, 73, 78}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The shim, compiled."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: install Debian's package gcc")
    built = tmp_path_factory.mktemp("shim") / "failing_calls.so"
    source = Path(__file__).with_name("failing_calls.c")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", built, source], check=True)
    return built


@dataclass(frozen=True)
class Fault:
    call: str
    nth: int
    error: int

    def __str__(self) -> str:
        return f"{self.call} {self.nth} {errno.errorcode.get(self.error, 'short')}"


def run_with(
    fault: Fault | None, arguments: Sequence[str | Path], library: Path, folders: Sequence[Path], counter: Path
) -> tuple[int, str, int, int]:
    """Run Python; return exit code, standard error, the calls of the fault's class, and how many failed."""
    environment: Mapping[str, str] = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    counter.write_bytes(bytes(4096))
    if fault is not None:
        environment |= {"LD_PRELOAD": str(library), "FAULT_COUNTER": str(counter), "FAULT_CALL": fault.call}
        environment |= {"FAULT_FOLDERS": ":".join(map(str, folders))}
        environment |= {"FAULT_NTH": str(fault.nth), "FAULT_ERRNO": str(fault.error)}
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=DEADLINE_S,
    )
    calls, failed = (int.from_bytes(counter.read_bytes()[at : at + 8], sys.byteorder) for at in (0, 8))
    return done.returncode, done.stderr, calls, failed


@dataclass(frozen=True)
class Job:
    """A command over an input of its own in *folder*, with the shim *library* where a fault is given."""

    command: str
    folder: Path
    library: Path

    @property
    def fasta(self) -> Path:
        return self.folder / "in" / "input.fa"

    def run(self, out: Path, fault: Fault | None = None) -> tuple[int, str, int, int]:
        """As ``run_with``."""
        arguments = ["-m", "virnucpro", self.command, self.fasta, "-o", out, "--devices", "cpu"]
        return run_with(fault, arguments, self.library, [out, self.fasta.parent], self.folder / f"{out.name}.counter")

    def result(self, out: Path) -> object:
        return tables(out) if self.command == "predict" else (out / "embeddings.h5").read_bytes()


@pytest.fixture(params=["predict", "embed"])
def job(request, tmp_path, library):
    made = Job(request.param, tmp_path, library)
    made.fasta.parent.mkdir()
    if made.command == "predict":
        make_contigs(made.fasta)
    else:
        chooser = random.Random(9)
        made.fasta.write_text("".join(f">p{n}\n{''.join(chooser.choices('ACDEFGHIKL', k=20 + n))}\n" for n in range(9)))
    return made


def chosen_faults(job: Job, count: int, chooser: random.Random) -> list[Fault]:
    """Return *count* faults, classes and errors in turn, at calls that the command makes."""
    kinds = [(call, error) for part in (READING, WRITING, OTHER) for call, errors in part.items() for error in errors]
    calls = {}
    for call in {call for call, _ in kinds}:
        out = job.folder / f"count_{call}"
        calls[call] = job.run(out, Fault(call, 2**40, 0))[2]
    chooser.shuffle(kinds)
    return [
        Fault(call, chooser.randint(1, calls[call]), error)
        for call, error in (kinds[n % len(kinds)] for n in range(count))
        if calls[call]
    ]


def violations(job: Job, fault: Fault, out: Path, wanted: object) -> tuple[bool, list[str]]:
    """Run with the fault, and again without unless it ended complete; return whether it landed, and what is wrong."""
    code, said, _, failed = job.run(out, fault)
    found = []
    codes = {0} if fault.error in HARMLESS else {0, 73} if fault.call in WRITING else CODES
    if code not in codes:
        found.append(f"ended with {code}")
    if "Traceback" in said or "defect" in said:
        found.append("shows a traceback")
    if code and os.strerror(fault.error) not in said:
        found.append("does not name the cause")
    if code:
        again, said_again, *_ = job.run(out)
        if again:
            found.append(f"ended with {again} when started again: {said_again[-600:]}")
    try:
        if job.result(out) != wanted:
            found.append("gave another result")
        found += verify_run(out).problems
    except Exception as error:  # noqa: BLE001  whatever is wrong with the result is what we count
        found.append(f"gave no result: {error}")
    shutil.rmtree(out, ignore_errors=True)
    return bool(failed), [f"{fault}: {what}\n{said[-1500:]}" for what in found]


def try_faults(job: Job, count: int, seed: int) -> tuple[int, list[str]]:
    """Try faults until *count* have landed; return how many did, and what was wrong."""
    out = job.folder / "whole"
    assert job.run(out)[0] == 0
    wanted = job.result(out)
    landed, found = 0, []
    for number, fault in enumerate(chosen_faults(job, 2 * count, random.Random(seed))):
        if landed == count:
            break
        has_landed, wrong = violations(job, fault, job.folder / f"out{number}", wanted)
        landed += has_landed
        found += wrong
        for line in wrong:
            print(line, flush=True)
    return landed, found


@pytest.mark.timeout(600)
def test_a_file_that_cannot_be_opened_or_mapped_ends_the_run_with_its_cause_and_a_short_read_does_not(
    tmp_path, library
):
    job = Job("predict", tmp_path, library)
    job.fasta.parent.mkdir()
    make_contigs(job.fasta)
    out = tmp_path / "whole"
    assert job.run(out)[0] == 0
    wanted = job.result(out)
    faults = [Fault("mmap", 7, errno.ENOMEM), Fault("open", 54, errno.EACCES), Fault("read", 6, SHORT)]
    for number, fault in enumerate(faults):
        has_landed, found = violations(job, fault, tmp_path / f"out{number}", wanted)
        assert has_landed
        assert found == []


WRITES_HDF5 = """
import sys
from pathlib import Path
import numpy as np
from virnucpro import durable
from virnucpro.store import schema

with durable.NewFile(Path(sys.argv[1])) as new, schema.created(new, most_bytes=1 << 16) as file:
    schema.write_ids(file, 2, [["a", "b"]])
    file.create_dataset(schema.BLOCKS, data=np.arange(6).reshape(2, 3), track_times=False)
    file.create_dataset(schema.POSITIONS, data=np.arange(2), track_times=False)
    schema.early_allocated(file, schema.EMBEDDINGS, (2, 3))
"""


@pytest.mark.timeout(300)
def test_no_write_of_hdf5_fails_unseen(tmp_path, library):
    for nth in range(1, 100):
        out = tmp_path / f"{nth}.h5"
        fault = Fault("write", nth, errno.ENOSPC)
        code, said, _, failed = run_with(fault, ["-c", WRITES_HDF5, out], library, [tmp_path], out.with_suffix(".n"))
        if not failed:  # there is no such write
            break
        assert code == 1, f"write {nth} is lost: {said}"
        assert os.strerror(errno.ENOSPC) in said
    assert nth > 4


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_any_call_that_fails_ends_the_run_with_its_cause_and_the_next_start_completes_it(job, soak_table, seed):
    landed, found = try_faults(job, 200, seed)
    soak_table(
        f"a system call of `{job.command}` fails, or is short", tries=landed, differing=len(found), note=f"seed {seed}"
    )
    assert found == []
    assert landed == 200
