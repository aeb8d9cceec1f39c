"""
Rows a second into and out of the embedding cache.

Run it as ``python benchmarks/embedding_cache.py [--rows 100000] [--write]``. For the widths of the bundled encoder, of
ESM-2 8M and of ESM-2 3B it puts random rows in pieces of a part (4,096 rows), reads them in pieces of a block (128
rows) in another order, with a fresh connection, and checks every one. CPU seconds are those of the process; the file
stays in the system's page cache. ``--write`` keeps the figures in ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import tempfile
import time
from pathlib import Path

import numpy as np
from bench_common import machine, write_result

from virnucpro.store.embedding_cache import EmbeddingCache

SEED = 20261121
WIDTHS = (128, 320, 2560)
ROWS_PER_PUT = 4096
ROWS_PER_GET = 128
MAX_BYTES = 1 << 40


def measure(folder: Path, num_rows: int, width: int) -> dict[str, object]:
    """Put and get *num_rows* rows of *width* numbers."""
    rng = np.random.default_rng(SEED)
    hashes = rng.integers(0, 256, size=(num_rows, 16), dtype=np.uint8)
    rows = rng.normal(size=(num_rows, width)).astype(np.float32)
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    with EmbeddingCache(folder, "benchmark", max_bytes=MAX_BYTES) as cache:
        for start in range(0, num_rows, ROWS_PER_PUT):
            cache.put(hashes[start : start + ROWS_PER_PUT], rows[start : start + ROWS_PER_PUT])
    put = rates(num_rows, wall_s, cpu_s)
    file_bytes = sum(path.stat().st_size for path in folder.iterdir())
    starts = rng.permutation(np.arange(0, num_rows, ROWS_PER_GET)).tolist()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    with EmbeddingCache(folder, "benchmark", max_bytes=MAX_BYTES) as cache:
        for start in starts:
            found = cache.get(hashes[start : start + ROWS_PER_GET])
            assert found is not None
            assert found[-1, -1] == rows[min(start + ROWS_PER_GET, num_rows) - 1, -1]
    return {
        "width": width,
        "rows": num_rows,
        "put": put,
        "get": rates(num_rows, wall_s, cpu_s),
        "file_bytes_per_row": round(file_bytes / num_rows),
        "file_bytes_over_numbers": round(file_bytes / rows.nbytes, 3),
    }


def rates(num_rows: int, wall_s: float, cpu_s: float) -> dict[str, int]:
    """Return rows a second since the two clocks were read."""
    return {
        "rows_per_second": round(num_rows / (time.perf_counter() - wall_s)),
        "rows_per_cpu_second": round(num_rows / (time.process_time() - cpu_s)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    rows = []
    for width in WIDTHS:
        with tempfile.TemporaryDirectory() as name:
            rows.append(measure(Path(name), options.rows, width))
    report = {"machine": machine("numpy") | {"sqlite": sqlite3.sqlite_version}, "widths": rows}
    print(json.dumps(report, indent=2))
    if options.write:
        write_result("embedding_cache", report)


if __name__ == "__main__":
    main()
