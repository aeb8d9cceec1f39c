"""
What the parent knows of an embedding run while it goes on, from what its workers say and how they end.

Rows are counted by block: a worker names the blocks that have become durable, and each counts once however often and by
whomever it is named. So a worker that was killed between writing and saying so, or after, changes no count. Safe from
any thread; nothing here can fail for what a worker says.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog

from virnucpro.telemetry.durable_blocks import whole_blocks
from virnucpro.telemetry.failure_report import failure_report
from virnucpro.telemetry.snapshot import Batch, BatchSeconds, EmbeddingSnapshot, RankSnapshot, RankState, WorkerCost
from virnucpro.telemetry.token_rate import TokenRate, seconds_left
from virnucpro.telemetry.worker_logging import log_end_of_process

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from virnucpro.telemetry.embedding_facts import EmbeddingFacts, ProcessEnd

    IntArray = np.ndarray[Any, np.dtype[np.int64]]

log = structlog.get_logger(__name__)

BATCH_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0)
"""Seconds: a full block of the small models on a GPU takes some milliseconds, one of the largest on a CPU a minute."""


@dataclass
class _Rank:
    """One rank, over all its processes of this start of the run."""

    host: str
    device: str
    state: RankState = RankState.WAITING
    pid: int | None = None
    attempts: int = 0
    rows: int = 0
    has_said_rows: bool = False
    """Whether *rows* holds what was found of earlier starts."""
    sequences: int = 0
    tokens: int = 0
    batches: int = 0
    batch_counts: list[int] = field(default_factory=lambda: [0] * (len(BATCH_BOUNDS_S) + 1))
    batch_total_s: float = 0.0
    packed_tokens: int = 0
    tokens_to_do: int = 0
    tokens_left: int = 0
    tokens_done: int = 0
    """Planned tokens computed by the running process."""
    rate: TokenRate = field(default_factory=TokenRate)
    written_bytes: int = 0
    cache_hits: int = 0
    oom_splits: int = 0
    restarts: Counter[str] = field(default_factory=Counter)
    to_restart_after: str = ""
    """Class of the failure after which another process is to start."""
    model_load_s: float | None = None
    last_progress: float | None = None
    last_batch: Batch | None = None
    fresh_failures: dict[int, str] = field(default_factory=dict)
    """Index position -> failure class, until the process has shown by a success that the fault is not its own."""
    failure_report: str = ""
    ended_cpu_s: float = 0.0
    cpu_s: float | None = None
    resident_bytes: int | None = None


class EmbeddingTelemetry:
    """
    One embedding run under way.

    Args:
        facts: What it is.
        on_gpu: Called with a device's label and the UUID of the GPU that its worker found itself on.
        on_log: Called with a rank and what its worker logged for people.
        on_failure: Called when a process of a rank has failed, with a few lines about it.
    """

    def __init__(
        self,
        facts: EmbeddingFacts,
        *,
        on_gpu: Callable[[str, str], None] = lambda *_: None,
        on_log: Callable[[RankSnapshot, dict[str, Any]], None] = lambda *_: None,
        on_failure: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.facts = facts
        self._on_gpu, self._on_log, self._on_failure = on_gpu, on_log, on_failure
        self._lock = threading.RLock()
        self._ranks = [_Rank(facts.host, label) for label, _ in facts.devices]
        self._counted = np.zeros(len(facts.block_tokens), np.int64)
        """Rows of each block that are counted."""
        self._owner = np.arange(len(facts.block_tokens)) % max(1, len(facts.devices))
        """Rank that each block was last given to."""
        self._failed: dict[int, str] = {}
        self._quarantined: dict[int, str] = {}
        self._tokens_before = 0
        """Planned tokens of the blocks that the first process of each rank has found."""
        self._has_messages = self._is_over = False
        self._puzzled_by: set[str] = set()
        """Kinds of messages that made no sense."""
        for number, rank in enumerate(self._ranks):
            rank.tokens_to_do = rank.tokens_left = self._tokens_of(number)

    def assigned(self, rank: int, blocks: Sequence[int] | None) -> None:
        """
        Take in that a process of *rank* is about to start, and what it is asked to do.

        One that claims its blocks as it goes (None) is taken to do its share of what nobody has claimed yet.
        """
        with self._lock:
            mine = np.flatnonzero(self._owner == rank) if blocks is None else np.fromiter(blocks, np.int64, len(blocks))
            before = set(np.unique(self._owner[mine]).tolist()) - {rank}
            self._owner[mine] = rank
            for other in before:
                self._ranks[other].tokens_left = self._tokens_of(other)
            state = self._ranks[rank]
            state.state, state.pid = RankState.STARTING, None
            state.attempts += 1
            if state.to_restart_after:
                state.restarts[state.to_restart_after] += 1
                state.to_restart_after = ""
            state.tokens_done, state.last_batch = 0, None
            state.tokens_to_do = state.tokens_left = int(self.facts.block_tokens[mine][self._counted[mine] == 0].sum())

    def on_message(self, rank: int, message: Mapping[str, Any]) -> None:
        """Take in what a worker said; what makes no sense, as a worker function of a user may say, costs a warning."""
        self._has_messages = True
        kind = str(message.get("kind", "report"))
        take = getattr(self, f"_take_{kind}", None)
        if take is not None:
            try:
                with self._lock:
                    take(rank, self._ranks[rank], message)
            except (LookupError, TypeError, ValueError, ArithmeticError) as error:
                if kind not in self._puzzled_by:
                    self._puzzled_by.add(kind)
                    why = f"{type(error).__name__}: {error}"
                    log.warning("telemetry.not_understood", rank=rank, kind=kind, reason=why)

    def ended(self, rank: int, end: ProcessEnd) -> None:
        """Take in that the process of *rank* has ended, and how."""
        with self._lock:
            state = self._ranks[rank]
            self._failed.update({p: why for p, why in state.fresh_failures.items() if p in end.quarantined})
            state.fresh_failures.clear()
            undecided = {position for other in self._ranks for position in other.fresh_failures}
            self._quarantined.update(
                {p: why for p, why in end.quarantined.items() if p not in self._failed and p not in undecided}
            )
            as_it_was = self._rank_snapshot(rank)
            if state.cpu_s is not None:
                state.ended_cpu_s, state.cpu_s = state.ended_cpu_s + state.cpu_s, 0.0
            state.pid = state.resident_bytes = None
            if end.state == "complete":
                state.state, state.tokens_left = RankState.COMPLETE, 0
                return
            state.tokens_left = self._tokens_of(rank)
            if end.state == "stopped":
                state.state = RankState.STOPPED
                return
            state.state = RankState.FAILED if end.starts_again else RankState.LOST
            state.to_restart_after = end.failure if end.starts_again else ""
        state.failure_report = failure_report(
            as_it_was,
            failure=end.failure,
            reason=end.reason,
            log_path=self.facts.layout.worker_log(rank),
            exit_code=end.exit_code,
            starts_again=end.starts_again,
            run_id=self.facts.run_id,
        )
        log_end_of_process(
            self.facts.layout.worker_log(rank),
            level="warning" if end.starts_again else "error",
            bound={
                "run_id": self.facts.run_id,
                "rank": rank,
                "host": as_it_was.host,
                "device": as_it_was.device,
                "attempt": as_it_was.attempts,
            },
            failure=end.failure,
            reason=end.reason,
            exit_code=end.exit_code,
            starts_again=end.starts_again,
            last_block=None if as_it_was.last_batch is None else as_it_was.last_batch.block,
        )
        self._on_failure(state.failure_report)

    def failure_of(self, rank: int) -> str:
        """Return a few lines about the process of *rank* that failed last; empty where none has."""
        return self._ranks[rank].failure_report

    @property
    def has_workers(self) -> bool:
        """Whether workers compute, since one has sent a message; takes no lock, for signal handlers."""
        return self._has_messages and not self._is_over

    def over(self) -> None:
        """Take in that no process runs, and none will be started any more."""
        with self._lock:
            self._is_over = True
            for rank in self._ranks:
                if rank.state not in {RankState.WAITING, RankState.COMPLETE, RankState.LOST}:
                    rank.state, rank.pid, rank.resident_bytes = RankState.STOPPED, None, None

    def aggregated(self, missing: IntArray) -> None:
        """
        Take in what the result holds: of a host that was killed, nobody may have said that rows were durable.

        Args:
            missing: int64 (B,): records of each block that have no row.
        """
        with self._lock:
            fresh = np.maximum(self.facts.block_rows - missing - self._counted, 0)
            self._counted += fresh
            tokens = np.where(self._counted, 0, self.facts.block_tokens)
            rows, left = (np.bincount(self._owner, what, len(self._ranks)).astype(int) for what in (fresh, tokens))
            for number, rank in enumerate(self._ranks):
                rank.rows += int(rows[number])
                rank.has_said_rows |= rank.rows > 0
                rank.tokens_left = min(rank.tokens_left, int(left[number]))

    def pids(self) -> dict[int, int]:
        """Return rank -> process, of those that run."""
        with self._lock:
            return {number: rank.pid for number, rank in enumerate(self._ranks) if rank.pid is not None}

    def used(self, rank: int, pid: int, *, cpu_s: float, resident_bytes: int) -> None:
        """Take in what the process *pid* of *rank* has used so far."""
        with self._lock:
            state = self._ranks[rank]
            if state.pid == pid:
                state.cpu_s, state.resident_bytes = cpu_s, resident_bytes

    def costs(self) -> tuple[WorkerCost, ...]:
        """Return what the ranks have used whose processes were looked at here."""
        with self._lock:
            return tuple(
                WorkerCost(
                    rank=number,
                    host=rank.host,
                    device=rank.device,
                    model=self.facts.model,
                    cpu_s=rank.ended_cpu_s + rank.cpu_s,
                    resident_bytes=rank.resident_bytes,
                )
                for number, rank in enumerate(self._ranks)
                if rank.cpu_s is not None
            )

    def snapshot(self) -> EmbeddingSnapshot:
        """Return how the run is now."""
        facts = self.facts
        with self._lock:
            ranks = tuple(self._rank_snapshot(rank) for rank in range(len(self._ranks)))
            return EmbeddingSnapshot(
                model=facts.model,
                precision=facts.precision,
                token_budget=facts.token_budget,
                records=facts.records,
                copies=facts.copies,
                skipped=facts.skipped,
                ranks=ranks,
                tokens=int(facts.block_tokens.sum()),
                tokens_left=sum(rank.tokens_left for rank in ranks),
                tokens_before=self._tokens_before,
                seconds_left=seconds_left(ranks, is_over=self._is_over),
                failed=self._records_by_reason(self._failed),
                quarantined=self._records_by_reason(self._quarantined),
                is_over=self._is_over,
            )

    def _records_by_reason(self, sequences: Mapping[int, str]) -> dict[str, int]:
        """Return failure class -> records without a row, for an index position's copies have none either."""
        counts: Counter[str] = Counter()
        if sequences:
            rows = self.facts.rows_of(np.fromiter(sequences, np.int64, len(sequences)))
            for why, number in zip(sequences.values(), rows.tolist(), strict=True):
                counts[why] += number
        return dict(counts)

    def _tokens_of(self, rank: int) -> int:
        """Return the planned tokens of the rank's blocks that are not durable."""
        return int(self.facts.block_tokens[(self._owner == rank) & (self._counted == 0)].sum())

    def _take_placed(self, _: int, rank: _Rank, message: Mapping[str, Any]) -> None:
        rank.host, rank.device = str(message["host"]), str(message["device"])

    def _take_heartbeat(self, _: int, rank: _Rank, message: Mapping[str, Any]) -> None:
        rank.pid = message.get("pid", rank.pid)

    def _take_found(self, _: int, rank: _Rank, __: Mapping[str, Any]) -> None:
        rank.has_said_rows = True

    def _take_claimed(self, number: int, rank: _Rank, message: Mapping[str, Any]) -> None:
        blocks = whole_blocks(message)
        owners, tokens = self._owner[blocks], self.facts.block_tokens[blocks] * (self._counted[blocks] == 0)
        for other in set(np.unique(owners).tolist()) - {number}:
            moved, before = int(tokens[owners == other].sum()), self._ranks[other]
            before.tokens_left = max(0, before.tokens_left - moved)
            before.tokens_to_do = max(0, before.tokens_to_do - moved)
            rank.tokens_left += moved
            rank.tokens_to_do += moved
        self._owner[blocks] = number
        if rank.state is RankState.FINISHING and rank.tokens_left:
            rank.state = RankState.COMPUTING

    def _take_resumed(self, _: int, rank: _Rank, message: Mapping[str, Any]) -> None:
        if (tokens_to_do := message["tokens_to_do"]) is not None:
            rank.tokens_to_do = rank.tokens_left = int(tokens_to_do)
        elif rank.state is not RankState.STARTING:  # more was found, taken over from others
            return
        rank.state = RankState.LOADING if rank.tokens_left else RankState.FINISHING

    def _take_durable(self, _: int, rank: _Rank, message: Mapping[str, Any]) -> None:
        whole = whole_blocks(message)
        short = np.array(message.get("short", []), np.int64).reshape(-1, 2)
        blocks = np.concatenate([whole, short[:, 0]])
        rows = np.concatenate([self.facts.block_rows[whole], short[:, 1]])
        fresh = np.maximum(rows - self._counted[blocks], 0)
        self._counted[blocks] += fresh
        if not rank.has_said_rows:
            self._tokens_before += int(self.facts.block_tokens[blocks[fresh > 0]].sum())
        rank.rows += int(fresh.sum())
        rank.written_bytes += int(message.get("bytes", 0))
        rank.cache_hits += int(message.get("cached", 0))
        if fresh.any():
            rank.last_progress = time.time()

    def _take_model_loaded(self, _: int, rank: _Rank, message: Mapping[str, Any]) -> None:
        rank.state, rank.model_load_s = RankState.COMPUTING, float(message["seconds"])
        rank.rate.restart(time.monotonic())
        if uuid := message.get("gpu_uuid"):
            self._on_gpu(rank.device, str(uuid))

    def _take_start(self, _: int, rank: _Rank, message: Mapping[str, Any]) -> None:
        block = int(message["block"])
        is_alone = message.get("position") is not None
        sequences = 1 if is_alone else int(self.facts.block_sequences[block])
        rank.last_batch = Batch(block=block, sequences=sequences, tokens=int(self.facts.block_tokens[block]))

    def _take_progress(self, _: int, rank: _Rank, message: Mapping[str, Any]) -> None:
        if message["rows"]:
            self._failed.update(rank.fresh_failures)
            rank.fresh_failures.clear()
        block, tokens, seconds = int(message["block"]), int(message["batch_tokens"]), float(message["seconds"])
        rank.last_progress = time.time()
        rank.sequences += int(message["rows"])
        rank.tokens += tokens
        rank.batches += 1
        rank.batch_counts[bisect_left(BATCH_BOUNDS_S, seconds)] += 1
        rank.batch_total_s += seconds
        rank.packed_tokens += min(tokens, self.facts.token_budget)  # BPE tokens are planned by estimate
        rank.oom_splits += int(message["oom_splits"])
        planned = int(self.facts.block_tokens[block])
        rank.tokens_done += planned
        rank.tokens_left = max(0, rank.tokens_left - planned)
        rank.rate.mark(time.monotonic(), rank.tokens_done)
        if not rank.tokens_left:
            rank.state = RankState.FINISHING

    def _take_sequence_failed(self, _: int, rank: _Rank, message: Mapping[str, Any]) -> None:
        rank.fresh_failures[int(message["position"])] = str(message["failure"])

    def _take_log(self, number: int, _: _Rank, message: Mapping[str, Any]) -> None:
        self._on_log(self._rank_snapshot(number), dict(message))

    def _rank_snapshot(self, number: int) -> RankSnapshot:
        rank, now_s = self._ranks[number], time.monotonic()
        is_computing = rank.state is RankState.COMPUTING
        rate = rank.rate.per_second(now_s) if is_computing or rank.state is RankState.FINISHING else 0.0
        return RankSnapshot(
            rank=number,
            device=rank.device,
            host=rank.host,
            state=rank.state,
            pid=rank.pid,
            attempts=rank.attempts,
            rows=rank.rows if rank.has_said_rows else None,
            sequences=rank.sequences,
            tokens=rank.tokens,
            batches=rank.batches,
            batch_seconds=BatchSeconds(
                bounds=BATCH_BOUNDS_S, counts=tuple(rank.batch_counts), total_s=rank.batch_total_s
            ),
            packing_efficiency=(
                rank.packed_tokens / (rank.batches * self.facts.token_budget) if rank.batches else None
            ),
            tokens_to_do=rank.tokens_to_do,
            tokens_left=rank.tokens_left,
            tokens_per_second=rate,
            seconds_left=0.0 if not rank.tokens_left else rank.tokens_left / rate if rate else None,
            written_bytes=rank.written_bytes,
            cache_hits=rank.cache_hits,
            oom_splits=rank.oom_splits,
            restarts=dict(rank.restarts),
            model_load_s=rank.model_load_s,
            last_progress=rank.last_progress,
            last_batch=rank.last_batch,
        )
