"""
What durability costs: parts, fsync and checksums, against the same run without them.

Run it as ``python benchmarks/durability.py [--sequences 20000] [--rounds 3] [--workers 2] [--write]``. It embeds real
proteins (``../shared/data/proteins/uniprot_20000.fasta.gz``, or ``--fasta``) with the bundled encoder. A round is two
whole runs, whose order changes from round to round, each in a new folder on the disk of ``--folder``. Figures are the
ratios durable over not durable within a round, of CPU seconds (this process and its workers) and of seconds, and the
seconds themselves. ``--write`` keeps them in ``benchmarks/results``.

Switched off means, in this benchmark only: a worker keeps its rows in memory and writes them once, as its shard; no
fsync; no sha256 of anything that the run writes. Indexing, which hashes the input to tell it from another one, and the
check of ids and numbers stay. Both runs must give the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import itertools
import json
import os
import resource
import tempfile
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_common import machine, spread, write_result

from virnucpro import durable
from virnucpro.models.configuration import configure_model
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.multi_gpu_inference import GPU_WORKER, run_embedding
from virnucpro.settings import EmbeddingSettings
from virnucpro.store.parts import part_paths, read_block_numbers

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from virnucpro.run_layout import RunLayout

PROTEINS = Path(__file__).parents[2] / "shared" / "data" / "proteins" / "uniprot_20000.fasta.gz"
NEVER = 10**9
NOT_DURABLE_WORKER = "durability:not_durable_worker"


@contextmanager
def durability_off() -> Iterator[None]:
    """Disable fsync and checksums in this process."""
    replaced = [(os, "fsync", lambda _: None), (durable, "_digest", lambda *_: hashlib.sha256())]
    before = [getattr(owner, name) for owner, name, _ in replaced]
    for owner, name, instead in replaced:
        setattr(owner, name, instead)
    try:
        yield
    finally:
        for (owner, name, _), original in zip(replaced, before, strict=True):
            setattr(owner, name, original)


def not_durable_worker(rank: int, world_size: int, results_queue: Any, *arguments: Any) -> None:
    """Do what ``gpu_worker`` does, but keep the rows in memory until the end, and write them once."""
    from virnucpro.pipeline import gpu_worker  # noqa: PLC0415  imports torch, which the parent must not
    from virnucpro.pipeline.blocks import block_writer  # noqa: PLC0415  imports torch, which the parent must not

    assert hasattr(block_writer, "PART_INTERVAL_S")
    block_writer.PART_INTERVAL_S = float(NEVER)
    gpu_worker.seal_shard = only_part_as_shard
    with durability_off():
        gpu_worker.gpu_worker(rank, world_size, results_queue, *arguments)


def only_part_as_shard(rank: int, mine: Container[int], _plan: Any, layout: RunLayout, **_: Any) -> int:
    """Give the worker's only part the name of its shard: both have the same form. Returns its blocks."""
    (part,) = [path for path in part_paths(layout.parts_dir) if int(read_block_numbers(path)[0]) in mine]
    blocks = read_block_numbers(part)
    part.rename(layout.shard(rank))
    return len(blocks)


def cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def run_once(fasta: Path, folder: Path, workers: int, *, is_durable: bool) -> dict[str, Any]:
    """Embed *fasta* in a new folder; return CPU seconds, seconds, seconds by stage and the sha256 of the result."""
    config = configure_model(EmbeddingSettings(), device_type="cpu")
    if not is_durable:
        config = replace(config, sequences_per_part=NEVER)
    with tempfile.TemporaryDirectory(dir=folder) as out:
        cpu_s, wall_s = cpu_seconds(), time.perf_counter()
        with nullcontext() if is_durable else durability_off():
            result = run_embedding(
                [fasta], out, config, [CPU] * workers, worker_fn=GPU_WORKER if is_durable else NOT_DURABLE_WORKER
            )
        cpu_s, wall_s = cpu_seconds() - cpu_s, time.perf_counter() - wall_s
        assert result.state == "complete", result
        sha256 = hashlib.sha256((Path(out) / "embeddings.h5").read_bytes()).hexdigest()
    return {"cpu_s": cpu_s, "wall_s": wall_s, "stages_s": dict(result.stages_s), "sha256": sha256}


def measure(fasta: Path, folder: Path, *, workers: int, rounds: int) -> dict[str, Any]:
    """Take turns; return ratios and seconds."""
    found: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for number in range(rounds):
        for is_durable in (True, False) if number % 2 else (False, True):
            found[is_durable].append(run_once(fasta, folder, workers, is_durable=is_durable))
            latest = found[is_durable][-1]
            print(f"durable {is_durable}: {latest['cpu_s']:.1f} CPU s, {latest['wall_s']:.1f} s", flush=True)
    assert len({run["sha256"] for runs in found.values() for run in runs}) == 1, "the results differ"
    pairs = list(zip(found[True], found[False], strict=True))
    return {
        "durable_over_not": {
            clock: spread([on[clock] / off[clock] for on, off in pairs], digits=4) for clock in ("cpu_s", "wall_s")
        },
        "durable": seconds(found[True]),
        "not_durable": seconds(found[False]),
    }


def seconds(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the spread of a mode's seconds, stages included."""
    stages = {stage: spread([run["stages_s"][stage] for run in runs], digits=3) for stage in runs[0]["stages_s"]}
    return {**{clock: spread([run[clock] for run in runs]) for clock in ("cpu_s", "wall_s")}, "stages_s": stages}


def first_records(source: Path, target: Path, count: int) -> int:
    """Write the first *count* records of *source* to *target*; return how many there are."""
    written = 0
    with gzip.open(source, "rt") if source.suffix == ".gz" else source.open() as lines, target.open("w") as file:
        for starts, group in itertools.groupby(lines, key=lambda line: line.startswith(">")):
            text = list(group)
            if starts and written == count:
                break
            written += len(text) if starts else 0
            file.writelines(text)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fasta", type=Path, default=PROTEINS)
    parser.add_argument("--sequences", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; by default where temporary files go")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        fasta = Path(name) / "proteins.fasta"
        sequences = first_records(options.fasta, fasta, options.sequences)
        figures = measure(fasta, Path(name), workers=options.workers, rounds=options.rounds)
        file_system = os.statvfs(name)
    report = {
        "machine": machine("virnucpro", "torch", "h5py", "numpy"),
        "sequences": sequences,
        "workers": options.workers,
        "rounds": options.rounds,
        "folder": {"path": str(options.folder or tempfile.gettempdir()), "block_bytes": file_system.f_frsize},
        **figures,
    }
    print(json.dumps(report, indent=2))
    if options.write:
        write_result("durability", report)


if __name__ == "__main__":
    main()
