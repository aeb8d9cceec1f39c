"""
How a run grows: from measured rates to the seconds, bytes, files and memory of any number of sequences and GPUs.

``scale_page.py`` makes tables and plots of it for ``docs/scale.md``. Everything that was not measured, GPUs and the
shared file system first of all, is in ``Assumptions`` and nowhere else; what was measured is ``Rates``, the newest
``benchmarks/results/scale_rates_*.json`` (made by ``scale_rates.py``).

A run on a cluster is a row of stages, one after the other. The driver alone does ``index`` and ``plan``, and writes a
single file; all GPUs' workers do ``start`` and ``embed`` at the same time, unit by unit, which the driver hands out
through the engine. The parts are checked and the shards of a large result written and validated by as many tasks as
there are GPUs: of that, what was measured a row is counted as the driver's, which is more than it has. Each stage takes
the processor seconds that were measured, and the bytes and operations that the code moves, at the file system's rates.
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
ENGINES = ("ray", "dask")
SEQUENCES_PER_PART = 4096
PLANS_OF_DRIVER = 5
"""Times that the driver makes the plan: preparing, telemetry, units, result, manifest."""
PLANS_OF_WORKER = 3
"""Times that a GPU's worker makes it: to check its host, to look for blocks, and in the process that computes."""
UNITS_OF_A_SHARE, MOST_UNITS_OF_A_SHARE = 8, 128
"""As in ``pipeline/work/units.py``."""
UNITS_PER_GPU = 30
"""What ``UnitBook`` makes of a large run."""
HASHED_BYTES = 4 << 30
"""As in ``pipeline/hosts/host_check.py``: most bytes of an input that each host reads before."""
SHARD_BYTES, SHARD_ROWS = 1 << 30, 1 << 20
"""As in ``store/results/hdf5.py``."""
READ_TO_AGGREGATE, WRITTEN_TO_AGGREGATE = 3, 1
"""Sums and numbers of every part, the sums of the result; the rows themselves are read one by one."""
READ_TO_VALIDATE = 2


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
    """Seconds to open a file."""
    names_per_second: float = 1e6
    """Names per second that the file system lists, all hosts together."""
    driver_memory_bytes: float = 256e9
    """Memory of the driver's host; files that fit are read once."""


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
    check_s: tuple[float, float]
    """Of parts: seconds a row, and a byte of its numbers; so the next three, the first two of which include it."""
    sharded_s: tuple[float, float]
    single_s: tuple[float, float]
    validate_s: tuple[float, float]
    result_memory_bytes: float
    """Peak, a row."""
    look_s: float
    """For a worker to look for its blocks among the parts, a part."""
    item_s: float
    """For the driver to have a unit or a file done by an engine; the slower one."""
    start_s: float
    """From a process to a worker with a small model in memory."""

    @classmethod
    def of(cls, report: dict[str, Any]) -> Rates:
        """Take the medians of a result of ``scale_rates.py``."""
        found = {
            name: {what: value["median"] for what, value in each.items()} for name, each in report["rates"].items()
        }
        long, short = found["index_1_000_000"], found["index_1_000_000_short"]
        wide, narrow, plan = found["result_wide"], found["result_narrow"], found["plan_10_000_000"]
        engines = {name: found[f"engine_{name}"] for name in ENGINES}

        def of_result(what: str) -> tuple[float, float]:
            measured = ((each[what], each["rows"], each["rows"] * each["row_bytes"]) for each in (wide, narrow))
            return _per_row_and_byte(*measured)

        indexing = ((each["cpu_s"], each["records"], each["fasta_bytes"]) for each in (long, short))
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
            check_s=of_result("check_cpu_s"),
            sharded_s=of_result("sharded_cpu_s"),
            single_s=of_result("single_cpu_s"),
            validate_s=of_result("sharded_validate_cpu_s"),
            result_memory_bytes=narrow["sharded_peak_bytes_per_row"],
            look_s=found["looking_50_000"]["look_ms"] / found["looking_50_000"]["parts"] / 1000,
            item_s=max(each["item_ms"] for each in engines.values()) / 1000,
            start_s=found["embedding_8M"]["start_s"],
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


