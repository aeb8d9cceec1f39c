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
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import structlog
from bench_common import EXAMPLES, RESULTS, machine, spread, write_result
from sharded_output import config_of, make_fasta, vectors_of
from sharded_output import peak_bytes as peak_bytes_so_far

from virnucpro import durable
from virnucpro.choices import DEFAULT_MAX_RESIDUES, DEFAULT_PROTEIN_MODEL, SPECIAL_TOKENS, ResultForm
from virnucpro.config import ModelConfig
from virnucpro.data.index.file import write_index
from virnucpro.data.packing import BlockPlan, make_plan
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.pipeline.blocks.finished_blocks import seal_shard
from virnucpro.pipeline.shard_aggregator import aggregate_shards, validate_result
from virnucpro.pipeline.work import unit_claims
from virnucpro.pipeline.work.unit_claims import UnitClaims, UnitSource, numbers_in, write_units
from virnucpro.pipeline.work.worker_messages import MessageReader
from virnucpro.run_layout import RunLayout, UnitsLayout
from virnucpro.store.parts import BlockRows, SealedBlocks, write_part
from virnucpro.telemetry.embedding_telemetry import EmbeddingTelemetry
from virnucpro.telemetry.snapshot import EmbeddingFacts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
    """Seal the parts into a shard, write the result in both forms, validate each."""
    index = short_index(folder, count)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        layout, plan = _laid_down(Path(name), index, width)
        found: dict[str, float] = {"rows": count, "row_bytes": 4 * width}
        os.sync()
        with Clock() as clock:
            seal_shard(0, range(len(plan)), plan, layout, hidden_dim=width)
        found |= {"seal_wall_s": clock.wall_s, "seal_cpu_s": clock.cpu_s}
        found |= {"scattered_row_ms": _scattered(layout.shard(0))}
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


def _scattered(shard: Path) -> float:
    """Read 1,000 rows from all over a shard that is not in memory, as the result's writer does; milliseconds a row."""
    source = SealedBlocks.open(shard)
    numbers = np.sort(np.random.default_rng(3).choice(len(source.positions), size=1000, replace=False))
    _forget(shard)
    with Clock() as clock:
        assert sum(len(rows) for _, rows in source.iter_rows_at(numbers)) == len(numbers)
    return 1000 * clock.wall_s / len(numbers)


def result_wide(folder: Path) -> dict[str, float]:
    return _result(folder, 60_000, WIDE)


def result_narrow(folder: Path) -> dict[str, float]:
    return _result(folder, 10**6, NARROW)


