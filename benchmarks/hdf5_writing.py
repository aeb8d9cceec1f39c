"""
How fast finished rows become durable files, and those the final one.

Run it as ``python benchmarks/hdf5_writing.py [--rows 100000] [--width 1280] [--rounds 5] [--write]``. ``part`` is one
sealed part of 4,096 rows (HDF5 image in memory, checksum, write, fsync, rename, fsync of the folder); ``shard`` puts
parts into one file; both as MB of float32 per second of wall time and of CPU time. ``plain`` is the same bytes by one
``write`` and ``fsync``: the disk's own share. They take turns within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from bench_common import machine, spread, write_result

from virnucpro.store.parts import BlockRows, SealedBlocks, write_part, write_shard

if TYPE_CHECKING:
    from collections.abc import Iterator

PART_ROWS = 4096
BLOCK_ROWS = 64

Figures = dict[str, dict[str, list[float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="keep the result in benchmarks/results")
    options = parser.parse_args()
    parts = options.rows // PART_ROWS
    rows = np.random.default_rng(0).standard_normal((PART_ROWS, options.width), dtype=np.float32)
    figures: Figures = {}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as name:
            _one_round(Path(name), parts, rows, figures)
    report = {
        "machine": machine("numpy", "h5py"),
        "folder": tempfile.gettempdir(),
        "rows": parts * PART_ROWS,
        "width": options.width,
        "rounds": options.rounds,
        **{name: {unit: spread(values, 0) for unit, values in entry.items()} for name, entry in figures.items()},
    }
    print(json.dumps(report, indent=2))
    if options.write:
        write_result("hdf5_writing", report)


def _one_round(folder: Path, parts: int, rows: np.ndarray, figures: Figures) -> None:
    megabytes = rows.nbytes / 1e6
    paths = []
    for part in range(parts):
        blocks = _blocks(part, rows)
        with _timed("part", megabytes, figures):
            paths.append(write_part(folder, blocks, plan_fingerprint="p"))
        with _timed("plain", megabytes, figures):
            _plain(folder / "plain", rows)
    sealed = [SealedBlocks.open(path) for path in paths]
    with _timed("shard", parts * megabytes, figures):
        write_shard(folder / "shard_0.h5", sealed, plan_fingerprint="p", hidden_dim=rows.shape[1])


@contextmanager
def _timed(name: str, megabytes: float, figures: Figures) -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    entry = figures.setdefault(name, {"mb_per_second": [], "mb_per_cpu_second": []})
    entry["mb_per_second"].append(megabytes / (time.perf_counter() - wall))
    entry["mb_per_cpu_second"].append(megabytes / (time.process_time() - cpu))


def _blocks(part: int, rows: np.ndarray) -> list[BlockRows]:
    """Return the blocks of one part over *rows*."""
    first = part * PART_ROWS
    return [
        BlockRows(
            block=(first + start) // BLOCK_ROWS,
            positions=np.arange(first + start, first + start + BLOCK_ROWS),
            sequence_ids=[f"contig_{first + start + i}_chunk_1F1" for i in range(BLOCK_ROWS)],
            embeddings=rows[start : start + BLOCK_ROWS],
        )
        for start in range(0, PART_ROWS, BLOCK_ROWS)
    ]


def _plain(path: Path, rows: np.ndarray) -> None:
    with path.open("wb") as file:
        file.write(rows.data)
        file.flush()
        os.fsync(file.fileno())


if __name__ == "__main__":
    main()
