"""
What is known of a run at one moment: plain data for everything that shows it.

Bars, metrics, status file and artifacts are all made from a ``RunSnapshot``, so that they cannot disagree. Sequences
and rows are counted once, when they are durable; tokens of the plan (``tokens_left``, ``progress``) show how far a run
is, since the long sequences come first.
"""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003  pydantic reads it where the status file is checked
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from virnucpro.cost import CostRow  # noqa: TC001  which ``get_type_hints`` looks up

if TYPE_CHECKING:
    from collections.abc import Callable

    from virnucpro.arrays import IntArray
    from virnucpro.run_layout import FolderLayout


SEQUENCES, TOKENS = "sequences", "tokens"
CONTIGS, NT = "contigs", "nt"


class RankState(StrEnum):
    WAITING = "waiting"
    """It has no process yet."""
    STARTING = "starting"
    """Its process looks at what is done already."""
    LOADING = "loading the model"
    COMPUTING = "computing"
    FINISHING = "finishing"
    """Everything is computed; rows are being made durable and sealed."""
    COMPLETE = "complete"
    FAILED = "failed"
    """Its process ended without finishing, and another one is to follow."""
    LOST = "lost"
    """It was given up; its work goes to the others."""
    STOPPED = "stopped"


@dataclass(frozen=True, kw_only=True)
class Batch:
    block: int
    sequences: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class BatchSeconds:
    bounds: tuple[float, ...]
    """Seconds: upper bounds of the buckets, ascending, without infinity."""
    counts: tuple[int, ...]
    """Batches in each bucket alone, one more than *bounds*: the last is for those above all bounds."""
    total_s: float


@dataclass(frozen=True, kw_only=True)
class GpuSample:
    """One GPU as NVML saw it; what the driver does not report is None."""

    device: str
    """The run's label of it, such as ``cuda:3``."""
    uuid: str
    host: str = ""
    utilization: float | None = None
    """Share of the last sampling period in which it computed, 0 to 1."""
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    sm_clock_hertz: float | None = None
    throttle: Mapping[str, bool] = field(default_factory=dict)
    """Reason -> whether it is slowed down by it now."""

    @property
    def is_lost(self) -> bool:
        return self == self.without_values()

    def without_values(self) -> GpuSample:
        return GpuSample(device=self.device, uuid=self.uuid, host=self.host)


@dataclass(frozen=True, kw_only=True)
class RankSnapshot:
    """One rank of an embedding run; counts are of this start of the run, over all its processes."""

    rank: int
    device: str
    """Label of its device, such as ``cuda:3`` or ``cpu``."""
    host: str = ""
    """Where its processes run; empty where that is not known yet."""
    state: RankState
    pid: int | None
    attempts: int
    rows: int | None
    """Rows that are durable, copies and those of earlier starts included; None before its process has reported."""
    sequences: int
    tokens: int
    batches: int
    batch_seconds: BatchSeconds
    packing_efficiency: float | None
    """Tokens over token budget of the batches computed, 0 to 1; None before the first."""
    tokens_to_do: int
    """Planned tokens that it was given to compute."""
    tokens_left: int
    tokens_per_second: float
    """Planned tokens a second over the last minute of computing; 0 before the first batch."""
    seconds_left: float | None
    """Estimate from the two above; None while there is none."""
    written_bytes: int
    cache_hits: int
    """Sequences taken from the embedding cache."""
    oom_splits: int
    """Batches computed in halves because they did not fit into memory."""
    restarts: Mapping[str, int]
    model_load_s: float | None
    """Seconds that its last process took to load the model."""
    last_progress: float | None
    """Unix time at which a batch was last finished or rows became durable."""
    last_batch: Batch | None
    cpu_s: float | None = None
    """Processor seconds of all its processes; None where they are on another host and it has not reported them."""
    resident_bytes: int | None = None
    """Resident memory of the one that runs."""

    @property
    def has_process(self) -> bool | None:
        """Whether its process runs; None where it needs none any more, or not yet."""
        if self.state in {RankState.WAITING, RankState.COMPLETE, RankState.STOPPED}:
            return None
        return self.state not in {RankState.FAILED, RankState.LOST}


