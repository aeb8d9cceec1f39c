"""
The rates that ``benchmarks/scale_model.py`` starts from, each measured on this machine on the program's own code.

Run it as ``python benchmarks/scale_rates.py [--rounds 3] [--only NAME,...] [--write]``; a quarter of an hour. Every
measurement is a function of ``MEASUREMENTS``, runs in a process of its own, ``--rounds`` times, and gives medians with
ranges. Processor seconds (``cpu_s``) are kept beside wall seconds: a busy machine changes them less, another disk does
not. Sequences are the 20,000 real proteins of the test data (``VIRNUCPRO_TEST_DATA``; else the
400 of ``examples/``), repeated with their residues rotated, so that no two are alike; where only the number of records
counts, short made-up ones. Nothing here needs a GPU, and nothing says anything about one.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import structlog
from bench_common import EXAMPLES, RESULTS, machine, spread, write_result
from sharded_output import config_of, make_fasta, vectors_of
from sharded_output import peak_bytes as peak_bytes_so_far

from flows.clusters.dask_engine import dask_engine
from flows.clusters.ray_engine import ray_engine
from virnucpro import durable
from virnucpro.choices import DEFAULT_MAX_RESIDUES, DEFAULT_PROTEIN_MODEL, SPECIAL_TOKENS, ResultForm
from virnucpro.config import ModelConfig, RunLimits
from virnucpro.data.index.file import write_index
from virnucpro.data.packing import BlockPlan, make_plan
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.pipeline.hosts.unit_worker import UnitWorker
from virnucpro.pipeline.shard_aggregator import aggregate_shards, validate_result
from virnucpro.pipeline.work.units import Unit
from virnucpro.run_layout import RunLayout
from virnucpro.store.parts import BlockRows, SealedBlocks, part_paths, write_part
from virnucpro.telemetry.snapshot import WorkFacts
from virnucpro.telemetry.work_telemetry import WorkTelemetry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from flows.clusters.engine import Engine

SHARED = Path(os.environ.get("VIRNUCPRO_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))
WIDE = 2560
"""Numbers in a row of ESM-2 3B."""
NARROW = 32
SEQUENCES_PER_PART = ModelConfig.__dataclass_fields__["sequences_per_part"].default
BLOCK_TOKENS = 65_536
SEQUENCES_PER_BLOCK = 160
"""About those of such a block."""
ROW_BYTES = 4 * WIDE


class Clock:
    """Context manager that takes the seconds of the clock, and of this process's processors."""

    @property
    def so_far_s(self) -> float:
        """Seconds since it began."""
        return time.perf_counter() - self._wall

    def __enter__(self) -> Self:
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s, self.cpu_s = time.perf_counter() - self._wall, time.process_time() - self._cpu


