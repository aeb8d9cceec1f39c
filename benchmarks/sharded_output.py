"""
How long a result of ten million rows takes to write, to open, and to find a row in: sharded, and as one file.

Run it as ``python benchmarks/sharded_output.py [--rows 10000000] [--width 8] [--lookups 1000] [--write]``. It makes
proteins with made-up ids, writes their blocks as parts with rows that identify their sequence, in place of a model, and
lets the program write the result in each form; both must hold the same rows. ``writing`` is that: reading and
checking the parts, writing, hashing; and then validating what was written. Opening, and finding ids drawn at random, is
measured in a fresh process each: ``cold`` after the page cache was dropped, ``warm`` right after that; of
the slowest, processor time as well, since a busy machine delays the clock. Every row that is found is compared with
the one that belongs there. The folder takes some 500 bytes a row at width 8. ``--write`` keeps the figures in
``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import structlog
from bench_common import machine, write_result

from virnucpro import read_embeddings
from virnucpro.choices import ResultForm
from virnucpro.config import ModelConfig
from virnucpro.data.packing import make_plan
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.pipeline.shard_aggregator import aggregate_shards, validate_result
from virnucpro.run_layout import RunLayout
from virnucpro.store.parts import BlockRows, write_part

SEED = 20261122
RESIDUES = b"ACDEFGHIKLMNPQRSTVWY"
ROWS_PER_PART = 1 << 17
FORMS = {ResultForm.SHARDED: "embeddings", ResultForm.SINGLE: "embeddings.h5"}


def name_of(row: int) -> str:
    """Return the id of a row: of the length of those of frames."""
    return f"k141_{row * 7919 % 1_000_003}_chunk_{row}F1"


def vectors_of(rows: np.ndarray, width: int) -> np.ndarray:
    """Return the vector of each row number: float32 (rows, width), different for every row."""
    columns = np.arange(1, width + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (rows.astype(np.uint64)[:, None] + np.uint64(1)) * columns
    return ((mixed >> np.uint64(40)).astype(np.float64) / 2**24).astype(np.float32)


def make_fasta(path: Path, num_rows: int) -> None:
    """Write proteins of 8 to 30 residues, no two alike: the first six spell the row's number."""
    rng = np.random.default_rng(SEED)
    pool = np.frombuffer(RESIDUES, np.uint8)[rng.integers(0, 20, size=1 << 16)].tobytes()
    with path.open("wb") as file:
        for first in range(0, num_rows, 1 << 16):
            rows = np.arange(first, min(first + (1 << 16), num_rows))
            digits = np.frombuffer(RESIDUES, np.uint8)[rows[:, None] // 20 ** np.arange(6) % 20]
            spelled = digits.tobytes()
            starts = rng.integers(0, len(pool) - 24, size=len(rows)).tolist()
            lengths = rng.integers(2, 25, size=len(rows)).tolist()
            file.write(
                b"".join(
                    b">%s\n%s%s\n" % (name_of(row).encode(), spelled[6 * at : 6 * at + 6], pool[start : start + length])
                    for at, (row, start, length) in enumerate(zip(rows.tolist(), starts, lengths, strict=True))
                )
            )


def lay_down(folder: Path, num_rows: int, width: int) -> None:
    """Make the folder of a run whose every block is finished."""
    fasta, layout = folder / "in.fasta", RunLayout(folder)
    folder.mkdir()
    make_fasta(fasta, num_rows)
    index = SequenceIndex.build([fasta], layout.index, unpack_dir=layout.unpacked_dir)
    config = config_of(width)
    plan = make_plan(index, config, device_type="cpu")
    waiting: list[BlockRows] = []
    for block in range(len(plan)):
        positions = plan.block_positions(block)
        rows = vectors_of(index.input_rows[positions], width)
        waiting.append(BlockRows(block, positions, index.sequence_ids(positions), rows))
        if block + 1 == len(plan) or sum(len(item.positions) for item in waiting) >= ROWS_PER_PART:
            write_part(layout.parts_dir, waiting, plan_fingerprint=plan.fingerprint)
            waiting = []


def config_of(width: int) -> ModelConfig:
    """Return settings of a model of that width, which is never loaded."""
    return ModelConfig(
        model_name="made up",
        weights_path="none",
        weights_sha256="0" * 64,
        hidden_dim=width,
        token_budget=1 << 16,
    )


def write_in(folder: Path, form: ResultForm, width: int) -> dict[str, float]:
    """Write the result in *form*, in this process; return time and memory."""
    layout, config = RunLayout(folder), config_of(width)
    index = SequenceIndex.open(layout.index)
    plan = make_plan(index, config, device_type="cpu")
    before, wall, cpu = peak_bytes(), time.perf_counter(), time.process_time()
    result = aggregate_shards(layout, index, plan, max_residues=config.max_residues, hidden_dim=width, result_form=form)
    assert result.is_complete
    assert result.output_path == folder / FORMS[form]
    written_s, written_cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    files = [layout.output_dir / name for name in result.files]
    wall, cpu = time.perf_counter(), time.process_time()
    validate_result(result.output_path, index, expected_rows=result.num_rows, expected_files=result.files)
    return {
        "seconds": round(written_s, 2),
        "cpu_seconds": round(written_cpu_s, 2),
        "validating_seconds": round(time.perf_counter() - wall, 2),
        "validating_cpu_seconds": round(time.process_time() - cpu, 2),
        "peak_growth_bytes_per_row": round((peak_bytes() - before) / max(1, len(index)), 1),
        "files": len(files),
        "megabytes": round(sum(path.stat().st_size for path in files) / 1e6, 1),
    }


def look_up(folder: Path, form: ResultForm, lookups: int, num_rows: int) -> dict[str, float]:
    """Open the result in this process and find ids drawn at random; return time and memory."""
    rng = np.random.default_rng(SEED)
    rows = rng.integers(0, num_rows, size=lookups).tolist()
    before, start = resident_bytes(), time.perf_counter()
    found = read_embeddings(folder / FORMS[form])
    opened_s = time.perf_counter() - start
    assert len(found) == num_rows
    seconds, cpu_seconds = [], []
    for row in rows:
        name = name_of(row)
        start, cpu = time.perf_counter(), time.process_time()
        vector = found[name]
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu)
        assert vector.tobytes() == vectors_of(np.array([row]), found.hidden_dim)[0].tobytes(), name
    assert all(f"{name_of(row)}x" not in found for row in rows[:100])
    start = time.perf_counter()
    at_once = found.to_numpy([name_of(row) for row in rows])
    at_once_s = time.perf_counter() - start
    assert at_once.tobytes() == vectors_of(np.array(rows), found.hidden_dim).tobytes()
    milliseconds = sorted(1000 * item for item in seconds)
    return {
        "open_seconds": round(opened_s, 4),
        "find_ms_first": round(1000 * seconds[0], 3),
        "find_ms_median": round(statistics.median(milliseconds), 3),
        "find_ms_99_percent": round(milliseconds[int(0.99 * (len(milliseconds) - 1))], 3),
        "find_ms_most": round(milliseconds[-1], 3),
        "find_cpu_ms_most": round(1000 * max(cpu_seconds), 3),
        "many_at_once_ms_each": round(1000 * at_once_s / len(rows), 3),
        "resident_megabytes": round((resident_bytes() - before) / 1e6, 1),
    }


