"""
Which number of CPU workers, threads and tokens in a block is best on this machine.

Run it as ``python benchmarks/scaling.py [--models 8M,35M] [--rounds 3] [--write]``. Two measurements, each taking turns
within one run, on random weights of ESM-2's shapes and windows of the example proteins (30 to 166 residues, all
different):

``workers``: the whole job by the command line, a new folder each time, one to three workers of one thread, and one of
two; figures are seconds of the embedding stage (from the start of the processes to the last shard) and of computing in
the slowest worker, model already loaded.

``token_budget``: the packed forward pass in one process on one thread, blocks of different sizes over the same chunks
and over proteins of 8 to 1,022 residues; figures are CPU seconds as ratios to the default budget within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from bench_common import machine, spread, write_result
from embedders import random_checkpoint
from workloads import MAX_RESIDUES, chunks, proteins, write_fasta

from virnucpro.choices import DEFAULT_TOKEN_BUDGET
from virnucpro.data.collators import VarlenCollator
from virnucpro.data.packing import plan_blocks
from virnucpro.data.sequence_index import SequenceRecord
from virnucpro.models.esm2_flash import load_esm2_model

SETTINGS = {
    "1 worker x 1 thread": (1, 1),
    "1 worker x 2 threads": (1, 2),
    "2 workers x 1 thread": (2, 1),
    "3 workers x 1 thread": (3, 1),
}
SEQUENCES = {"8M": 1500, "35M": 400}
BUDGETS = (1024, 2048, 3072, 4096, 6144, 8192)


def run_command(fasta: Path, checkpoint: Path, folder: Path, *, workers: int, threads: int) -> tuple[float, float]:
    """Run the command once; return the seconds of its embedding stage, and of computing in the slowest worker."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        command = [sys.executable, "-m", "virnucpro", "embed", str(fasta), "-o", out, "--model", str(checkpoint)]
        command += ["--devices", "cpu", "--workers", str(workers), "--threads", str(threads), "--json"]
        outcome = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return outcome["stages_s"]["embed"], max(rank["compute_s"] for rank in outcome["ranks"])


def measure_workers(size: str, rounds: int, folder: Path) -> dict[str, object]:
    """Compare numbers of workers and threads, taking turns."""
    checkpoint = random_checkpoint(size, folder)
    by_residues = {residues: name for name, residues in chunks(2 * SEQUENCES[size])}
    distinct = [(name, residues) for residues, name in by_residues.items()][: SEQUENCES[size]]
    fasta = write_fasta(folder / "chunks.fasta", distinct)
    stage: dict[str, list[float]] = {name: [] for name in SETTINGS}
    computing: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for number in range(rounds):
        for name, (workers, threads) in SETTINGS.items():
            stage_s, compute_s = run_command(fasta, checkpoint, folder, workers=workers, threads=threads)
            stage[name].append(stage_s)
            computing[name].append(compute_s)
            print(f"  {size} round {number + 1}: {name} {stage_s:.1f} s, computing {compute_s:.1f} s", file=sys.stderr)
    return {
        "model": size,
        "sequences": len(distinct),
        "residues": sum(len(residues) for _, residues in distinct),
        "stage_seconds": {name: spread(values) for name, values in stage.items()},
        "computing_seconds": {name: spread(values) for name, values in computing.items()},
        "times_as_fast_as_one_worker": {
            name: spread([one / own for one, own in zip(computing[next(iter(SETTINGS))], values, strict=True)])
            for name, values in computing.items()
        },
    }


def measure_token_budget(size: str, rounds: int, folder: Path) -> list[dict[str, object]]:
    """Compare block sizes, taking turns."""
    model, tokenizer = load_esm2_model(random_checkpoint(size, folder), "cpu")
    collate = VarlenCollator(tokenizer, max_residues=MAX_RESIDUES)
    reports = []
    for workload, records in (("chunks", chunks()), ("proteins", proteins()[:150])):
        ordered = sorted(records, key=lambda record: -len(record[1]))
        tokens = [min(len(residues), MAX_RESIDUES) + 2 for _, residues in ordered]
        batches = {
            budget: [
                collate([SequenceRecord(number, *ordered[number]) for number in block])
                for block in plan_blocks(tokens, token_budget=budget)
            ]
            for budget in BUDGETS
        }
        seconds: dict[int, list[float]] = {budget: [] for budget in BUDGETS}
        for number in range(rounds + 1):
            for budget in BUDGETS:
                start = time.process_time()
                for batch in batches[budget]:
                    model(batch.input_ids_T, batch.cu_seqlens, batch.lengths)
                if number:
                    seconds[budget].append(time.process_time() - start)
            print(f"  {size} {workload} budgets, round {number} of {rounds}", file=sys.stderr)
        default = seconds[DEFAULT_TOKEN_BUDGET]
        reports.append(
            {
                "model": size,
                "workload": workload,
                "tokens": sum(tokens),
                "cpu_seconds": {budget: spread(values) for budget, values in seconds.items()},
                "cpu_seconds_over_default": {
                    budget: spread([value / base for value, base in zip(values, default, strict=True)], 3)
                    for budget, values in seconds.items()
                },
            }
        )
    return reports


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="8M,35M")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("workers", "token_budget"))
    parser.add_argument("--write", action="store_true", help="keep the result in benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    common = {
        "machine": machine("torch", "numpy", "h5py"),
        "usable_cores": len(os.sched_getaffinity(0)),
        "precision": "fp32",
        "rounds": options.rounds,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.only != "token_budget":
            rows = [measure_workers(size, options.rounds, folder) for size in options.models.split(",")]
            _show("workers", {**common, "workers": rows}, keep=options.write)
        if options.only != "workers":
            budgets = measure_token_budget("8M", options.rounds, folder)
            report = {**common, "default_token_budget": DEFAULT_TOKEN_BUDGET, "token_budget": budgets}
            _show("token_budget", report, keep=options.write)


def _show(name: str, report: dict[str, object], *, keep: bool) -> None:
    print(json.dumps(report, indent=2))
    if keep:
        write_result(name, report)


if __name__ == "__main__":
    main()