@dataclass(frozen=True, kw_only=True)
class WorkSnapshot:
    """What ranks compute: an embedding run, on its own or within a prediction, or contigs of one."""

    model: str
    precision: str
    token_budget: int
    records: int
    """Records of the input, skipped ones included."""
    copies: int
    """Records that take the row of an identical sequence."""
    skipped: int
    """Records that break a rule and were skipped."""
    ranks: tuple[RankSnapshot, ...]
    tokens: int
    tokens_left: int
    """Of these not yet computed, and not found done."""
    tokens_before: int
    """Of these found durable when this start of the run began, as far as the ranks have reported."""
    seconds_left: float | None
    """Until the slowest rank has computed its share; 0 when nothing is left, None where no rank works on the rest."""
    failed: Mapping[str, int]
    """Failure class -> sequences, copies included, that got no row because computing them failed."""
    quarantined: Mapping[str, int]
    """Failure class -> sequences, copies included, that are not computed any more because they ended processes."""
    is_over: bool
    counts: str = SEQUENCES
    """What ``records`` and rows are of."""
    measure: str = TOKENS
    """What is counted as tokens."""

    @property
    def progress(self) -> float:
        """Share of the plan's tokens that is done, 0 to 1; 1 for an empty plan."""
        return 1 - self.tokens_left / self.tokens if self.tokens else 1.0

    @property
    def rows(self) -> int:
        """Rows that are durable, as far as the ranks have reported."""
        return sum(rank.rows or 0 for rank in self.ranks)


@dataclass(frozen=True, kw_only=True)
class StageSnapshot:
    name: str
    """Such as index, embed, aggregate; of a prediction also fragments, classify and so on."""
    model: str
    """Name of its embedding run; empty for stages of the whole run."""
    started: float
    """Unix time."""
    seconds: float
    """Seconds that it took, or has taken so far, without waiting."""
    elapsed: float
    """Seconds from its begin to its end, or until now."""
    depth: int
    is_over: bool


@dataclass(frozen=True, kw_only=True)
class RunSnapshot:
    run_id: str
    """Unique to this start of the run."""
    output_dir: str
    started: float
    """Unix time."""
    now: float
    """Unix time of this snapshot."""
    stages: tuple[StageSnapshot, ...]
    """In the order in which they began."""
    embeddings: tuple[WorkSnapshot, ...]
    """In the order in which they began; a prediction has up to two."""
    gpus: tuple[GpuSample, ...]
    """One a GPU of the run, of those that can be asked here; none without a driver."""
    disk_free_bytes: int | None
    """Bytes that the run may still write to its file system."""
    disk_size_bytes: int | None
    """Bytes of that file system."""
    cost: tuple[CostRow, ...] = ()
    """Of this start."""
    cost_before: tuple[CostRow, ...] = ()
    """Of earlier starts in the folder."""

    @property
    def stage(self) -> StageSnapshot | None:
        """The innermost running stage."""
        return next((stage for stage in reversed(self.stages) if not stage.is_over), None)

    @property
    def embedding(self) -> WorkSnapshot | None:
        """The embedding run that began last."""
        return self.embeddings[-1] if self.embeddings else None


@dataclass(frozen=True, kw_only=True)
class WorkFacts:
    """What ranks are to compute, once it is planned; B blocks."""

    run_id: str
    """Of this start of the run, as in the logs of its workers."""
    model: str
    precision: str
    token_budget: int
    """Most tokens in one block."""
    devices: tuple[tuple[str, str], ...]
    """Label and token of each rank's device."""
    host: str
    """The host of all of them; empty where each rank reports its own."""
    layout: FolderLayout
    block_tokens: IntArray
    """int64 (B,): planned tokens of each block."""
    block_rows: IntArray
    """int64 (B,): rows that each block gives, copies included."""
    rows_of: Callable[[IntArray], IntArray]
    """Returns how many rows the sequences at some index positions give, copies included."""
    records: int
    copies: int
    skipped: int
    counts: str = SEQUENCES
    """What records and rows are of."""
    measure: str = TOKENS
    """What is counted as tokens."""
    is_small: bool = False
    """Whether the run's own process computes it."""


class View(Protocol):
    """Something that shows a run. Its methods are called one at a time; it decides itself how often it shows what."""

    def update(self, snapshot: RunSnapshot) -> None:
        """Record how the run is; called about twice a second, and once at its end."""
        ...

    def say(self, text: str) -> None:
        """Show lines to the user: what a worker warned of, or why one failed. Safe for a terminal."""
        ...

    def close(self) -> None:
        """Show no more; called once."""
        ...