def peak_from_here() -> int:
    """Forget the peak of this process's resident memory; return the bytes that are resident."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes_so_far()


# --- inputs ---


def real_proteins() -> list[tuple[bytes, bytes]]:
    """Return (header, residues) of the real proteins."""
    packed = SHARED / "proteins" / "uniprot_20000.fasta.gz"
    text = gzip.decompress(packed.read_bytes()) if packed.exists() else (EXAMPLES / "proteins.fasta").read_bytes()
    records = (record.partition(b"\n") for record in text[1:].split(b"\n>"))
    return [(header, residues.replace(b"\n", b"")) for header, _, residues in records]


def write_proteins(path: Path, count: int) -> Path:
    """Write *count* sequences of real lengths, composition and headers; no two are alike."""
    if not path.exists():
        proteins = real_proteins()
        with path.open("wb") as file:
            for number in range(count):
                header, residues = proteins[number % len(proteins)]
                turn = number // len(proteins) % len(residues)
                name, _, rest = header.partition(b" ")
                file.write(b">%s_%d %s\n%s%s\n" % (name, number, rest, residues[turn:], residues[:turn]))
    return path


def short_index(folder: Path, count: int) -> SequenceIndex:
    """Return the index of *count* made-up proteins of 8 to 30 residues, made once a folder."""
    fasta, path = folder / f"short_{count}.fasta", folder / f"short_{count}.index"
    if not path.exists():
        make_fasta(fasta, count)
        SequenceIndex.build([fasta], path, unpack_dir=folder)
    return SequenceIndex.open(path)


def made_up_index(folder: Path, count: int) -> SequenceIndex:
    """Return an index of *count* records that no file holds, all different and as long as real proteins."""
    path = folder / f"made_up_{count}.index"
    if not path.exists():
        small = short_index(folder, 1000)
        real = np.array([len(residues) for _, residues in real_proteins()])
        lengths = np.sort(np.resize(real, count))[::-1]
        rows = np.arange(count)
        columns = dict.fromkeys(("offsets", "record_bytes", "input_rows", "representatives"), lambda: rows)
        columns |= {"lengths": lambda: lengths, "id_ends": lambda: 10 * (rows + 1)}
        columns |= {"sequence_hashes": lambda: np.zeros((count, 16)), "file_numbers": lambda: np.zeros(count)}
        columns["low_information"] = lambda: np.zeros(count)
        about = {"files": [vars(file) for file in small.files], "counts": small.counts, "rules": asdict(small.rules)}
        ids = (b"%010d" % row for row in range(count))
        write_index(path, count, columns, ids, [], about)
    return SequenceIndex.open(path)


def plan_of(index: SequenceIndex, width: int = WIDE, sequences_per_block: int = SEQUENCES_PER_BLOCK) -> BlockPlan:
    """Return a plan with blocks of about that many sequences."""
    tokens = int(index.lengths[: 1 << 16].mean()) + SPECIAL_TOKENS
    budget = max(sequences_per_block * tokens, int(index.lengths[0]) + SPECIAL_TOKENS)
    settings = {**vars(config_of(width)), "token_budget": budget}
    return make_plan(index, ModelConfig(**settings), device_type="cpu")


# --- what is measured ---


def proteins(_: Path) -> dict[str, float]:
    found = real_proteins()
    lengths = np.array([len(residues) for _, residues in found])
    return {
        "proteins": len(found),
        "residues_mean": float(lengths.mean()),
        "tokens_mean": float(np.minimum(lengths, DEFAULT_MAX_RESIDUES).mean()) + SPECIAL_TOKENS,
        "id_bytes_mean": statistics.mean(len(header.partition(b" ")[0]) for header, _ in found),
        "header_bytes_mean": statistics.mean(len(header) for header, _ in found),
    }


def _indexing(fasta: Path, count: int, folder: Path) -> dict[str, float]:
    path, before = folder / "measured.index", peak_from_here()
    with Clock() as clock:
        index = SequenceIndex.build([fasta], path, unpack_dir=folder)
    assert len(index) == count
    return {
        "records": count,
        "fasta_bytes": fasta.stat().st_size,
        "wall_s": clock.wall_s,
        "cpu_s": clock.cpu_s,
        "peak_bytes_per_record": (peak_bytes_so_far() - before) / count,
        "index_bytes_per_record": (path.stat().st_size - index.id_bytes) / count,
        "index_id_bytes_per_record": index.id_bytes / count,
    }


def index_100_000(folder: Path) -> dict[str, float]:
    return _indexing(write_proteins(folder / "proteins_5.fasta", 10**5), 10**5, folder)


def index_1_000_000(folder: Path) -> dict[str, float]:
    return _indexing(write_proteins(folder / "proteins_6.fasta", 10**6), 10**6, folder)


def index_1_000_000_short(folder: Path) -> dict[str, float]:
    short_index(folder, 10**6)
    return _indexing(folder / "short_1000000.fasta", 10**6, folder)


def _planning(folder: Path, count: int) -> dict[str, float]:
    path = made_up_index(folder, count).path
    config = ModelConfig(**{**vars(config_of(WIDE)), "token_budget": BLOCK_TOKENS})
    before = peak_from_here()
    with Clock() as clock:
        plan = make_plan(SequenceIndex.open(path), config, device_type="cpu")
    assert len(plan.positions) == count
    held = sum(array.nbytes for array in (plan.positions, plan.starts, plan.tokens))
    return {
        "records": count,
        "blocks": len(plan),
        "wall_s": clock.wall_s,
        "cpu_s": clock.cpu_s,
        "peak_bytes_per_record": (peak_bytes_so_far() - before) / count,
        "held_bytes_per_record": held / count,
    }


def plan_100_000(folder: Path) -> dict[str, float]:
    return _planning(folder, 10**5)


def plan_1_000_000(folder: Path) -> dict[str, float]:
    return _planning(folder, 10**6)


def plan_10_000_000(folder: Path) -> dict[str, float]:
    return _planning(folder, 10**7)


def _embedding(folder: Path, model: str, count: int) -> dict[str, float]:
    fasta, out = write_proteins(folder / f"proteins_{count}.fasta", count), folder / "embedding"
    command = [sys.executable, "-m", "virnucpro", "embed", str(fasta), "-o", str(out), "--model", model, "--json"]
    command += ["--devices", "cpu", "--workers", "1", "--restart"]
    done = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    (rank,) = done["ranks"]
    return {
        "sequences": count,
        "tokens_per_second": rank["tokens"] / rank["compute_s"],
        "start_s": done["stages_s"]["embed"] - rank["compute_s"],
    }


def embedding_bundled(folder: Path) -> dict[str, float]:
    return _embedding(folder, DEFAULT_PROTEIN_MODEL, 300)


def embedding_8M(folder: Path) -> dict[str, float]:  # noqa: N802  as the model is called
    return _embedding(folder, str(SHARED / "weights" / "esm2_t6_8M_hemopi2ft.pt"), 60)


def part(folder: Path) -> dict[str, float]:
    rows = vectors_of(np.arange(SEQUENCES_PER_PART), WIDE)
    names = [f"k141_{row}_chunk_{row}F1" for row in range(SEQUENCES_PER_PART)]
    block = BlockRows(0, np.arange(SEQUENCES_PER_PART), names, rows)
    parts = folder / "measured_parts"
    parts.mkdir(exist_ok=True)
    wall_s, cpu_s = [], []
    for _ in range(8):
        with Clock() as clock:
            path = write_part(parts, [block], plan_fingerprint="f")
        wall_s.append(clock.wall_s)
        cpu_s.append(clock.cpu_s)
    megabytes = path.stat().st_size / 1e6
    return {
        "rows": SEQUENCES_PER_PART,
        "file_bytes_per_row": path.stat().st_size / SEQUENCES_PER_PART,
        "mb_per_second": megabytes / statistics.median(wall_s),
        "mb_per_cpu_second": megabytes / statistics.median(cpu_s),
    }


def _laid_down(folder: Path, index: SequenceIndex, width: int) -> tuple[RunLayout, BlockPlan]:
    """Make the parts of a run whose every block is finished."""
    layout, plan = RunLayout(folder), plan_of(index, width)
    waiting: list[BlockRows] = []
    for block in range(len(plan)):
        positions = plan.block_positions(block)
        rows = vectors_of(index.input_rows[positions], width)
        waiting.append(BlockRows(block, positions, index.sequence_ids(positions), rows))
        if block + 1 == len(plan) or sum(len(item.positions) for item in waiting) >= SEQUENCES_PER_PART:
            write_part(layout.parts_dir, waiting, plan_fingerprint=plan.fingerprint)
            waiting = []
    return layout, plan


def _result(folder: Path, count: int, width: int) -> dict[str, float]:
    """Check the parts, write the result from them in both forms, validate each."""
    index = short_index(folder, count)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        layout, plan = _laid_down(Path(name), index, width)
        found: dict[str, float] = {"rows": count, "row_bytes": 4 * width}
        os.sync()
        parts = part_paths(layout.parts_dir)
        with Clock() as clock:
            for path in parts:
                SealedBlocks.open(path).check()
        found |= {"check_wall_s": clock.wall_s, "check_cpu_s": clock.cpu_s}
        found |= {"scattered_row_ms": _scattered(parts)}
        for form in (ResultForm.SHARDED, ResultForm.SINGLE):
            index.release_pages()
            before = peak_from_here()
            with Clock() as clock:
                result = aggregate_shards(layout, index, plan, max_residues=1022, hidden_dim=width, result_form=form)
            grown = peak_bytes_so_far() - before
            found |= {f"{form}_wall_s": clock.wall_s, f"{form}_cpu_s": clock.cpu_s}
            found |= {f"{form}_peak_bytes_per_row": grown / count} if form is ResultForm.SHARDED else {}
            with Clock() as clock:
                validate_result(result.output_path, index, expected_rows=count, expected_files=result.files)
            found |= {f"{form}_validate_wall_s": clock.wall_s, f"{form}_validate_cpu_s": clock.cpu_s}
    return found


def _scattered(parts: list[Path]) -> float:
    """Read rows from all over parts that are not in memory, as the result's writer does; milliseconds a row."""
    wall_s, rows = 0.0, 0
    for path in parts[:10]:
        source = SealedBlocks.open(path)
        count = min(100, len(source.positions))
        numbers = np.sort(np.random.default_rng(3).choice(len(source.positions), size=count, replace=False))
        _forget(path)
        with Clock() as clock:
            assert sum(len(some) for _, some in source.iter_rows_at(numbers)) == count
        wall_s, rows = wall_s + clock.wall_s, rows + count
    return 1000 * wall_s / rows


