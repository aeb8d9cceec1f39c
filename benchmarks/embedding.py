"""
Speed and memory of embedding proteins on one CPU core, against fair-esm's own loop and transformers.

Run it as ``python benchmarks/embedding.py [--rows 8M:chunks,8M:proteins] [--rounds 3] [--write NAME]``. Each program
goes from the same FASTA file to embeddings on disk, in one process, one thread, fp32, taking turns; figures are CPU
seconds, ratios are taken within a round, and the machine's own matrix rate is measured anew in every round. The rows
that the programs give are compared with each other. Peak memory is that of a process of its own for each program,
weights included. For 150M and 650M a few whole batches of a length-sorted pool of 400 sequences stand for all.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from bench_common import gemm_peak_flops, machine, spread, write_result
from embedders import PEER_TOKENS, PROGRAMS, SHAPES, VirNucPro, random_checkpoint, useful_flops
from workloads import MAX_RESIDUES, chunks, proteins, whole_batches, write_fasta

WORKLOADS = {"chunks": chunks, "proteins": proteins}
WHOLE_BATCHES = {"150M": 3, "650M": 1}
"""Whole batches that stand for all; the smaller models embed everything."""
AGREEMENT = 1e-4
"""Greatest difference between the programs' rows: transformers computes its own rotary frequencies."""


def records_of(size: str, workload: str) -> list[tuple[str, str]]:
    """Return the sequences of a row of the table."""
    everything = WORKLOADS[workload]()
    if size not in WHOLE_BATCHES:
        return everything
    return whole_batches(everything, token_budget=PEER_TOKENS, batches=WHOLE_BATCHES[size])


def measure(size: str, workload: str, rounds: int, folder: Path, *, memory: bool) -> dict[str, object]:
    """Let the programs take turns on one row of the table."""
    records = records_of(size, workload)
    fasta = write_fasta(folder / f"{workload}.fasta", records)
    checkpoint = random_checkpoint(size, folder)
    programs = [program(checkpoint, size) for program in PROGRAMS]
    lengths = [len(residues) for _, residues in records]
    flops = useful_flops(size, lengths)
    seconds: dict[str, list[float]] = {program.name: [] for program in programs}
    shares: list[float] = []
    peaks: list[float] = []
    rows: dict[str, dict[str, np.ndarray]] = {}
    for number in range(rounds):
        for program in programs[number % 3 :] + programs[: number % 3]:
            with tempfile.TemporaryDirectory(dir=folder) as out:
                if program.name == "virnucpro":
                    peaks.append(gemm_peak_flops())
                start = time.process_time()
                rows[program.name] = program.run(fasta, Path(out))
                spent = time.process_time() - start
            seconds[program.name].append(spent)
            if program.name == "virnucpro":
                shares.append(flops / spent / peaks[-1])
            print(f"  {size} {workload} round {number + 1}: {program.name} {spent:.2f} CPU s", file=sys.stderr)
    ours = seconds.pop("virnucpro")
    tokens = sum(min(length, MAX_RESIDUES) + 2 for length in lengths)
    report = {
        "model": size,
        "workload": workload,
        "sequences": len(records),
        "residues": {"least": min(lengths), "median": int(np.median(lengths)), "greatest": max(lengths)},
        "tokens": tokens,
        "rounds": rounds,
        "cpu_seconds": {"virnucpro": [round(value, 3) for value in ours]}
        | {name: [round(value, 3) for value in values] for name, values in seconds.items()},
        "times_as_fast_as": {
            name: spread([theirs / own for theirs, own in zip(values, ours, strict=True)])
            for name, values in seconds.items()
        },
        "tokens_per_cpu_second": spread([tokens / own for own in ours], 0),
        "share_of_gemm_peak": spread(shares, 3),
        "gemm_peak_gflops": spread([peak / 1e9 for peak in peaks], 0),
        "padding": {program.name: round(program.slots / tokens - 1, 4) for program in programs},
        "greatest_difference": {name: _difference(rows["virnucpro"], rows[name]) for name in seconds},
    }
    report["where_our_time_goes"] = shares_of_operators(programs[-1], fasta, folder)
    report["bf16"] = bf16_beside(programs[-1], VirNucPro(checkpoint, size, precision="bf16"), fasta, rounds)
    del programs
    if memory:
        report["peak_memory_mb"] = {
            program.name: peak_memory_mb(program.name, checkpoint, size, fasta) for program in PROGRAMS
        }
    checkpoint.unlink()
    return report


def bf16_beside(fp32: VirNucPro, bf16: VirNucPro, fasta: Path, rounds: int) -> dict[str, object]:
    """Let our fp32 and bf16 take turns; cosines are left out, since those of random weights say little."""
    seconds: dict[str, list[float]] = {"fp32": [], "bf16": []}
    for number in range(rounds):
        for name, program in (("fp32", fp32), ("bf16", bf16))[:: 1 if number % 2 else -1]:
            with tempfile.TemporaryDirectory() as out:
                start = time.process_time()
                program.run(fasta, Path(out))
                seconds[name].append(time.process_time() - start)
    return {
        "cpu_seconds": {name: [round(value, 3) for value in values] for name, values in seconds.items()},
        "times_as_fast_as_fp32": spread([a / b for a, b in zip(seconds["fp32"], seconds["bf16"], strict=True)]),
    }


def shares_of_operators(program: VirNucPro, fasta: Path, folder: Path, *, shown: int = 8) -> dict[str, float]:
    """Return the share of the CPU time that each of PyTorch's operators takes itself in one run, greatest first."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with tempfile.TemporaryDirectory(dir=folder) as out, torch.profiler.profile(activities=activities) as profile:
        program.run(fasta, Path(out))
    events = sorted(profile.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    return {event.key: round(event.self_cpu_time_total / total, 3) for event in events[:shown]}


def _difference(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    assert ours.keys() == theirs.keys()
    difference = max(float(np.abs(ours[name] - theirs[name]).max()) for name in ours)
    assert difference < AGREEMENT, difference
    return difference


def peak_memory_mb(name: str, checkpoint: Path, size: str, fasta: Path) -> int:
    """Return the peak resident set of a fresh process that runs one program once."""
    command = [sys.executable, __file__, "--memory-of", name, str(checkpoint), size, str(fasta)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _run_once(name: str, checkpoint: str, size: str, fasta: str) -> None:
    program = next(program for program in PROGRAMS if program.name == name)(Path(checkpoint), size)
    with tempfile.TemporaryDirectory() as out:
        program.run(Path(fasta), Path(out))
    lines = Path("/proc/self/status").read_text().splitlines()
    print(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="8M:chunks,8M:proteins", help=f"sizes {', '.join(SHAPES)}; {list(WORKLOADS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", metavar="NAME", help="keep the result under this name")
    parser.add_argument("--no-memory", action="store_true", help="leave the peak memory out, and its processes")
    parser.add_argument("--memory-of", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory_of:
        _run_once(*options.memory_of)
        return
    report = {
        "machine": machine("torch", "fair-esm", "transformers", "numpy", "h5py"),
        "threads": 1,
        "precision": "fp32",
        "token_budget_of_peers": PEER_TOKENS,
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as name:
        for row in options.rows.split(","):
            size, workload = row.split(":")
            report["rows"].append(measure(size, workload, options.rounds, Path(name), memory=not options.no_memory))
    print(json.dumps(report, indent=2))
    if options.write:
        write_result(options.write, report)


if __name__ == "__main__":
    main()
