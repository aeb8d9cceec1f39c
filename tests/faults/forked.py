"""
Whole runs in processes forked from the test's: the real pipeline, coordinator, pipes and worker loop with the hash
model, without seconds of imports for every process, so that a fault can be tried at each of hundreds of steps.

What differs from the command: workers are forked instead of spawned, so their check that torch is not there yet is
left out. ``tests.faults.processes`` has the command itself.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import resource
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

import virnucpro.pipeline.gpu_worker  # noqa: F401  here, so that no forked process imports it
from tests.strategies import write_fasta
from virnucpro import failpoints
from virnucpro.choices import ResultForm
from virnucpro.config import RunLimits
from virnucpro.errors import VirNucProError
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.multi_gpu_inference import run_embedding
from virnucpro.pipeline.work import worker_process

if TYPE_CHECKING:
    from pathlib import Path

DEADLINE_S = 60.0
LIMITS = RunLimits(attempts=1, stop_grace_s=1.0)


@dataclass(frozen=True)
class Ended:
    """How a forked run ended."""

    code: int
    """Exit code as the command has it; negative for a signal."""
    errors: str
    """What it said on standard error."""


def run_forked(
    fasta: Path,
    out: Path,
    config,
    *,
    workers: int = 1,
    failpoint: str | None = None,
    file_bytes: int | None = None,
    fill: Path | None = None,
    restart: bool = False,
    result_form: ResultForm = ResultForm.SINGLE,
) -> Ended:
    """
    Run the job to its end in a forked process; one that does not end in time is killed, and says so by its signal.

    Args:
        fasta, out, config, workers: The job.
        failpoint: What ``failpoints.arm`` is given.
        file_bytes: Bytes that a file may have at the most (RLIMIT_FSIZE).
        fill: File that takes what is left of the disk once the run has worked for a while.
        restart, result_form: As the command's options.
    """

    def job():
        filling = (lambda *_: None) if fill is None else (lambda *_: fill_disk(fill))
        result = run_embedding(
            [fasta],
            out,
            config,
            [CPU] * workers,
            limits=LIMITS,
            on_message=filling,
            restart=restart,
            result_form=result_form,
        )
        result.raise_unless(allow_partial=False)

    return run_job(job, out, failpoint=failpoint, file_bytes=file_bytes)


def run_job(job, out: Path, *, failpoint: str | None = None, file_bytes: int | None = None) -> Ended:
    """Call *job* in a forked process, as ``run_forked`` does."""
    said = out.with_name(out.name + ".stderr")
    pid = os.fork()
    if pid == 0:
        _run(job, failpoint, file_bytes, said)
    end_s = time.monotonic() + DEADLINE_S
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > end_s:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    return Ended(os.waitstatus_to_exitcode(ended[1]), said.read_text(errors="replace"))


def _run(job, failpoint, file_bytes, said) -> None:
    code = 70
    try:
        descriptor = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout = sys.stderr = os.fdopen(2, "w", closefd=False)
        logging.getLogger().handlers.clear()  # of what other tests imported, Prefect say: no command has them here
        fork = multiprocessing.get_context("fork")
        multiprocessing.get_context = lambda method=None: fork
        worker_process._check_isolation = lambda device: None
        torch.set_num_threads(1)
        failpoints.arm(failpoint)
        if file_bytes is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, resource.RLIM_INFINITY))
        try:
            job()
            code = 0
        except VirNucProError as error:
            print(error, file=sys.stderr)
            code = int(error.exit_code)
    except BaseException:  # noqa: BLE001  of a child that must not go on with the test
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)


def fill_disk(path: Path) -> None:
    """Take everything that is left of the disk, a byte less."""
    with path.open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass


def small_input(folder: Path, count: int = 14) -> Path:
    """A few proteins, one of them a copy of another: some blocks, some parts."""
    records = [(f"p{n}", "MKVLAAGIVG"[n % 10 :] + "ACDEFGHIKL"[: n % 7 + 1] * 2) for n in range(count)]
    return write_fasta(folder / "in.fasta", [*records, ("copy", records[3][1])])


def state_of(out: Path) -> str | None:
    """What the manifest says of the run; None where there is none."""
    path = out / "run.json"
    return json.loads(path.read_bytes())["state"] if path.exists() else None


def left_over(out: Path) -> list[str]:
    """Temporary files, reserved space and locks that a finished run must not leave."""
    files = [path for path in out.rglob("*") if path.is_file() and path.name != ".run.lock"]
    return [path.name for path in files if path.suffix in {".tmp", ".lock"} or path.name == ".reserved"]
