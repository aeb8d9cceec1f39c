"""
Processes of the fault tests: every one has a deadline, is ended with its test, and is a child of ours when we kill it.

The command is the real one, with the hash model in place of weights: the worker loop, the parts, the shards, the
aggregation and the exit codes are what a user gets, and every row tells its sequence.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import h5py
import psutil

from tests import fakes
from virnucpro.errors import ResultError
from virnucpro.store.reader import read_embeddings

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120.0
"""Seconds after which a command of ours is taken to hang."""
POLL_S = 0.005


def make_proteins(path: Path, chooser: random.Random, count: int) -> dict[str, str]:
    """Write *count* random proteins, one in ten a copy of another one; return the sequence of each id."""
    sequences: dict[str, str] = {}
    for number in range(count):
        letters = "".join(chooser.choices("ACDEFGHIKLMNPQRSTVWY", k=chooser.randint(1, 40)))
        is_copy = number > 0 and chooser.random() < 0.1
        sequences[f"p{number}"] = chooser.choice(list(sequences.values())) if is_copy else letters
    path.write_text("".join(f">{name}\n{sequence}\n" for name, sequence in sequences.items()))
    return sequences


@dataclass(frozen=True)
class HashCommand:
    """``virnucpro embed`` of one input with the hash model; *control* is what ``fakes.load_faulty_model`` reads."""

    fasta: Path
    control: Path

    def arguments(self, out: Path, *, workers: int, options: Sequence[str] = ()) -> list[str]:
        embed = ["embed", str(self.fasta), "--output", str(out), "--devices", "cpu", "--workers", str(workers)]
        return [sys.executable, "-m", "tests.faults.hash_command", str(self.control), *embed, *options]

    @contextmanager
    def running(self, out: Path, *, workers: int, options: Sequence[str] = ()):
        """Start it in a process group of its own; whatever is left of it at the end is killed."""
        with (self.control.parent / "stderr.txt").open("ab") as errors:
            process = subprocess.Popen(
                self.arguments(out, workers=workers, options=options),
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                process_group=0,
            )
        try:
            yield process
        finally:
            left = family(process.pid)
            if process.poll() is None:
                process.kill()
            process.wait(DEADLINE_S)
            for child in left:
                if child.is_running():
                    child.kill()

    def run(self, out: Path, *, workers: int) -> int:
        """Run it to its end; return its exit code."""
        with self.running(out, workers=workers) as process:
            return process.wait(DEADLINE_S)

    def errors(self) -> str:
        """What every start said on standard error so far."""
        return (self.control.parent / "stderr.txt").read_text(errors="replace")


def hash_command(folder: Path, fasta: Path, **plan) -> HashCommand:
    """Return the command; *plan* is what the faulty model does (``slow_s``, ``rank``, ``how`` ...)."""
    folder.mkdir(parents=True, exist_ok=True)
    control = folder / "control.json"
    control.write_text(json.dumps({"how": "none", "times": 0, "before_batch": -1, **plan}))
    return HashCommand(fasta, control)


def wait_until(condition, *, deadline_s: float = DEADLINE_S, what: str = "something") -> None:
    """Wait for *condition* to hold; a test that waits in vain says for *what*."""
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, f"waited {deadline_s:g} s for {what}"
        time.sleep(POLL_S)


def family(pid: int) -> list[psutil.Process]:
    """Every process below *pid*."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def workers_of(pid: int) -> list[psutil.Process]:
    """The worker processes that the command *pid* has at this moment."""
    found = []
    for child in family(pid):
        try:
            if "spawn_main" in " ".join(child.cmdline()):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def is_gone(process: psutil.Process) -> bool:
    """Whether it does nothing any more: ended, and perhaps not reaped yet by the process that inherited it."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def kill_landed(victim: psutil.Process) -> bool:
    """
    Kill a process below ours with SIGKILL; return whether it was our signal that ended it.

    It is stopped first: a process that has come to stand still has not ended by itself, and will not.
    """
    try:
        if os.getpid() not in {ancestor.pid for ancestor in victim.parents()}:
            return False
        victim.send_signal(signal.SIGSTOP)
        end_s = time.monotonic() + 5.0
        while victim.status() != psutil.STATUS_STOPPED:
            if is_gone(victim) or time.monotonic() > end_s:
                return False
        victim.kill()
    except psutil.NoSuchProcess:
        return False
    return True


def seconds_until_gone(processes: list[psutil.Process], *, limit_s: float = 10.0) -> float:
    """Seconds from now until none of *processes* runs any more."""
    began_s = time.monotonic()
    while not all(is_gone(process) for process in processes):
        if time.monotonic() - began_s > limit_s:
            for process in processes:  # a test that finds them alive leaves none of them behind
                if not is_gone(process):
                    process.kill()
        time.sleep(0.001)
    return time.monotonic() - began_s


@dataclass
class RowsFound:
    """A result compared with what it must hold."""

    lost: int = 0
    """Sequences without a row."""
    duplicated: int = 0
    """Rows beyond one for each sequence."""
    differing: int = 0
    """Rows that are not their sequence's, or stand in the wrong place."""


def compare_rows(out: Path, sequences: dict[str, str]) -> RowsFound:
    """Hold every row of a result against the hash of its sequence."""
    found = RowsFound()
    try:
        read_embeddings(out).close()
        with h5py.File(out / "embeddings.h5", "r") as file:
            names = [name.decode() for name in file["sequence_ids"][()]]
            rows = file["embeddings"][()]
    except ResultError:
        return RowsFound(lost=len(sequences))
    found.lost = len(set(sequences) - set(names))
    found.duplicated = len(names) - len(set(names))
    for name, wanted, row in itertools.zip_longest(names, sequences, rows):
        is_right = name == wanted and row.tobytes() == fakes.hash_vector(sequences[name]).tobytes()
        found.differing += not is_right
    return found