def result_wide(folder: Path) -> dict[str, float]:
    return _result(folder, 60_000, WIDE)


def result_narrow(folder: Path) -> dict[str, float]:
    return _result(folder, 10**6, NARROW)


def _looking(folder: Path, parts: int) -> dict[str, float]:
    """Look for the blocks of a unit in a folder with so many parts of other units, as its worker does first."""
    index = short_index(folder, 1000)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        layout, plan = RunLayout(Path(name)), plan_of(index, sequences_per_block=16)
        durable.make_folder(layout.parts_dir)
        for number in range(parts):
            (layout.parts_dir / f"part_{1000 + number:09d}_{number:012x}.h5").touch()
        worker = UnitWorker(SimpleNamespace(layout=layout), 0, RunLimits())
        worker._plan = plan  # noqa: SLF001
        unit, cpu_s = Unit(blocks=range(32)), []
        for _ in range(10):
            with Clock() as clock:
                assert worker._not_durable(unit) == list(unit.blocks)  # noqa: SLF001
            cpu_s.append(clock.cpu_s)
    return {"parts": parts, "look_ms": 1000 * statistics.median(cpu_s)}


def looking_1_000(folder: Path) -> dict[str, float]:
    return _looking(folder, 1000)


def looking_10_000(folder: Path) -> dict[str, float]:
    return _looking(folder, 10_000)