def forget(folder: Path) -> None:
    """Drop the files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def peak_bytes() -> int:
    """Return the peak resident set of this program; getrusage's would be that of its parent at first."""
    return _status("VmHWM")


def resident_bytes() -> int:
    """Return the resident set of this program."""
    return _status("VmRSS")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def in_child(options: argparse.Namespace, folder: Path, what: str, form: ResultForm) -> dict[str, float]:
    """Measure *what* in a fresh process."""
    command = [sys.executable, __file__, "--rows", str(options.rows), "--width", str(options.width)]
    command += ["--lookups", str(options.lookups), "--child", what, str(form), str(folder)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Lay the run down, and measure both forms in turn."""
    begun = time.perf_counter()
    lay_down(folder, options.rows, options.width)
    report: dict[str, object] = {"laying_down_seconds": round(time.perf_counter() - begun, 1)}
    for form in FORMS:
        figures: dict[str, object] = {"writing": in_child(options, folder, "write", form)}
        forget(folder)
        figures["cold"] = in_child(options, folder, "look_up", form)
        figures["warm"] = in_child(options, folder, "look_up", form)
        report[str(form)] = figures
    check_same(folder, options.rows)
    return report


def check_same(folder: Path, num_rows: int) -> None:
    """Hold the shards against the single file, row by row."""
    step = 1 << 16
    sharded, single = (read_embeddings(folder / name) for name in (FORMS[ResultForm.SHARDED], FORMS[ResultForm.SINGLE]))
    with sharded, single:
        for start in range(0, num_rows, step):
            some = slice(start, start + step)
            assert sharded.ids[some] == single.ids[some]
        assert sharded.to_numpy().tobytes() == single.to_numpy().tobytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--lookups", type=int, default=1000)
    parser.add_argument("--folder", type=Path, help="where the files go while it runs; by default the system's choice")
    parser.add_argument("--write", action="store_true", help="keep the result in benchmarks/results")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    if options.child:
        what, form, folder = options.child
        if what == "write":
            print(json.dumps(write_in(Path(folder), ResultForm(form), options.width)))
        else:
            print(json.dumps(look_up(Path(folder), ResultForm(form), options.lookups, options.rows)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        report = {
            "machine": machine("numpy", "h5py"),
            "rows": options.rows,
            "width": options.width,
            "lookups": options.lookups,
            **measure(options, Path(name) / "out"),
        }
    print(json.dumps(report, indent=2))
    if options.write:
        write_result("sharded_output", report)


if __name__ == "__main__":
    main()
