"""
What an engine adds to the work: a run on threads beside the same run on a cluster of Ray or Dask, at the same time.

Run it as ``python benchmarks/cluster_overhead.py [--engine ray] [--sequences 26000] [--rounds 2] [--write]``; 26,000
proteins take one core about ten minutes. Input: real proteins (``../shared/data/proteins/uniprot_20000.fasta.gz``, or
``--fasta``), and after the last of them the same ones reversed; the bundled encoder, one worker, one thread. Both runs
of a round have a core for all their processes, the engine's too, and change cores from round to round: what else the
machine does holds up both. Both are flow runs of the same command; they must give the same bytes.

``work_s`` is what is compared: from the first line in a worker's log to the last. What comes before (Prefect's server,
the engine, its task's imports) and after (leaving, putting together, checking) is reported apart, as are the CPU
seconds of the workers, of the command's own process and of all other processes: the engine's, and Prefect's server.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
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
"""Seconds between two looks at the CPU seconds of all processes; what the last one uses after it is not seen."""


@dataclass
class Run:
    """One of the two runs of a round."""

    process: subprocess.Popen[bytes]
    layout: RunLayout
    began_s: float
    wall_s: float = 0.0
    cpu_s: dict[int, float] = field(default_factory=dict)
    """Process -> CPU seconds so far."""

    def look(self) -> bool:
        """Note the CPU seconds of all its processes; return whether it goes on."""
        if self.process.poll() is not None:
            self.wall_s = self.wall_s or time.monotonic() - self.began_s
            return False
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            for one in [root, *root.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    times = one.cpu_times()
                    self.cpu_s[one.pid] = times.user + times.system
        return True

    def figures(self) -> dict[str, float]:
        """Return what was measured."""
        lines = self.layout.worker_log(0).read_text().splitlines()
        at = [datetime.fromisoformat(json.loads(line)["timestamp"]).timestamp() for line in (lines[0], lines[-1])]
        (rank,) = json.loads(self.layout.manifest.read_text())["ranks"]
        workers_s = sum(seconds for pid, seconds in self.cpu_s.items() if pid in rank["pids"])
        command_s = self.cpu_s[self.process.pid]
        return {
            "work_s": at[1] - at[0],
            "before_and_after_s": self.wall_s - (at[1] - at[0]),
            "workers_cpu_s": workers_s,
            "command_cpu_s": command_s,
            "others_cpu_s": sum(self.cpu_s.values()) - workers_s - command_s,
        }


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["ray", "dask"], default="ray")
    parser.add_argument("--fasta", type=Path, default=PROTEINS)
    parser.add_argument("--sequences", type=int, default=26_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="keep the result in benchmarks/results")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        parser.error("two cores are needed: one for each of two runs")
    rounds = []
    with tempfile.TemporaryDirectory(prefix="vnp-") as folder:
        fasta = Path(folder) / "proteins.fasta"
        _write_proteins(args.fasta, fasta, args.sequences)
        for number in range(args.rounds):
            rounds.append(_round(args.engine, fasta, Path(folder) / str(number), cores[:: 1 - 2 * (number % 2)]))
            print(json.dumps(rounds[-1]), flush=True)
    ratios = {
        "work": spread([one[args.engine]["work_s"] / one["threads"]["work_s"] for one in rounds], 4),
        "cpu": spread([_cpu_s(one[args.engine]) / _cpu_s(one["threads"]) for one in rounds], 4),
    }
    report = {
        "machine": machine("torch", "prefect", "prefect-ray", "ray", "prefect-dask", "distributed"),
        "input": f"{args.sequences:,} proteins, one worker of one thread on one core a run, at the same time",
        "engine": args.engine,
        "rounds": rounds,
        "ratios": ratios,
    }
    print(json.dumps(ratios, indent=2))
    if args.write:
        print(write_result(f"cluster_overhead_{args.engine}", report))


def _cpu_s(figures: dict[str, float]) -> float:
    return sum(seconds for name, seconds in figures.items() if name.endswith("_cpu_s"))


def _round(engine: str, fasta: Path, folder: Path, cores: list[int]) -> dict[str, Any]:
    runs = {
        name: _started(name, fasta, folder / name, core) for name, core in zip(("threads", engine), cores, strict=True)
    }
    while sum(run.look() for run in runs.values()):
        time.sleep(LOOK_S)
    for run in runs.values():
        assert run.process.returncode == 0, (run.layout.output_dir.parent / "stderr").read_text()
    digests = {hashlib.sha256(run.layout.embeddings.read_bytes()).hexdigest() for run in runs.values()}
    assert len(digests) == 1, "the runs differ"
    return {name: {key: round(value, 2) for key, value in run.figures().items()} for name, run in runs.items()}


def _started(runner: str, fasta: Path, folder: Path, core: int) -> Run:
    layout = RunLayout(folder / "out")
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "virnucpro", "embed", str(fasta), "--output", str(layout.output_dir), "--flow"]
    command += ["--runner", runner, "--workers", "1", "--devices", "cpu"]
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
            ["taskset", "--cpu-list", str(core), *command],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
        )
    return Run(process, layout, time.monotonic())


def _write_proteins(source: Path, target: Path, count: int) -> None:
    """Write the first *count* proteins of a file; once there are no more, the same ones backwards."""
    data = source.read_bytes()
    text = (gzip.decompress(data) if source.suffix == ".gz" else data).decode()
    records = [record.partition("\n") for record in f"\n{text}".split("\n>")[1:]]
    proteins = [(name.split()[0], letters.replace("\n", "").rstrip("*")) for name, _, letters in records]
    proteins += [(f"{name}_reversed", letters[::-1]) for name, letters in proteins]
    assert count <= len(proteins), f"no more than {len(proteins):,} can be had"
    target.write_text("".join(f">{name}\n{letters}\n" for name, letters in proteins[:count]))


if __name__ == "__main__":
    main()