def looking_50_000(folder: Path) -> dict[str, float]:
    return _looking(folder, 50_000)


def _items(engine: Engine) -> float:
    """Return the driver's processor milliseconds to have one of 500 items done by a cluster, as units are."""
    items = range(500)
    engine.map(_nothing, items[:4])
    with Clock() as clock:
        assert engine.map(_nothing, items) == list(items)
    return 1000 * clock.cpu_s / len(items)


def _nothing(item: int) -> int:
    return item


def engine_ray(_: Path) -> dict[str, float]:
    """Have items done, and four actors asked for messages every second, by a cluster of Ray of this process."""
    with ray_engine("", workers=4, on_cpus=True) as engine:
        found = {"item_ms": _items(engine)}
        with engine.unit_workers(None, RunLimits()) as workers:  # they get no unit
            while len(workers._alive) < engine.slots:  # noqa: SLF001
                workers.look(0.5)
            with Clock() as clock:
                while clock.so_far_s < 20:
                    workers.look(0.5)
        return {**found, "messages_ms": 1000 * clock.cpu_s / clock.wall_s / engine.slots}


def engine_dask(folder: Path) -> dict[str, float]:
    """Have items done, and take in events of messages, from a scheduler and two workers of Dask."""
    with _dask_scheduler(folder) as address, dask_engine(address, workers=2, on_cpus=True) as engine:
        found = {"item_ms": _items(engine)}
        events: list[Any] = []
        engine.client.subscribe_topic("messages", events.append)
        with Clock() as clock:
            engine.client.run(_events, 500, on_error="raise")
            while len(events) < 1000:
                time.sleep(0.1)
        engine.client.unsubscribe_topic("messages")
        return {**found, "messages_ms": 1000 * clock.cpu_s / len(events)}


