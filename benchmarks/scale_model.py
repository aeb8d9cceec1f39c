"""
How a run grows: from measured rates to the seconds, bytes, files and memory of any number of sequences and GPUs.

``scale_page.py`` makes tables and plots of it for ``docs/scale.md``. Everything that was not measured, GPUs and the
shared file system first of all, is in ``Assumptions`` and nowhere else; what was measured is ``Rates``, the newest
``benchmarks/results/scale_rates_*.json`` (made by ``scale_rates.py``).

A run is a row of stages, one after the other. The driver alone does ``index`` and ``plan``, and writes a single
file; all GPUs' workers do ``start``, ``embed`` and ``seal`` at the same time. The shards of a large result are
checked, written and validated by as many tasks as there are GPUs: of that, what was measured a row is counted as the
driver's, which is more than it has. Each stage takes the processor seconds that were measured, and the bytes and
operations that the code moves, at the file system's rates.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
SEQUENCES = (10**6, 10**8, 10**10)
GPUS = (1, 8, 32, 100, 1000)
SERIAL = ("index", "plan")
"""Stages of the driver alone, whatever the result."""
SEQUENCES_PER_PART = 4096
PLANS_OF_DRIVER = 5
"""Times that the driver makes the plan: preparing, telemetry, units, result, manifest."""
PIECES_OF_A_SHARE, MOST_UNITS_OF_A_SHARE = 8, 128
"""As in ``pipeline/unit_claims.py``."""
UNITS_PER_GPU = 30
"""What ``cut_units`` makes of a large run."""
SHARD_BYTES, SHARD_ROWS = 1 << 30, 1 << 20
"""As in ``store/results/hdf5.py``."""
READ_TO_SEAL, WRITTEN_TO_SEAL = 5, 1
"""Times that a rank's rows go by when it seals: sums and numbers of its parts, the copy; sums and numbers of it."""
READ_TO_AGGREGATE, WRITTEN_TO_AGGREGATE = 3, 1
"""Sums and numbers of every shard, the sums of the result; the rows themselves are read one by one."""
READ_TO_VALIDATE = 2
OPENS_PER_GPU_S = 4
"""Files opened a second for every GPU while it embeds: the driver's heartbeat (twice), a worker's messages, written
and read."""
LISTINGS_PER_LOOK = 2
"""Folders, of claims and of done units, that an idle worker lists at every poll."""
UNITS_LOOKED_AT_A_SECOND, MOST_LOOK_INTERVAL_S = 5000, 10.0
"""As in ``pipeline/unit_claims.py``: seconds between two polls."""


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What was not measured."""

    model: str = "ESM-2 3B"
    """Model."""
    row_numbers: int = 2560
    """Numbers in a row."""
    weights_bytes: float = 11.4e9
    """Bytes of the checkpoint, float32."""
    gpu_tokens_per_second: float = 79_000
    """Tokens per second of one GPU."""
    block_tokens: int = 65_536
    """Tokens of a block."""
    gpus_per_host: int = 4
    """GPUs that share one host's connection."""
    client_bytes_per_second: float = 2e9
    """Bytes per second between the file system and one host."""
    shared_bytes_per_second: float = 50e9
    """Bytes per second of the file system, all hosts together."""
    scattered_read_s: float = 0.0005
    """Seconds until one row from somewhere in a large file is there."""
    reads_at_once: float = 16
    """Such reads that the file system does at the same time, of the 64 that are announced ahead."""
    operation_s: float = 0.0005
    """Seconds of one operation on a name (open, link, remove)."""
    names_per_second: float = 1e6
    """Names per second that the file system lists, all hosts together."""
    driver_memory_bytes: float = 256e9
    """Memory of the driver's host; files that fit are read once."""