def _claims(folder: Path, units: int) -> dict[str, float]:
    """Claim and finish units of a folder of which one half is done, and count what it holds."""
    devices = 4
    with tempfile.TemporaryDirectory(dir=folder) as name:
        where = Path(name)
        plan = write_units(
            where,
            run_id="r",
            plan_fingerprint="f",
            blocks=range(32 * units),
            tokens=np.full(32 * units, 1, np.int64),
            devices=devices,
        )
        units_json = {**vars(plan), "units": [[[32 * unit, 32 * unit + 32]] for unit in range(units)]}
        durable.write_bytes(UnitsLayout(where).plan, json.dumps(units_json).encode())
        claims = UnitClaims(UnitSource(where, "a"))
        for unit in range(units // 2):  # as claiming and settling do, without looking at the folder each time
            claims._claim(unit)  # noqa: SLF001
            claims._put(UnitsLayout(where).done_dir, unit)  # noqa: SLF001
        other = UnitClaims(UnitSource(where, "b"))
        take_s, settle_s = [], []
        for _ in range(30):
            with Clock() as clock:
                unit = other.take()
            take_s.append(clock.cpu_s)
            assert unit is not None
            with Clock() as clock:
                other.mark_durable(unit.blocks)
            settle_s.append(clock.cpu_s)
        with Clock() as clock:
            numbers_in(UnitsLayout(where).done_dir, refresh=True)
    return {
        "units": units,
        "take_ms": 1000 * statistics.median(take_s),
        "settle_ms": 1000 * statistics.median(settle_s),
        "count_done_ms": 1000 * clock.cpu_s,
    }


def claims_1_000(folder: Path) -> dict[str, float]:
    return _claims(folder, 1000)


def claims_10_000(folder: Path) -> dict[str, float]:
    return _claims(folder, 10_000)


def claims_30_000(folder: Path) -> dict[str, float]:
    """As many as 1,000 GPUs have."""
    return _claims(folder, 30_000)


class _CountingClaims(UnitClaims):
    """Claims that count the attempts that another owner won."""

    lost = 0

    def _claim(self, unit: int) -> bool:
        is_ours = super()._claim(unit)
        self.lost += not is_ours
        return is_ours


def _start(folder: Path, owners: int) -> dict[str, float]:
    """Let that many owners take their first unit when all have seen every unit free, as over a slow network."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        tokens = np.full(1000 * owners, 1, np.int64)
        write_units(
            Path(name), run_id="r", plan_fingerprint="f", blocks=range(len(tokens)), tokens=tokens, devices=owners
        )
        everybody = [_CountingClaims(UnitSource(Path(name), f"owner-{number}")) for number in range(owners)]
        unit_claims.numbers_in = lambda *_, **__: set()
        with Clock() as clock:
            assert all(one.take() for one in everybody)
    return {"owners": owners, "lost_tries_each": sum(one.lost for one in everybody) / owners, "wall_s": clock.wall_s}


def start_of_64(folder: Path) -> dict[str, float]:
    return _start(folder, 64)


def start_of_256(folder: Path) -> dict[str, float]:
    return _start(folder, 256)


def sealing_among_others(folder: Path) -> dict[str, float]:
    """Seal 20 parts in a folder with more and more parts of other ranks."""
    index = short_index(folder, 100_000)
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=folder) as name:
        layout, plan = RunLayout(Path(name)), plan_of(index, 8, sequences_per_block=16)
        blocks = iter(range(len(plan)))
        mine = list(islice(blocks, 20))

        def write(numbers: Iterator[int] | list[int]) -> None:
            for block in numbers:
                positions = plan.block_positions(block)
                rows = BlockRows(block, positions, index.sequence_ids(positions), vectors_of(positions, 8))
                write_part(layout.parts_dir, [rows], plan_fingerprint=plan.fingerprint)

        there = 0
        for others in (100, 1000, 4000):
            write(islice(blocks, others - there))
            there = others
            write(mine)
            layout.shard(0).unlink(missing_ok=True)
            with Clock() as clock:
                seal_shard(0, frozenset(mine), plan, layout, hidden_dim=8)
            found[f"seal_ms_among_{others}"] = 1000 * clock.cpu_s
    return found


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


def following(folder: Path) -> dict[str, float]:
    """Read the messages of 1,000 owners about 20,000 blocks, then poll again without new ones."""
    owners, each = 1000, 20
    count = owners * each
    with tempfile.TemporaryDirectory(dir=folder) as name:
        facts = EmbeddingFacts(
            run_id="r",
            model="m",
            precision="bf16",
            token_budget=65_536,
            devices=tuple((f"task-{number}", str(number)) for number in range(owners)),
            layout=RunLayout(Path(name)),
            block_tokens=np.full(count, 65_536),
            block_rows=np.full(count, SEQUENCES_PER_BLOCK),
            rows_of=lambda positions: np.ones(len(positions), np.int64),
            records=count * SEQUENCES_PER_BLOCK,
            copies=0,
            skipped=0,
        )
        said = Path(name) / "said"
        said.mkdir()
        words = 0
        for rank in range(owners):
            lines: list[dict[str, Any]] = [{"rank": rank, "assigned": None}]
            for block in range(rank * each, (rank + 1) * each):
                progress = {"kind": "progress", "block": block, "rows": SEQUENCES_PER_BLOCK, "sequences": 160}
                counted = {"tokens": 65_000, "batch_tokens": 65_000, "seconds": 0.81, "oom_splits": 0}
                lines += [
                    {"rank": rank, "said": {"kind": "start", "block": block}},
                    {"rank": rank, "said": {**progress, **counted}},
                ]
            runs = [[rank * each, rank * each + each - 1, 1]]
            lines.append({"rank": rank, "said": {"kind": "durable", "bytes": 42_000_000, "cached": 0, "runs": runs}})
            words += len(lines)
            (said / f"host.{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        reader = MessageReader(said, EmbeddingTelemetry(facts))
        with Clock() as hearing:
            reader.read_on()
        with Clock() as looking:
            reader.read_on()
    return {"word_us": 1e6 * hearing.cpu_s / words, "look_us_per_owner": 1e6 * looking.cpu_s / owners}


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
        claims_1_000,
        claims_10_000,
        claims_30_000,
        start_of_64,
        start_of_256,
        sealing_among_others,
        prefect,
        following,
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
    packages = ("virnucpro", "torch", "numpy", "h5py", "prefect")
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