def _events(count: int, dask_worker: Any) -> None:
    for number in range(count):
        dask_worker.log_event("messages", list(_messages(0, range(number, number + 3))))


@contextmanager
def _dask_scheduler(folder: Path) -> Iterator[str]:
    """Start a scheduler of Dask with two workers; yield its HOST:PORT."""
    port = _free_port()
    scheduler = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", str(port)]
    worker = [sys.executable, "-m", "distributed.cli.dask_worker", f"tcp://127.0.0.1:{port}", "--no-nanny"]
    worker += ["--nthreads", "1", "--local-directory", str(folder), "--no-dashboard"]
    with (
        _while_it_runs([*scheduler, "--no-dashboard"], folder / "scheduler.log"),
        _while_it_runs(worker, folder / "worker-0.log"),
        _while_it_runs(worker, folder / "worker-1.log"),
    ):
        yield f"127.0.0.1:{port}"


@contextmanager
def _while_it_runs(command: list[str], log: Path) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def prefect(_: Path) -> dict[str, float]:
    """Run tasks that do nothing, of an embedded server."""
    from prefect import flow, task  # noqa: PLC0415  seconds
    from prefect.futures import wait  # noqa: PLC0415
    from prefect.task_runners import ThreadPoolTaskRunner  # noqa: PLC0415

    @task(persist_result=False)
    def nothing(number: int) -> int:
        return number

    @flow(task_runner=ThreadPoolTaskRunner(max_workers=8), persist_result=False)
    def some(number: int) -> float:
        with Clock() as clock:
            wait([nothing.submit(each) for each in range(number)])
        return clock.wall_s

    with Clock() as clock:
        first_s = some(1)
    return {"start_s": clock.wall_s - first_s, "task_ms": 1000 * some(200) / 200}


def _messages(rank: int, blocks: range) -> Iterator[dict[str, Any]]:
    """Yield what the worker of a rank says of some blocks."""
    yield {"rank": rank, "assigned": None}
    for block in blocks:
        progress = {"kind": "progress", "block": block, "rows": SEQUENCES_PER_BLOCK, "sequences": 160}
        counted = {"tokens": 65_000, "batch_tokens": 65_000, "seconds": 0.81, "oom_splits": 0}
        yield {"rank": rank, "message": {"kind": "start", "block": block}}
        yield {"rank": rank, "message": {**progress, **counted}}
    runs = [[blocks[0], blocks[-1], 1]]
    yield {"rank": rank, "message": {"kind": "durable", "bytes": 42_000_000, "cached": 0, "runs": runs}}


def messages(folder: Path) -> dict[str, float]:
    """Take in the messages of 1,000 workers about 20,000 blocks."""
    ranks, each = 1000, 20
    count = ranks * each
    facts = WorkFacts(
        run_id="r",
        host="",
        model="m",
        precision="bf16",
        token_budget=65_536,
        devices=tuple((f"task-{number}", str(number)) for number in range(ranks)),
        layout=RunLayout(folder),
        block_tokens=np.full(count, 65_536),
        block_rows=np.full(count, SEQUENCES_PER_BLOCK),
        rows_of=lambda positions: np.ones(len(positions), np.int64),
        records=count * SEQUENCES_PER_BLOCK,
        copies=0,
        skipped=0,
    )
    telemetry = WorkTelemetry(facts)
    entries = [entry for rank in range(ranks) for entry in _messages(rank, range(rank * each, (rank + 1) * each))]
    with Clock() as clock:
        for entry in entries:
            telemetry.apply_entry(entry)
    return {"message_us": 1e6 * clock.cpu_s / len(entries)}