GPU_RATES = {
    "16,474: published, one RTX 4090": 16_474.0,
    "79,000: the same share of an H200's peak (assumed here)": 79_000.0,
    "138,000: an H200's arithmetic peak": 138_000.0,
}
"""Tokens per second of ESM-2 3B, none of them measured by us: a published program (57 % of that card's fp16 peak), 57 %
of the third, and 790 TFLOP/s of dense bf16 over the operations of the model at 166 residues."""
SMALLER = {"model": "ESM-2 650M", "row_numbers": 1280, "weights_bytes": 2.6e9, "gpu_tokens_per_second": 340_000.0}
"""57 % of 596,000, the peak of an H200 by the same calculation."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What was measured; seconds are those of one processor."""

    tokens: float
    """Tokens of a sequence, truncated to 1,022 residues."""
    record_bytes: float
    """Bytes of a sequence in the FASTA file."""
    id_bytes: float
    index_s: tuple[float, float]
    """Seconds a record, and a byte of the input."""
    index_memory_bytes: float
    """Peak, a record."""
    index_file_bytes: float
    """A record, its id left out."""
    plan_s: float
    """A record."""
    plan_memory_bytes: float
    """Peak, a record."""
    plan_held_bytes: float
    """A record, as long as the worker lives."""
    part_s: float
    """A byte."""
    part_overhead: float
    """Bytes of a part over those of its numbers."""
    seal_s: tuple[float, float]
    """Seconds a row, and a byte of its numbers; so the next three."""
    sharded_s: tuple[float, float]
    single_s: tuple[float, float]
    validate_s: tuple[float, float]
    result_memory_bytes: float
    """Peak, a row."""
    take_s: tuple[float, float]
    """Seconds to claim a unit, and for each unit of the run."""
    task_s: float
    """Prefect's, a task."""
    start_s: float
    """From a task to a worker with a small model in memory."""
    word_s: float
    """For the driver to read one message of a worker."""
    look_s: float
    """For the driver to look, a worker."""

    @classmethod
    def of(cls, report: dict[str, Any]) -> Rates:
        """Take the medians of a result of ``scale_rates.py``."""
        found = {
            name: {what: value["median"] for what, value in each.items()} for name, each in report["rates"].items()
        }
        long, short = found["index_1_000_000"], found["index_1_000_000_short"]
        wide, narrow, plan = found["result_wide"], found["result_narrow"], found["plan_10_000_000"]
        few_units, all_units = found["claims_1_000"], found["claims_30_000"]

        def of_result(what: str) -> tuple[float, float]:
            measured = ((each[what], each["rows"], each["rows"] * each["row_bytes"]) for each in (wide, narrow))
            return _per_row_and_byte(*measured)

        indexing = ((each["cpu_s"], each["records"], each["fasta_bytes"]) for each in (long, short))
        per_unit = (all_units["take_ms"] - few_units["take_ms"]) / (all_units["units"] - few_units["units"]) / 1000
        return cls(
            tokens=found["proteins"]["tokens_mean"],
            record_bytes=long["fasta_bytes"] / long["records"],
            id_bytes=long["index_id_bytes_per_record"],
            index_s=_per_row_and_byte(*indexing),
            index_memory_bytes=long["peak_bytes_per_record"],
            index_file_bytes=long["index_bytes_per_record"],
            plan_s=plan["cpu_s"] / plan["records"],
            plan_memory_bytes=plan["peak_bytes_per_record"],
            plan_held_bytes=plan["held_bytes_per_record"],
            part_s=1 / (1e6 * found["part"]["mb_per_cpu_second"]),
            part_overhead=found["part"]["file_bytes_per_row"] / (4 * 2560),
            seal_s=of_result("seal_cpu_s"),
            sharded_s=of_result("sharded_cpu_s"),
            single_s=of_result("single_cpu_s"),
            validate_s=of_result("sharded_validate_cpu_s"),
            result_memory_bytes=narrow["sharded_peak_bytes_per_row"],
            take_s=(few_units["take_ms"] / 1000, per_unit),
            task_s=found["prefect"]["task_ms"] / 1000,
            start_s=found["embedding_8M"]["start_s"],
            word_s=found["following"]["word_us"] / 1e6,
            look_s=found["following"]["look_us_per_owner"] / 1e6,
        )


