"""
What an engine adds to the work: runs on threads and on a cluster of Ray or Dask for the run, one after the other.

Run it as ``python benchmarks/cluster_overhead.py [--engine ray dask] [--sequences 40000] [--workers 2] [--rounds 1]
[--write]``; 40,000 proteins take two cores about ten minutes a run. Input: real proteins
(``../shared/data/proteins/uniprot_20000.fasta.gz``, or ``--fasta``), and after the last of them the same ones reversed;
the bundled encoder, workers of one thread. All runs of a round are flow runs of the same command, and have the whole
machine; the one on threads is in the middle, and the order is reversed from round to round. They must give the same
bytes.

``work_s`` is what is compared: from the first line in a worker's log to the last, on average over the workers. What
comes before (Prefect's server, the engine, its workers' imports) and after (ending, aggregation, validation) is
reported apart, as are the CPU seconds of the workers, of the command's own process and of all other processes: the
engine's, and Prefect's server.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
from bench_common import machine, spread, write_result
from durability import PROTEINS

from virnucpro.run_layout import RunLayout

LOOK_S = 1.0
"""Seconds between two looks at the CPU seconds of all processes; CPU seconds after the last look are not counted."""


@dataclass
class Run:
    """One of the runs of a round."""

    process: subprocess.Popen[bytes]
    layout: RunLayout
    began_s: float
    wall_s: float = 0.0
    cpu_s: dict[int, float] = field(default_factory=dict)
    """Process -> CPU seconds so far."""
    system_s: dict[int, float] = field(default_factory=dict)
    """Process -> those of them that it spent in the kernel."""

    def look(self) -> bool:
        """Note the CPU seconds of all its processes; return whether it is running."""
        if self.process.poll() is not None:
            self.wall_s = self.wall_s or time.monotonic() - self.began_s
            return False
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            for one in [root, *root.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    times = one.cpu_times()
                    self.cpu_s[one.pid], self.system_s[one.pid] = times.user + times.system, times.system
        return True

    def figures(self) -> dict[str, float]:
        """Return what was measured."""
        ranks = json.loads(self.layout.manifest.read_text())["ranks"]
        work_s = statistics.mean(_work_s(self.layout, rank["rank"]) for rank in ranks)
        pids = {pid for rank in ranks for pid in rank["pids"]}
        workers_s = sum(seconds for pid, seconds in self.cpu_s.items() if pid in pids)
        command_s = self.cpu_s[self.process.pid]
        return {
            "work_s": work_s,
            "before_and_after_s": self.wall_s - work_s,
            "workers_cpu_s": workers_s,
            "of_it_in_kernel_s": sum(seconds for pid, seconds in self.system_s.items() if pid in pids),
            "command_cpu_s": command_s,
            "others_cpu_s": sum(self.cpu_s.values()) - workers_s - command_s,
        }


def _work_s(layout: RunLayout, rank: int) -> float:
    lines = layout.worker_log(rank).read_text().splitlines()
    first_s, last_s = (
        datetime.fromisoformat(json.loads(line)["timestamp"]).timestamp() for line in (lines[0], lines[-1])
    )
    return last_s - first_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["ray", "dask"], nargs="+", default=["ray", "dask"])
    parser.add_argument("--fasta", type=Path, default=PROTEINS)
    parser.add_argument("--sequences", type=int, default=40_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="keep the result in benchmarks/results")
    args = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory(prefix="vnp-") as folder:
        fasta = Path(folder) / "proteins.fasta"
        _write_proteins(args.fasta, fasta, args.sequences)
        order = [args.engine[0], "threads", *args.engine[1:]]
        for number in range(args.rounds):
            rounds.append(_round(order, fasta, Path(folder) / str(number), args.workers))
            order.reverse()
    ratios = {engine: _ratios(rounds, engine) for engine in args.engine}
    report = {
        "machine": machine("torch", "prefect", "ray", "distributed"),
        "input": f"{args.sequences:,} proteins, {args.workers} workers of one thread, one run after the other",
        "rounds": rounds,
        "ratios": ratios,
    }
    print(json.dumps(ratios, indent=2))
    if args.write:
        print(write_result("cluster_overhead", report))


def _ratios(rounds: list[dict[str, Any]], engine: str) -> dict[str, Any]:
    pairs = [(one[engine], one["threads"]) for one in rounds]
    return {
        "work": spread([there["work_s"] / here["work_s"] for there, here in pairs], 4),
        "workers_cpu": spread([there["workers_cpu_s"] / here["workers_cpu_s"] for there, here in pairs], 4),
        "cpu": spread([_cpu_s(there) / _cpu_s(here) for there, here in pairs], 4),
    }


def _cpu_s(figures: dict[str, float]) -> float:
    return sum(seconds for name, seconds in figures.items() if name.endswith("_cpu_s"))


def _round(order: list[str], fasta: Path, folder: Path, workers: int) -> dict[str, Any]:
    figures, digests = {}, set()
    for name in order:
        run = _started(name, fasta, folder / name, workers)
        while run.look():
            time.sleep(LOOK_S)
        assert run.process.returncode == 0, (run.layout.output_dir.parent / "stderr").read_text()
        figures[name] = {key: round(value, 2) for key, value in run.figures().items()}
        digests.add(hashlib.sha256(run.layout.embeddings.read_bytes()).hexdigest())
        print(json.dumps({name: figures[name]}), flush=True)
    assert len(digests) == 1, "the runs differ"
    return figures


def _started(runner: str, fasta: Path, folder: Path, workers: int) -> Run:
    layout = RunLayout(folder / "out")
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "virnucpro", "embed", str(fasta), "--output", str(layout.output_dir), "--flow"]
    command += ["--runner", runner, "--workers", str(workers), "--devices", "cpu"]
    environ = {
        **os.environ,
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "RAY_USAGE_STATS_ENABLED": "0",
        "DO_NOT_TRACK": "1",
        "OMP_NUM_THREADS": "1",
    }
    with (folder / "stderr").open("wb") as said:
        process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
        )
    return Run(process, layout, time.monotonic())


def _write_proteins(source: Path, target: Path, count: int) -> None:
    """Write the first *count* proteins of a file; then the same ones reversed."""
    data = source.read_bytes()
    text = (gzip.decompress(data) if source.suffix == ".gz" else data).decode()
    records = [record.partition("\n") for record in f"\n{text}".split("\n>")[1:]]
    proteins = [(name.split()[0], letters.replace("\n", "").rstrip("*")) for name, _, letters in records]
    proteins += [(f"{name}_reversed", letters[::-1]) for name, letters in proteins]
    assert count <= len(proteins), f"no more than {len(proteins):,} can be had"
    target.write_text("".join(f">{name}\n{letters}\n" for name, letters in proteins[:count]))


if __name__ == "__main__":
    main()