def files(folder: Path) -> dict[str, float]:
    """The disk under the folder: durable writes, reads that the cache does not help, small files."""
    path, num_bytes = folder / "measured.bin", 1 << 30
    piece = np.random.default_rng(1).bytes(1 << 24)
    with Clock() as writing, path.open("wb") as file:
        for _ in range(num_bytes >> 24):
            file.write(piece)
        os.fsync(file.fileno())
    _forget(path)
    with Clock() as reading, path.open("rb", buffering=0) as file:
        while file.read(1 << 24):
            pass
    _forget(path)
    places = np.random.default_rng(2).integers(0, num_bytes // ROW_BYTES, size=1000) * ROW_BYTES
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    with Clock() as scattered:
        for place in places.tolist():
            os.pread(descriptor, ROW_BYTES, place)
    os.close(descriptor)
    path.unlink()
    os.sync()
    small = folder / "small"
    small.mkdir(exist_ok=True)
    with Clock() as making:
        for number in range(2000):
            (small / str(number)).write_bytes(b"x")
    with Clock() as removing:
        for number in range(2000):
            (small / str(number)).unlink()
    return {
        "write_mb_per_second": num_bytes / 1e6 / writing.wall_s,
        "read_mb_per_second": num_bytes / 1e6 / reading.wall_s,
        "scattered_row_ms": 1000 * scattered.wall_s / len(places),
        "create_us": 1e6 * making.wall_s / 2000,
        "remove_us": 1e6 * removing.wall_s / 2000,
    }


def _forget(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


MEASUREMENTS: dict[str, Callable[[Path], dict[str, float]]] = {
    function.__name__: function
    for function in (
        proteins,
        index_100_000,
        index_1_000_000,
        index_1_000_000_short,
        plan_100_000,
        plan_1_000_000,
        plan_10_000_000,
        embedding_bundled,
        embedding_8M,
        part,
        result_wide,
        result_narrow,
        looking_1_000,
        looking_10_000,
        looking_50_000,
        prefect,
        engine_ray,
        engine_dask,
        messages,
        files,
    )
}


def measure(name: str, rounds: int, folder: Path) -> dict[str, dict[str, float]]:
    """Run a measurement in *rounds* processes of its own; return the spread of every figure."""
    environment = {**os.environ, "PREFECT_HOME": str(folder / "prefect"), "PREFECT_LOGGING_LEVEL": "ERROR"}
    environment |= {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180"}
    environment.pop("PREFECT_API_URL", None)
    figures: dict[str, list[float]] = {}
    for _ in range(rounds):
        command = [sys.executable, __file__, "--child", name, str(folder)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
        for what, value in json.loads(done.stdout.splitlines()[-1]).items():
            figures.setdefault(what, []).append(value)
    found = {what: spread(values, 6) for what, values in figures.items()}
    shown = ", ".join(f"{what} {value['median']:,.6g}" for what, value in found.items())
    print(f"{name}: {shown}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(MEASUREMENTS))
    parser.add_argument("--folder", type=Path, help="where the files go while it runs; by default the system's choice")
    parser.add_argument("--write", action="store_true", help="keep the result in benchmarks/results")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(40), logger_factory=structlog.PrintLoggerFactory(sys.stderr)
    )
    if options.child:
        name, folder = options.child
        print(json.dumps(MEASUREMENTS[name](Path(folder))))
        return
    packages = ("virnucpro", "torch", "numpy", "h5py", "prefect", "ray", "distributed")
    report: dict[str, Any] = {"machine": machine(*packages), "rounds": options.rounds, "rates": {}}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        for which in options.only:
            report["rates"][which] = measure(which, options.rounds, Path(name))
            if options.write:
                keep(report)
    print(json.dumps(report, indent=2))


def keep(report: dict[str, Any]) -> None:
    """Write the results into today's file."""
    path = RESULTS / f"scale_rates_{datetime.now(UTC).date()}.json"
    today = json.loads(path.read_text())["rates"] if path.exists() else {}
    write_result("scale_rates", {**report, "rates": {**today, **report["rates"]}})


if __name__ == "__main__":
    main()