def medians(report: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the median of every figure of a result of ``scale_rates.py``."""
    return {name: {what: value["median"] for what, value in each.items()} for name, each in report["rates"].items()}


def latest() -> dict[str, Any]:
    """Return the newest result of ``scale_rates.py``."""
    report: dict[str, Any] = json.loads(max(RESULTS.glob("scale_rates_[0-9]*.json")).read_text())
    return report


def _per_row_and_byte(one: tuple[float, float, float], other: tuple[float, float, float]) -> tuple[float, float]:
    """Return seconds a row and a byte from (seconds, rows, bytes) of two measurements."""
    (s, rows, size), (other_s, other_rows, other_size) = one, other
    determinant = rows * other_size - other_rows * size
    per_row = (s * other_size - other_s * size) / determinant
    per_byte = (rows * other_s - other_rows * s) / determinant
    return max(0.0, per_row), max(0.0, per_byte)


@dataclass(frozen=True, kw_only=True)
class Design:
    """Which of the proposed changes are made."""

    no_sealing: bool = False
    """The result is written from parts; no shard of a rank comes between."""
    index_by_hosts: bool = False
    """Hosts index pieces of the input, and the plan is a mapped file of block boundaries, not made."""
    claims_in_small_folders: bool = False
    """A worker that claims a unit lists one folder of 1,000 units instead of all."""


AS_IT_IS = Design()
CHANGES = {
    "as it is": AS_IT_IS,
    "1. the result from the parts, without sealing first": Design(no_sealing=True),
    "2. and index the input in pieces; the plan is mapped": Design(no_sealing=True, index_by_hosts=True),
    "3. and claims lie in folders of 1,000 units": Design(
        no_sealing=True, index_by_hosts=True, claims_in_small_folders=True
    ),
}
"""Proposed changes, in this order; each includes those before it."""


@dataclass(frozen=True)
class Run:
    """One run: how many sequences on how many GPUs."""

    sequences: int
    gpus: int
    rates: Rates
    assumed: Assumptions = Assumptions()
    design: Design = AS_IT_IS

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return 4 * self.assumed.row_numbers

    @property
    def rows_bytes(self) -> float:
        """Bytes of all rows."""
        return float(self.sequences * self.row_bytes)

    @property
    def computing_s(self) -> float:
        """Seconds in which the GPUs compute: what would be left if nothing else took time."""
        return self.sequences * self.rates.tokens / self.gpus / self.assumed.gpu_tokens_per_second

    @property
    def units(self) -> int:
        """Units of the work."""
        blocks = round(self.sequences * self.rates.tokens / self.assumed.block_tokens)
        return max(1, min(UNITS_PER_GPU * self.gpus, blocks))

    def moved_s(self, num_bytes: float, hosts: float = 1.0) -> float:
        """Return the seconds that *num_bytes*, of all hosts together, take over the network."""
        return num_bytes / min(hosts * self.assumed.client_bytes_per_second, self.assumed.shared_bytes_per_second)

    @property
    def hosts(self) -> float:
        """Hosts, by which the workers reach the file system."""
        return max(1.0, self.gpus / self.assumed.gpus_per_host)

    def stages_s(self) -> dict[str, float]:
        """Return the seconds of each stage, in their order."""
        return {
            "index": self._index_s(),
            "plan": self._plan_s(),
            "start": self._start_s(),
            "embed": self._embed_s(),
            "seal": self._seal_s(),
            "aggregate": self._aggregate_s(),
            "validate": self._validate_s(),
        }

    def total_s(self) -> float:
        """Return the seconds from start to end."""
        return sum(self.stages_s().values())

    def longest(self) -> str:
        """Return the stage that takes the most time."""
        stages = self.stages_s()
        return max(stages, key=lambda name: stages[name])

    def efficiency(self) -> float:
        """Return the share of the time in which the GPUs compute."""
        return self.computing_s / self.total_s()

    def idle_gpu_hours(self) -> float:
        """Return the GPU hours that pass while the driver works alone."""
        return self.gpus * self.alone_s() / 3600

    def alone_s(self) -> float:
        """Return the seconds in which the driver works alone."""
        stages = self.stages_s()
        before_s = sum(stages[name] for name in SERIAL)
        if self.is_sharded:
            return before_s + self.sequences * (self.rates.sharded_s[0] + self.rates.validate_s[0])
        return before_s + stages["aggregate"] + stages["validate"]

    def _of(self, rate: tuple[float, float]) -> float:
        """Return the processor seconds of all rows."""
        return self.sequences * (rate[0] + rate[1] * self.row_bytes)

    def _index_s(self) -> float:
        per_record, per_byte = self.rates.index_s
        processor_s = self.sequences * (per_record + per_byte * self.rates.record_bytes)
        num_bytes = self.sequences * (self.rates.record_bytes + self.index_bytes_per_record)
        if self.design.index_by_hosts:
            return processor_s / self.gpus + self.moved_s(num_bytes, self.hosts)
        return processor_s + self.moved_s(num_bytes)

    def _plan_s(self) -> float:
        if self.design.index_by_hosts:
            return 0.0
        return PLANS_OF_DRIVER * self._one_plan_s()

    def _one_plan_s(self) -> float:
        return self.sequences * self.rates.plan_s

    def _start_s(self) -> float:
        weights_s = self.moved_s(self.hosts * self.assumed.weights_bytes, self.hosts)
        columns_s = self.moved_s(self.hosts * 16 * self.sequences, self.hosts)  # lengths and representatives
        plan_s = 0.0 if self.design.index_by_hosts else self._one_plan_s() + columns_s
        return self.gpus * self.rates.task_s + self.rates.start_s + weights_s + plan_s

    def _embed_s(self) -> float:
        """Computing, parts, claims, and the last unit; or as long as the file system takes for the parts."""
        part_bytes = self.rows_bytes * self.rates.part_overhead
        writing_s = part_bytes * self.rates.part_s / self.gpus
        take_s = self.rates.take_s[0] + self.rates.take_s[1] * self.units + 6 * self.assumed.operation_s
        listed_s = self.names_listed() / self.assumed.names_per_second
        claiming_s = max(self.units / self.gpus * take_s, listed_s)
        last_s = self.computing_s / MOST_UNITS_OF_A_SHARE
        own_s = self.computing_s + writing_s + claiming_s + last_s
        return max(own_s, self.moved_s(part_bytes, self.hosts))

    def _seal_s(self) -> float:
        if self.design.no_sealing:
            return 0.0
        moved = (READ_TO_SEAL + WRITTEN_TO_SEAL) * self.rows_bytes * self.rates.part_overhead
        names_s = self.gpus * self.parts / self.assumed.names_per_second
        return self._of(self.rates.seal_s) / self.gpus + self.moved_s(moved, self.hosts) + names_s

    def _aggregate_s(self) -> float:
        moved = (READ_TO_AGGREGATE + WRITTEN_TO_AGGREGATE) * self.rows_bytes
        scattered = 0 if self.rows_bytes < self.assumed.driver_memory_bytes / 2 else self.sequences
        scattered_s = scattered * self.assumed.scattered_read_s / self.assumed.reads_at_once
        if self.is_sharded:
            return self._by_all(self.rates.sharded_s, moved + self.rows_bytes) + scattered_s / self.gpus
        return self._of(self.rates.single_s) + scattered_s + self.moved_s(moved + self.rows_bytes)

    def _validate_s(self) -> float:
        moved = READ_TO_VALIDATE * self.rows_bytes
        if self.is_sharded:
            return self._by_all(self.rates.validate_s, moved)
        return self._of(self.rates.validate_s) + self.moved_s(moved)

    def _by_all(self, rate: tuple[float, float], moved_bytes: float) -> float:
        """Return the seconds of work on shards: what goes by rows is the driver's, what goes by bytes every task's."""
        of_rows_s, of_bytes_s = self._of((rate[0], 0.0)), self._of((0.0, rate[1]))
        return of_rows_s + of_bytes_s / self.gpus + self.moved_s(moved_bytes, self.hosts)

    # --- sizes ---

    @property
    def is_sharded(self) -> bool:
        """Whether ``--result-form auto`` writes shards."""
        return self.sequences >= 5_000_000 or self.rows_bytes >= 32 << 30

    @property
    def index_bytes_per_record(self) -> float:
        """Bytes of a record in the index, its id included."""
        return self.rates.index_file_bytes + self.rates.id_bytes

    @property
    def parts(self) -> int:
        """Most parts in the folder."""
        return -(-self.sequences // SEQUENCES_PER_PART)

    @property
    def result_files(self) -> int:
        """Shards of the result, and their index."""
        rows = min(SHARD_ROWS, SHARD_BYTES // self.row_bytes)
        return -(-self.sequences // rows) + 1 if self.is_sharded else 1

    def disk_bytes(self) -> dict[str, float]:
        """Return the most bytes on the disk, by kind."""
        rows = self.rows_bytes * self.rates.part_overhead
        return {
            "input": self.sequences * self.rates.record_bytes,
            "index": self.sequences * self.index_bytes_per_record,
            "parts": rows,
            "shards of ranks": rows,
            "result": self.rows_bytes + self.sequences * (self.rates.id_bytes + 32),
        }

    def asked_bytes(self) -> float:
        """Return the free space that a run requires before it begins."""
        disk = self.disk_bytes()
        return disk["parts"] + disk["shards of ranks"] + disk["result"]

    def memory_bytes(self) -> dict[str, float]:
        """Return the memory that grows with the number of sequences, by stage; of the last in every worker."""
        return {
            "index (driver)": self.sequences * self.rates.index_memory_bytes,
            "aggregate (driver)": self.sequences * self.rates.result_memory_bytes,
            "plan (every worker)": self.sequences * self.rates.plan_memory_bytes,
        }

    def fits(self) -> bool:
        """Whether the driver's memory and that of a host's workers suffice."""
        memory = self.memory_bytes()
        plans = self.assumed.gpus_per_host * memory["plan (every worker)"]
        return max(*memory.values(), plans) < self.assumed.driver_memory_bytes

    def directory_bytes(self) -> int:
        """Return what opening a result in shards reads: 12 bytes for each bucket of at most 256 ids."""
        return 12 * (1 << max(0, -(-self.sequences // 256) - 1).bit_length())

    def continuing_s(self) -> float:
        """Return the seconds in which the driver checks the rows of a run that resumes, here all but finished."""
        return self._of((0.0, self.rates.validate_s[1])) + self.moved_s(2 * self.rows_bytes)

    def names_listed(self) -> float:
        """Return the names of claims that all workers list while they take units: one half of the units a time."""
        return self.units * (min(self.units, 1000) if self.design.claims_in_small_folders else self.units) / 2

    def names_per_second_at_the_end(self) -> float:
        """Return the names listed a second while one half of the workers waits for the last units."""
        interval_s = min(max(1.0, self.units / UNITS_LOOKED_AT_A_SECOND), MOST_LOOK_INTERVAL_S)
        return self.gpus / 2 * LISTINGS_PER_LOOK * self.units / interval_s

    def opens_per_second(self) -> float:
        """Return the files opened a second while the GPUs compute."""
        return OPENS_PER_GPU_S * self.gpus + 4 * self.parts / max(1.0, self.computing_s)

    def following_share(self) -> float:
        """Return the share of one processor of the driver that reading messages takes."""
        blocks_per_second = self.gpus * self.assumed.gpu_tokens_per_second / self.assumed.block_tokens
        return 2 * blocks_per_second * self.rates.word_s + self.gpus * self.rates.look_s
