"""
How fast the sequence index is built and opened, and how much memory that takes.

Run it as ``python benchmarks/index.py [--megabytes 200] [--rounds 5] [--write]``. It makes FASTA files of proteins
(lengths log-normal around 300 residues as in UniProt, residues by UniProt's frequencies, headers of UniProt's form,
fixed seed), wrapped at 60 columns and on single lines, and times builds with and without hashes in turn. CPU seconds
are those of the process, system calls included. Memory is the growth of the peak resident set of a fresh process, by
``--memory`` as its own child. ``--write`` keeps the figures in ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import numpy as np
from bench_common import machine, write_result

from virnucpro.data.index import build
from virnucpro.data.index.build import build_index
from virnucpro.data.reading import fasta_block, fasta_scan
from virnucpro.data.reading.fasta_block import HASH_BYTES
from virnucpro.data.reading.input_files import DEFAULT_MAX_UNPACKED_BYTES
from virnucpro.data.sequence_index import SequenceIndex

if TYPE_CHECKING:
    from collections.abc import Iterator

SEED = 20261121
RESIDUES = b"LAGVESIKRDTPNQFYMHCWX"
FREQUENCIES = [99, 83, 71, 69, 67, 66, 59, 58, 55, 55, 54, 47, 41, 39, 39, 29, 24, 23, 14, 11, 1]
"""Per mille in UniProt, in the order of ``RESIDUES``."""
LINE_RESIDUES = 60


def make_fasta(path: Path, num_bytes: int, *, wrapped: bool) -> None:
    """Write proteins until *num_bytes* are reached."""
    rng = np.random.default_rng(SEED)
    shares = np.array(FREQUENCIES) / sum(FREQUENCIES)
    pool = np.frombuffer(RESIDUES, dtype=np.uint8)[rng.choice(len(RESIDUES), size=1 << 24, p=shares)].tobytes()
    written, number = 0, 0
    with path.open("wb") as file:
        while written < num_bytes:
            lengths = np.clip(rng.lognormal(5.66, 0.72, size=4096), 8, 35000).astype(int).tolist()
            starts = rng.integers(0, len(pool) - 35000, size=4096).tolist()
            for length, start in zip(lengths, starts, strict=True):
                header = b">tr|A%07d|A%07d_9VIRU Putative protein %d OS=Synthetic virus PE=4 SV=1\n" % ((number,) * 3)
                sequence = pool[start : start + length]
                step = LINE_RESIDUES if wrapped else length
                lines = [sequence[at : at + step] for at in range(0, length, step)]
                written += file.write(header + b"\n".join(lines) + b"\n")
                number += 1


def build_cpu_seconds(fasta: Path, folder: Path, *, hashing: bool) -> float:
    """Build once; return the CPU seconds of this process."""
    start = time.process_time()
    with nullcontext() if hashing else without_hashes():
        build_index([fasta], folder / "bench.index", unpack_dir=folder, max_unpacked_bytes=DEFAULT_MAX_UNPACKED_BYTES)
    return time.process_time() - start


@contextmanager
def without_hashes() -> Iterator[None]:
    """Leave every hash out in the block: what remains of a build is the parsing, the sorting and the writing."""
    no_digest = mock.Mock(update=lambda _: None, hexdigest=lambda: "")
    with (
        mock.patch.object(fasta_scan, "hashlib", mock.Mock(sha256=lambda: no_digest)),
        mock.patch.object(fasta_block, "_hash_all", lambda _, ends: bytes(HASH_BYTES * len(ends))),
        mock.patch.object(build, "find_representatives", lambda _, lengths: np.arange(len(lengths))),
    ):
        yield


def open_seconds(index_path: Path) -> float:
    """Open once and read one length; return wall seconds."""
    start = time.perf_counter()
    index = SequenceIndex.open(index_path)
    assert index.lengths[0] >= index.lengths[-1]
    return time.perf_counter() - start


def peak_growth_bytes(fasta: Path, folder: Path) -> int:
    """Build in this process; return by how many bytes its peak resident set grew."""
    before = _peak_kib()
    build_cpu_seconds(fasta, folder, hashing=True)
    return (_peak_kib() - before) * 1024


def _peak_kib() -> int:
    """Return the peak resident set of this program; getrusage's would be that of its parent at first."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def memory_in_child(fasta: Path) -> int:
    """Measure ``peak_growth_bytes`` in a fresh process."""
    command = [sys.executable, __file__, "--memory", str(fasta)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(fasta: Path, folder: Path, rounds: int) -> dict[str, object]:
    """Time builds with and without hashes in turn, after one unmeasured round."""
    megabytes = fasta.stat().st_size / 1e6
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds + 1):
        for hashing in (False, True):
            spent = build_cpu_seconds(fasta, folder, hashing=hashing)
            if number:
                seconds[hashing].append(spent)
    index_path = folder / "bench.index"
    index = SequenceIndex.open(index_path)
    id_bytes = sum(map(len, index.sequence_ids(range(len(index)))))
    growth = memory_in_child(fasta)
    return {
        "megabytes": round(megabytes, 1),
        "records": len(index),
        "mb_per_cpu_second_hash_on": round(megabytes / statistics.median(seconds[True]), 1),
        "mb_per_cpu_second_hash_off": round(megabytes / statistics.median(seconds[False]), 1),
        "cpu_seconds_hash_on": [round(value, 3) for value in seconds[True]],
        "cpu_seconds_hash_off": [round(value, 3) for value in seconds[False]],
        "open_milliseconds": round(1000 * statistics.median(open_seconds(index_path) for _ in range(9)), 2),
        "index_bytes_per_record_beside_id": round((index_path.stat().st_size - id_bytes) / len(index), 2),
        "peak_growth_megabytes": round(growth / 1e6, 1),
        "peak_growth_bytes_per_record_beside_id": round((growth - id_bytes) / len(index), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--memory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.memory:
            print(peak_growth_bytes(options.memory, folder))
            return
        report: dict[str, object] = {"machine": machine("numpy"), "rounds": options.rounds}
        for layout, wrapped in (("wrapped_60", True), ("single_line", False)):
            fasta = folder / f"{layout}.fasta"
            make_fasta(fasta, options.megabytes * 1_000_000, wrapped=wrapped)
            report[layout] = measure(fasta, folder, options.rounds)
            fasta.unlink()
    print(json.dumps(report, indent=2))
    if options.write:
        write_result("index", report)


if __name__ == "__main__":
    main()