@dataclass(frozen=True)
class Run:
    """One run: how many sequences on how many GPUs."""

    sequences: int
    gpus: int
    rates: Rates
    assumed: Assumptions = Assumptions()

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

    def alone_s(self) -> float:
        """Return the seconds in which the driver works alone."""
        stages = self.stages_s()
        before_s = sum(stages[name] for name in SERIAL)
        if self.is_sharded:
            by_rows_s = self.sequences * (self.rates.sharded_s[0] + self.rates.validate_s[0])
            return before_s + by_rows_s
        return before_s + stages["aggregate"] + stages["validate"]

    def _of(self, rate: tuple[float, float]) -> float:
        """Return the processor seconds of all rows."""
        return self.sequences * (rate[0] + rate[1] * self.row_bytes)

    def _index_s(self) -> float:
        per_record, per_byte = self.rates.index_s
        processor_s = self.sequences * (per_record + per_byte * self.rates.record_bytes)
        num_bytes = self.sequences * (self.rates.record_bytes + self.index_bytes_per_record)
        return processor_s + self.moved_s(num_bytes)

    def _plan_s(self) -> float:
        return PLANS_OF_DRIVER * self._one_plan_s()

    def _one_plan_s(self) -> float:
        return self.sequences * self.rates.plan_s

    def _start_s(self) -> float:
        weights_s = self.moved_s(self.hosts * self.assumed.weights_bytes, self.hosts)
        columns_s = self.moved_s(self.hosts * 16 * self.sequences, self.hosts)  # lengths and representatives
        plans_s = PLANS_OF_WORKER * self._one_plan_s() + columns_s
        input_s = self.moved_s(self.hosts * min(self.sequences * self.rates.record_bytes, HASHED_BYTES), self.hosts)
        return self.rates.start_s + weights_s + input_s + plans_s

    def _embed_s(self) -> float:
        """Computing, parts, units, and the last of them; or as long as the file system takes for the parts."""
        part_bytes = self.rows_bytes * self.rates.part_overhead
        writing_s = part_bytes * self.rates.part_s / self.gpus
        looking_s = self.names_listed() * self.rates.look_s / self.gpus
        listed_s = self.names_listed() / self.assumed.names_per_second
        units_s = self.units / self.gpus * self.rates.item_s + max(looking_s, listed_s)
        last_s = self.computing_s / MOST_UNITS_OF_A_SHARE
        own_s = self.computing_s + writing_s + units_s + last_s
        return max(own_s, self.moved_s(part_bytes, self.hosts), self.units * self.rates.item_s)

    def _aggregate_s(self) -> float:
        moved = (READ_TO_AGGREGATE + WRITTEN_TO_AGGREGATE) * self.rows_bytes
        scattered = 0 if self.rows_bytes < self.assumed.driver_memory_bytes / 2 else self.sequences
        scattered_s = scattered * self.assumed.scattered_read_s / self.assumed.reads_at_once
        opened_s = self.parts_opened() * self.assumed.operation_s
        if self.is_sharded:
            items_s = (self.parts + self.result_files) * self.rates.item_s
            of_hosts_s = (scattered_s + opened_s) / self.gpus
            return self._by_all(self.rates.sharded_s, moved + self.rows_bytes) + items_s + of_hosts_s
        return self._of(self.rates.single_s) + scattered_s + opened_s + self.moved_s(moved + self.rows_bytes)

    def _validate_s(self) -> float:
        moved = READ_TO_VALIDATE * self.rows_bytes
        if self.is_sharded:
            return self._by_all(self.rates.validate_s, moved) + self.result_files * self.rates.item_s
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
        """Most parts in the folder: no part has rows of two units."""
        return -(-self.sequences // SEQUENCES_PER_PART) + self.units

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
            "result": self.rows_bytes + self.sequences * (self.rates.id_bytes + 32),
        }

    def asked_bytes(self) -> float:
        """Return the free space that a run requires before it begins, as if ranks had shards."""
        disk = self.disk_bytes()
        return 2 * disk["parts"] + disk["result"]

    def memory_bytes(self) -> dict[str, float]:
        """Return the memory that grows with the number of sequences, by stage; of the last in every worker."""
        return {
            "index (driver)": self.sequences * self.rates.index_memory_bytes,
            "aggregate (driver)": self.sequences * self.rates.result_memory_bytes,
            "plan (every worker)": self.sequences * (self.rates.plan_memory_bytes + self.rates.plan_held_bytes),
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
        opened_s = self.parts * self.assumed.operation_s
        return self._of(self.rates.check_s) + self.moved_s(2 * self.rows_bytes) + opened_s

    def names_listed(self) -> float:
        """Return the names of parts that all workers list for their units: one half of the parts a time."""
        return self.units * self.parts / 2

    def parts_opened(self) -> float:
        """Return how often parts are opened to write the result."""
        return self.result_files * self.parts
