"""
Memory does not follow the input: ten times the sequences, nearly the same peak.

The real pipeline runs, with a model that costs nothing, so that what is measured is everything around the model. Each
run is a process of its own. Peaks are the kernel's: of the parent by VmHWM, of its worker by the largest resident set
among the children that have ended; that of the whole run is sampled, parent and worker added.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest

from tests.fakes import hash_config
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.multi_gpu_inference import run_embedding

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PARENT_BYTES_PER_SEQUENCE = 200
"""Bytes of the parent's peak that a sequence may cost: it builds the index, 68 bytes a record and an id on disk, by
sorting columns in memory, before there is a worker."""


def embed_and_print_peaks(num_sequences: int, folder: Path) -> None:
    """Embed *num_sequences* random sequences of 33 to 60 residues; print the peaks in KiB."""
    rng = np.random.default_rng(1)
    residues = np.frombuffer(b"ACDEFGHIKLMNPQRSTVWY", np.uint8)[rng.integers(0, 20, size=1 << 20)].tobytes()
    fasta = folder / "in.fasta"
    with fasta.open("wb") as file:
        for number in range(num_sequences):
            length, start = rng.integers(33, 61), rng.integers(0, len(residues) - 60)
            file.write(b">seq_%07d\n%s\n" % (number, residues[start : start + length]))
    config = hash_config(token_budget=4096, sequences_per_part=4096)
    with sampled_peak() as whole_run:
        result = run_embedding([fasta], folder / "out", config, [CPU])
    assert result.num_rows == num_sequences
    status = Path("/proc/self/status").read_text().splitlines()
    parent = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    worker = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    found = {"run": whole_run[0], "parent": parent, "worker": worker}
    print(json.dumps({**found, "blocks": result.ranks[0].tokens // 4096}))


@contextmanager
def sampled_peak() -> Iterator[list[int]]:
    """Sample the resident sets of this process and its children, added; the list's one item is the peak, in KiB."""
    peak, done = [0], threading.Event()
    this = psutil.Process()

    def sample() -> None:
        while not done.wait(0.02):
            resident = 0
            for process in (this, *this.children(recursive=True)):
                with suppress(psutil.Error):
                    # a child that has not become another program yet shows its parent's memory
                    if process is this or process.cmdline() != psutil.Process(process.ppid()).cmdline():
                        resident += process.memory_info().rss
            peak[0] = max(peak[0], resident // 1024)

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield peak
    finally:
        done.set()
        sampler.join()


def peaks(num_sequences, folder, *, module="tests.e2e.test_bounded_memory"):
    folder.mkdir()
    command = [sys.executable, "-m", module, str(num_sequences), str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"{num_sequences:>7,} sequences: " + ", ".join(f"{name} {value:,}" for name, value in found.items()))
    return found


def test_200_000_sequences_take_the_memory_of_20_000(tmp_path):
    few, many = peaks(20_000, tmp_path / "few"), peaks(200_000, tmp_path / "many")
    assert many["blocks"] > 9 * few["blocks"] > 900
    assert many["run"] < 1.1 * few["run"]
    assert many["worker"] < 1.1 * few["worker"]
    assert (many["parent"] - few["parent"]) * 1024 < PARENT_BYTES_PER_SEQUENCE * 180_000


if __name__ == "__main__":
    embed_and_print_peaks(int(sys.argv[1]), Path(sys.argv[2]))
