"""
What the parent knows of the work of ranks while they compute: the records of its ranks, and the state of each block.

Rows are counted by block: a worker names the blocks that have become durable, and each counts once however often it is
named, and by whichever rank. So a worker that was killed just before or after its message changes no count. Safe from
any thread; nothing here can fail for what a worker sends.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog

from virnucpro.cost import CostRow
from virnucpro.telemetry.failure_report import failure_report
from virnucpro.telemetry.ranks import BATCH_BOUNDS_S, Rank, whole_blocks
from virnucpro.telemetry.snapshot import CONTIGS, BatchSeconds, GpuSample, RankSnapshot, RankState, WorkSnapshot
from virnucpro.telemetry.worker_logging import known_labels, log_end_of_process
from virnucpro.this_host import host_name, merged_processors, processors_differ

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from virnucpro.arrays import BoolArray, IntArray
    from virnucpro.telemetry.snapshot import WorkFacts

log = structlog.get_logger(__name__)

_HAS_PROCESS = {RankState.LOADING, RankState.COMPUTING}


class WorkTelemetry:
    """
    One embedding run or work on contigs; its ``ranks`` are the records that the workers' messages are applied to.

    Args:
        on_gpu: Called with a device's label and the UUID of the GPU that its worker found itself on.
        on_log: Called with a rank and what its worker logged for users.
        on_failure: Called when a process of a rank has failed, or processors differ, with a few lines about it.
    """

    def __init__(
        self,
        facts: WorkFacts,
        *,
        on_gpu: Callable[[str, str], None] = lambda *_: None,
        on_log: Callable[[RankSnapshot, dict[str, Any]], None] = lambda *_: None,
        on_failure: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.facts = facts
        self.stage = ""
        """As ``CostRow`` has it."""
        self.ranks = [Rank(rank=number, device=label) for number, (label, _) in enumerate(facts.devices)]
        self._on_gpu, self._on_log, self._on_failure = on_gpu, on_log, on_failure
        self._lock = threading.RLock()
        num_blocks = len(facts.block_tokens)
        self._counted = np.zeros(num_blocks, np.int64)
        """Rows of each block that are counted."""
        self._computed: BoolArray = np.zeros(num_blocks, np.bool_)
        """Blocks that a running process has computed, durable or not."""
        self._done: BoolArray = np.zeros(num_blocks, np.bool_)
        """Blocks of which nothing is to be computed any more."""
        self._owner = np.arange(num_blocks) % max(1, len(facts.devices))
        """Rank that each block was last given to."""
        self._quarantined: dict[int, str] = {}
        self._tokens_before = 0
        """Planned tokens of the blocks that the first process of each rank has found."""
        self._has_messages = self._is_over = False
        self._num_processors = 0
        self._gpus_elsewhere: dict[int, tuple[GpuSample, ...]] = {}
        """Rank -> of its host."""

    def assigned(self, rank: int, blocks: Sequence[int]) -> None:
        """Record what the next process of *rank* is assigned."""
        with self._lock:
            self._owner[np.fromiter(blocks, np.int64, len(blocks))] = rank

    def add(self, block_tokens: IntArray, block_rows: IntArray) -> None:
        """Add blocks after the existing ones, int64 each."""
        with self._lock:
            facts, number = self.facts, len(block_tokens)
            self._owner = np.append(self._owner, (len(self._owner) + np.arange(number)) % max(1, len(facts.devices)))
            self._counted = np.append(self._counted, np.zeros(number, np.int64))
            self._computed, self._done = (
                np.append(of, np.zeros(number, np.bool_)) for of in (self._computed, self._done)
            )
            self.facts = replace(
                facts,
                block_tokens=np.append(facts.block_tokens, block_tokens),
                block_rows=np.append(facts.block_rows, block_rows),
            )

    def rank(self, number: int) -> Rank:
        """Return the record of a rank; a cluster may get more workers than it had at first."""
        with self._lock:
            while number >= len(self.ranks):
                self.ranks.append(Rank(rank=len(self.ranks), device=self.facts.devices[0][0]))
            return self.ranks[number]

    def on_message(self, rank: int, message: Mapping[str, Any]) -> None:
        """Record what a message, which was applied to its rank before, has on blocks, GPUs and the log."""
        self._has_messages = True
        try:
            with self._lock:
                match message.get("kind"):
                    case "durable":
                        self._count(self.ranks[rank], message)
                    case "claimed":
                        self._owner[whole_blocks(message)] = rank
                    case "done":
                        self._done[whole_blocks(message)] = True
                    case "progress":
                        self._computed[int(message["block"])] = True
                    case "model_loaded":
                        self._compare_processors()
                        if uuid := message.get("gpu_uuid"):
                            self._on_gpu(self.ranks[rank].device, str(uuid))
                    case "usage":
                        peaks = int(message["peak_bytes"]), int(message.get("peak_gpu_bytes", 0))
                        self._used(self.ranks[rank], float(message["cpu_s"]), *peaks)
                    case "log":
                        self._on_log(self._snapshot_of(rank), dict(message))
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            self.ranks[rank].warn_of(message, error)

    def _compare_processors(self) -> None:
        found = merged_processors({rank.processor: [rank.host or host_name()]} for rank in self.ranks if rank.processor)
        if len(found) > max(1, self._num_processors):
            self._on_failure(f"warning: {processors_differ(found)[0]}")
        self._num_processors = len(found)

    def apply_entry(self, entry: Mapping[str, Any]) -> None:
        """Apply a report of a worker on another host, as if its pipe ended here; nonsense costs a warning."""
        try:
            self._apply_entry(entry)
        except (ValueError, LookupError, TypeError) as error:
            log.warning("messages.not_understood", reason=f"{type(error).__name__}: {error}")

    def _apply_entry(self, entry: Mapping[str, Any]) -> None:
        number = int(entry["rank"])
        rank = self.rank(number)
        match entry:
            case {"message": message}:
                rank.apply(message)
                self.on_message(number, message)
            case {"assigned": _}:
                rank.begin_attempt()
            case {"ended": end}:
                rank.state, rank.failure = end["state"], end["failure"]
                rank.reason, rank.exit_code = end["reason"], end["exit_code"]
                rank.end_attempt()
                self.ended(number, bool(end["starts_again"]), dict(end["quarantined"]))
            case {"used": used, "gpus": gpus}:
                self.sampled(number, used, tuple(GpuSample(**sample) for sample in gpus))
            case _:
                raise LookupError("an entry of no known kind")

    def ended(self, rank: int, starts_again: bool, quarantined: Mapping[int, str]) -> None:
        with self._lock:
            state = self.ranks[rank]
            undecided = {position for other in self.ranks for position in other.attempt.unproved_failures}
            failed = self._failed()
            self._quarantined.update(
                {p: why for p, why in quarantined.items() if p not in failed and p not in undecided}
            )
            as_it_was = self._snapshot_of(rank)
            if state.cpu_s is not None:
                state.ended_cpu_s, state.cpu_s = state.ended_cpu_s + state.cpu_s, 0.0
            state.pid = state.resident_bytes = None
            own = self._owner == rank
            self._computed[own] = False
            if state.state == "complete":
                self._done[own] = True
                state.phase = RankState.COMPLETE
                return
            if state.state == "stopped":
                state.phase = RankState.STOPPED
                return
            state.phase = RankState.FAILED if starts_again else RankState.LOST
            state.to_restart_after = (state.failure or "") if starts_again else ""
        self._report_failure(state, as_it_was, starts_again=starts_again)

    def _report_failure(self, rank: Rank, as_it_was: RankSnapshot, *, starts_again: bool) -> None:
        facts, log_path = self.facts, self.facts.layout.worker_log(rank.rank)
        ending: dict[str, Any] = {
            "failure": rank.failure or "",
            "reason": rank.reason or "",
            "exit_code": rank.exit_code,
            "starts_again": starts_again,
        }
        rank.failure_report = failure_report(
            as_it_was, **ending, log_path=log_path, run_id=facts.run_id, counts=facts.counts, measure=facts.measure
        )
        log_end_of_process(
            log_path,
            level="warning" if starts_again else "error",
            bound={
                "run_id": facts.run_id,
                "rank": rank.rank,
                "host": as_it_was.host,
                "device": as_it_was.device,
                "attempt": as_it_was.attempts,
                **known_labels(),
            },
            **ending,
            last_block=None if as_it_was.last_batch is None else as_it_was.last_batch.block,
        )
        self._on_failure(rank.failure_report)

    def failure_of(self, rank: int) -> str:
        return self.ranks[rank].failure_report

    @property
    def has_workers(self) -> bool:
        """Whether workers compute, since one has sent a message; takes no lock, for signal handlers."""
        return self._has_messages and not self._is_over and not self.facts.is_small

    def over(self) -> None:
        """Record that no process runs, and none will be started any more."""
        with self._lock:
            self._is_over = True
            for rank in self.ranks:
                rank.held = rank.seconds, None  # those of a host that was lost were not seen to end
                if rank.phase not in {RankState.WAITING, RankState.COMPLETE, RankState.LOST}:
                    rank.phase, rank.pid, rank.resident_bytes = RankState.STOPPED, None, None

    def aggregated(self, missing: IntArray) -> None:
        """
        Correct the rows by the result: a killed host may have made rows durable and sent no message of it.

        *missing*: int64 (B,): records of each block that have no row.
        """
        with self._lock:
            fresh = np.maximum(self.facts.block_rows - missing - self._counted, 0)
            self._counted += fresh
            for number, rows in enumerate(np.bincount(self._owner, fresh, len(self.ranks)).astype(int).tolist()):
                self.ranks[number].rows += rows
                self.ranks[number].has_counted_rows |= self.ranks[number].rows > 0

    def pids(self) -> dict[int, int]:
        """Return rank -> process, of the running ones."""
        return {rank.rank: rank.pid for rank in self.ranks if rank.pid is not None}

    def used(self, rank: int, pid: int, *, cpu_s: float, resident_bytes: int) -> None:
        """Record what the process *pid* of *rank* has used so far."""
        with self._lock:
            if self.ranks[rank].pid == pid:
                self._used(self.ranks[rank], cpu_s, resident_bytes)

    def sampled(self, rank: int, used: Mapping[str, Any] | None, gpus: tuple[GpuSample, ...]) -> None:
        """Record a sample of another host: *cpu_s* and *resident_bytes* of the rank's process, and its GPU."""
        with self._lock:
            self._gpus_elsewhere[rank] = gpus
            if used is not None:
                self._used(self.ranks[rank], float(used["cpu_s"]), int(used["resident_bytes"]))

    def _used(self, rank: Rank, cpu_s: float, resident_bytes: int, gpu_bytes: int = 0) -> None:
        """Record a sample of the running process of a rank, or its own last report; neither takes seconds back."""
        rank.cpu_s, rank.resident_bytes = max(rank.cpu_s or 0.0, cpu_s), resident_bytes
        rank.peak_bytes, rank.peak_gpu_bytes = max(rank.peak_bytes, resident_bytes), max(rank.peak_gpu_bytes, gpu_bytes)

    def cost(self) -> list[CostRow]:
        """Return what each worker has cost; work of the run's own process is part of the row of its stage."""
        with self._lock:
            return [self._cost_of(rank) for rank in self.ranks if rank.attempts]

    def _cost_of(self, rank: Rank) -> CostRow:
        facts, devices = self.facts, [label for label, _ in self.facts.devices]
        sharing = devices.count(rank.device) if facts.host else 1  # on other hosts a worker has its device alone
        return CostRow(
            self.stage,
            None if facts.is_small else rank.rank,
            self._host_of(rank),
            rank.device,
            cpu_seconds=rank.ended_cpu_s + (rank.cpu_s or 0.0),
            gpu_seconds=0.0 if rank.device.startswith("cpu") else rank.seconds / max(1, sharing),
            restarts=sum(rank.restarts.values()),
            peak_memory_bytes=rank.peak_bytes,
            peak_gpu_memory_bytes=rank.peak_gpu_bytes,
            **{"nucleotides" if facts.counts == CONTIGS else "tokens": rank.tokens},
        )

    def gpus(self) -> tuple[GpuSample, ...]:
        """Return the last samples of GPUs of other hosts with running processes."""
        with self._lock:
            sampled = [] if self._is_over else list(self._gpus_elsewhere.items())
            return tuple(gpu for rank, gpus in sampled if self.ranks[rank].phase in _HAS_PROCESS for gpu in gpus)

    def snapshot(self) -> WorkSnapshot:
        with self._lock:
            facts = self.facts
            ranks = tuple(self._snapshot_of(rank, left) for rank, left in enumerate(self._tokens_left()))
            return WorkSnapshot(
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
                seconds_left=_seconds_left(ranks, is_over=self._is_over),
                failed=self._records_by_reason(self._failed()),
                quarantined=self._records_by_reason(self._quarantined),
                is_over=self._is_over,
                counts=facts.counts,
                measure=facts.measure,
            )

    def _failed(self) -> dict[int, str]:
        """Return index position -> failure class, of sequences that failed without ending their process."""
        return {p: failure for rank in self.ranks for p, (_, failure) in rank.failed_sequences.items()}

    def _records_by_reason(self, sequences: Mapping[int, str]) -> dict[str, int]:
        """Return failure class -> records without a row, for an index position's copies have none either."""
        counts: Counter[str] = Counter()
        if sequences:
            rows = self.facts.rows_of(np.fromiter(sequences, np.int64, len(sequences)))
            for why, number in zip(sequences.values(), rows.tolist(), strict=True):
                counts[why] += number
        return dict(counts)

    def _tokens_left(self) -> list[int]:
        """Return the planned tokens of each rank's blocks that are neither durable nor computed."""
        is_open = ~self._computed & ~self._done & (self._counted == 0)
        tokens = self.facts.block_tokens * is_open
        left_of_blocks = np.bincount(self._owner, tokens, len(self.ranks)).astype(int).tolist()
        shares = [rank.attempt.share_tokens for rank in self.ranks]
        return [max(left - share, 0) for left, share in zip(left_of_blocks, shares, strict=True)]

    def _count(self, rank: Rank, message: Mapping[str, Any]) -> None:
        whole = whole_blocks(message)
        short = np.array(message.get("short", []), np.int64).reshape(-1, 2)
        blocks = np.concatenate([whole, short[:, 0]])
        rows = np.concatenate([self.facts.block_rows[whole], short[:, 1]])
        fresh = np.maximum(rows - self._counted[blocks], 0)
        self._counted[blocks] += fresh
        if not rank.has_counted_rows:
            self._tokens_before += int(self.facts.block_tokens[blocks[fresh > 0]].sum())
        rank.rows += int(fresh.sum())
        if fresh.any():
            rank.last_progress = time.time()

    def _host_of(self, rank: Rank) -> str:
        return self.facts.host if rank.host is None else rank.host

    def _snapshot_of(self, number: int, tokens_left: int | None = None) -> RankSnapshot:
        rank, now_s = self.ranks[number], time.monotonic()
        left = self._tokens_left()[number] if tokens_left is None else tokens_left
        state = RankState.FINISHING if rank.phase in _HAS_PROCESS and not left else rank.phase
        rate = rank.rate.per_second(now_s) if state in {RankState.COMPUTING, RankState.FINISHING} else 0.0
        return RankSnapshot(
            rank=number,
            device=rank.device,
            host=self._host_of(rank),
            state=state,
            pid=rank.pid,
            attempts=rank.attempts,
            rows=rank.rows if rank.has_counted_rows else None,
            sequences=rank.sequences,
            tokens=rank.tokens,
            batches=rank.batches,
            batch_seconds=BatchSeconds(bounds=BATCH_BOUNDS_S, counts=rank.batch_counts, total_s=rank.batch_total_s),
            packing_efficiency=rank.packing / rank.batches if rank.batches else None,
            tokens_to_do=left + rank.attempt.tokens_done,
            tokens_left=left,
            tokens_per_second=rate,
            seconds_left=0.0 if not left else left / rate if rate else None,
            written_bytes=rank.written_bytes,
            cache_hits=rank.sequences_cached,
            oom_splits=rank.oom_splits,
            restarts=dict(rank.restarts),
            model_load_s=rank.model_load_s,
            last_progress=rank.last_progress,
            last_batch=rank.attempt.last_batch,
            cpu_s=None if rank.cpu_s is None else rank.ended_cpu_s + rank.cpu_s,
            resident_bytes=rank.resident_bytes,
        )


def _seconds_left(ranks: Sequence[RankSnapshot], *, is_over: bool) -> float | None:
    """Return the estimate of the slowest rank; a rank without a rate is taken to be as fast as the mean."""
    if not any(rank.tokens_left for rank in ranks):
        return 0.0
    if is_over:
        return None
    rates = [rank.tokens_per_second for rank in ranks if rank.tokens_per_second]
    if not rates:
        return None
    usual = sum(rates) / len(rates)
    return max(rank.tokens_left / (rank.tokens_per_second or usual) for rank in ranks)
