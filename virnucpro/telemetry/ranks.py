"""
The record of a rank: what is known of one worker, over all its processes of this start of the run.

A worker's messages change it in one place, ``Rank.apply``; everything else reads it: the time limits, the retry policy,
the views, metrics and ``run.json``. One thread writes a record, the one that runs the rank; others may read it at any
time, since each value is replaced as a whole.

Messages name blocks as runs (first, last, step), since a worker's blocks are nearly always every n-th of the plan: a
few numbers for thousands of blocks. What does not fit one message goes into several.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog

from virnucpro.telemetry.snapshot import Batch, RankState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

log = structlog.get_logger(__name__)

BATCH_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0)
"""Seconds: a full block of the small models on a GPU takes some milliseconds, one of the largest on a CPU a minute."""
ITEMS_IN_A_MESSAGE = 64
"""Runs or exceptions in one message: at some 40 characters each, they fit what a pipe takes in one piece."""
RATE_WINDOW_S = 60.0
"""Seconds of computing that a rate is taken over."""
_IN_THE_MANIFEST = (
    "rank",
    "device",
    "host",
    "state",
    "failure",
    "reason",
    "failures",
    "pids",
    "exit_code",
    "attempts",
    "sequences",
    "sequences_resumed",
    "sequences_cached",
    "cache_problem",
    "tokens",
    "seconds",
    "compute_s",
    "attention_kernel",
    "processor",
)


class TokenRate:
    """Planned tokens a second over the last minute, since long sequences come first and cost more a token."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()

    def mark(self, now_s: float, tokens: int) -> None:
        """Record that *tokens* are done since the first mark."""
        self._marks.append((now_s, tokens))
        while len(self._marks) > 2 and now_s - self._marks[1][0] >= RATE_WINDOW_S:
            self._marks.popleft()

    def restart(self, now_s: float) -> None:
        """Begin anew: a model has been loaded."""
        self._marks = deque([(now_s, 0)])

    def per_second(self, now_s: float) -> float:
        """Return the rate; it falls when nothing has been done for longer than the window."""
        if len(self._marks) < 2:
            return 0.0
        (first_s, before), (last_s, done) = self._marks[0], self._marks[-1]
        end_s = last_s if now_s - last_s < RATE_WINDOW_S else now_s
        return (done - before) / (end_s - first_s) if end_s > first_s else 0.0


@dataclass(kw_only=True)
class Attempt:
    """The record of the running process; times are those of ``time.monotonic``."""

    started_s: float = field(default_factory=time.monotonic)
    message_s: float = field(default_factory=time.monotonic)
    step_s: float = field(default_factory=time.monotonic)
    """Last work without batches: checking, sealing, waiting."""
    progress_s: float | None = None
    """Last batch or step, once the model is loaded."""
    loaded_s: float | None = None
    last_batch_s: float | None = None
    has_messages: bool = False
    report: dict[str, Any] | None = None
    """Of the worker function, once it has returned one."""
    in_flight: dict[int, int | None] = field(default_factory=dict)
    """Block that is being computed -> the position that is computed alone, or None while the whole block is."""
    unproved_failures: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Index position -> block and failure class, until a success shows that the process itself is fine."""
    revoked_failures: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Those of a process that has failed without showing that it was fine."""
    has_rows: bool = False
    """Whether it has computed something."""
    tokens_done: int = 0
    """Planned tokens of the blocks that it has computed."""
    share_tokens: int = 0
    """Planned tokens of the running batch that are computed, where it tells."""
    last_batch: Batch | None = None
    wants: str | None = None
    """Whether it asks for blocks: ``more``, or ``idle`` where it has computed all that it had."""


@dataclass(kw_only=True)
class Rank:
    """One worker; small and plain, so that it travels between processes and into ``run.json``."""

    rank: int
    device: str
    host: str | None = None
    """Its host, where a run has several."""

    state: str = "failed"
    """How its last process ended: complete, failed or stopped."""
    failure: str | None = None
    """Failure class, where it failed."""
    reason: str | None = None
    """One sentence, where it failed."""
    failures: list[str] = field(default_factory=list)
    """Failure class of every process that failed."""
    pids: list[int] = field(default_factory=list)
    exit_code: int | None = None
    """Of the last process; negative for a signal."""
    attempts: int = 0
    """Processes started."""
    sequences: int = 0
    """Rows computed, over all attempts."""
    sequences_resumed: int = 0
    """Rows that the last attempt found finished."""
    sequences_cached: int = 0
    """Rows taken from the embedding cache, over all attempts."""
    cache_problem: str | None = None
    """Why the embedding cache was not used to the end."""
    tokens: int = 0
    compute_s: float = 0.0
    """Seconds from the loaded model to the last row, over all attempts."""
    attention_kernel: str | None = None
    """Of the last process that loaded its model."""
    processor: str | None = None
    """Same as above: what its last bits depend on."""

    phase: RankState = RankState.WAITING
    """What it is doing; a view shows FINISHING where it has nothing left to compute."""
    attempt: Attempt = field(default_factory=Attempt)
    """Of the running process."""
    pid: int | None = None
    """Of the running process."""
    failed_sequences: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Index position -> block and failure class, of sequences that failed in a process which computed others."""
    rows: int = 0
    """Durable rows, copies included."""
    has_counted_rows: bool = False
    """Whether *rows* holds what was found of earlier starts."""
    batches: int = 0
    batch_counts: tuple[int, ...] = (0,) * (len(BATCH_BOUNDS_S) + 1)
    batch_total_s: float = 0.0
    packing: float = 0.0
    """Sum of each batch's share of the token budget."""
    rate: TokenRate = field(default_factory=TokenRate)
    written_bytes: int = 0
    oom_splits: int = 0
    restarts: Counter[str] = field(default_factory=Counter)
    to_restart_after: str = ""
    """Class of the failure after which another process is to start."""
    model_load_s: float | None = None
    last_progress: float | None = None
    """Unix time."""
    failure_report: str = ""
    """Some lines about the process that failed last."""
    ended_cpu_s: float = 0.0
    cpu_s: float | None = None
    resident_bytes: int | None = None
    peak_bytes: int = 0
    peak_gpu_bytes: int = 0
    """Most memory of one of its processes; 0 while that is not known."""
    held: tuple[float, float | None] = (0.0, None)
    """Seconds for which ended processes held its device, and since when the running one does."""
    not_understood: set[str] = field(default_factory=set)
    """Kinds of messages that made no sense."""

    has_started: bool = False
    is_running: bool = False
    is_waiting: bool = False
    """Whether it waits for its turn, which may come only once another has ended."""
    fruitless: int = 0
    """Failed processes since the last row, except those that narrowed a fault down where no other rank could."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens computed over the seconds that computing took."""
        return self.tokens / self.compute_s if self.compute_s else 0.0

    @property
    def seconds_per_batch(self) -> float | None:
        """Mean; None before the first batch."""
        return self.batch_total_s / self.batches if self.batches else None

    @property
    def seconds(self) -> float:
        """Seconds for which its processes have held its device."""
        ended_s, since_s = self.held
        return ended_s + (0.0 if since_s is None else time.monotonic() - since_s)

    def to_json(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in _IN_THE_MANIFEST}
        return {
            **values,
            "failures": list(self.failures),
            "pids": list(self.pids),
            "tokens_per_second": round(self.tokens_per_second, 1),
        }

    def begin_attempt(self, since_s: float | None = None) -> None:
        """Record a process that starts now, or has held its device since then."""
        self.attempts += 1
        self.state, self.failure, self.reason, self.exit_code = "failed", None, None, None
        self.attempt, self.phase, self.pid = Attempt(), RankState.STARTING, None
        self.held = self.seconds, self.attempt.started_s if since_s is None else since_s
        if self.to_restart_after:
            self.restarts[self.to_restart_after] += 1
            self.to_restart_after = ""

    def end_attempt(self) -> None:
        """Record that the process has ended, as ``state`` has it."""
        attempt = self.attempt
        if self.state == "complete":
            self.failed_sequences |= attempt.unproved_failures
        else:
            attempt.revoked_failures = attempt.unproved_failures
        attempt.unproved_failures, attempt.share_tokens = {}, 0
        self.held = self.seconds, None
        if attempt.loaded_s is not None and attempt.last_batch_s is not None:
            self.compute_s += attempt.last_batch_s - attempt.loaded_s

    def apply(self, message: Mapping[str, Any]) -> None:
        """Apply a message of the worker; one that makes no sense, as a user's worker may send, costs a warning."""
        self.attempt.message_s, self.attempt.has_messages = time.monotonic(), True
        try:
            self._apply(message)
        except (LookupError, TypeError, ValueError) as error:
            self.warn_of(message, error)

    def warn_of(self, message: Mapping[str, Any], error: Exception) -> None:
        """Log that *message* makes no sense, once for each kind."""
        kind = str(message.get("kind", "report"))
        if kind not in self.not_understood:
            self.not_understood.add(kind)
            log.warning(
                "telemetry.not_understood", rank=self.rank, kind=kind, reason=f"{type(error).__name__}: {error}"
            )

    def _apply(self, message: Mapping[str, Any]) -> None:
        attempt, now_s = self.attempt, time.monotonic()
        match message.get("kind"):
            case None:
                attempt.report = dict(message)
            case "heartbeat":
                self.pid = message.get("pid", self.pid)
            case "wants":
                attempt.wants = "idle" if message.get("idle") else "more"
            case "step":
                self._step(now_s)
            case "start":
                self._step(now_s)
                self._begin_batch(int(message["block"]), message)
            case "progress":
                attempt.progress_s = attempt.last_batch_s = now_s
                self._end_batch(int(message["block"]), message)
            case "share":
                attempt.progress_s, attempt.share_tokens = now_s, int(message["tokens"])
                self.rate.mark(now_s, attempt.tokens_done + attempt.share_tokens)
            case "sequence_failed":
                failed = {int(message["position"]): (int(message["block"]), str(message["failure"]))}
                attempt.unproved_failures = attempt.unproved_failures | failed
            case "durable":
                self.written_bytes += int(message.get("bytes", 0))
            case _:
                self._apply_preparation(message)

    def _apply_preparation(self, message: Mapping[str, Any]) -> None:
        attempt = self.attempt
        match message["kind"]:
            case "placed":
                self.host, self.device = str(message["host"]), str(message["device"])
            case "found":
                self.has_counted_rows = True
            case "resumed":
                self.sequences_resumed = int(message["sequences"])
                self.phase = RankState.LOADING if attempt.loaded_s is None else self.phase
            case "cached":
                self.sequences_cached += int(message["sequences"])
            case "cache_unusable":
                self.cache_problem = str(message["reason"])
            case "model_loaded":
                attempt.loaded_s = attempt.progress_s = time.monotonic()
                self.phase, self.attention_kernel = RankState.COMPUTING, message.get("attention_kernel")
                self.model_load_s, self.processor = float(message["seconds"]), message.get("processor")
                self.rate.restart(attempt.loaded_s)

    def _step(self, now_s: float) -> None:
        self.attempt.step_s = now_s
        self.attempt.progress_s = None if self.attempt.progress_s is None else now_s

    def _begin_batch(self, block: int, message: Mapping[str, Any]) -> None:
        attempt = self.attempt
        if attempt.in_flight.get(block) is not None:  # the sequence before it succeeded alone
            attempt.has_rows = True
        attempt.in_flight[block] = message.get("position")
        sequences, tokens = int(message.get("sequences", 1)), int(message.get("tokens", 0))
        attempt.last_batch = Batch(block=block, sequences=sequences, tokens=tokens)

    def _end_batch(self, block: int, message: Mapping[str, Any]) -> None:
        attempt = self.attempt
        rows, tokens, planned_tokens = (int(message[name]) for name in ("rows", "batch_tokens", "planned_tokens"))
        seconds = float(message["seconds"])
        attempt.in_flight.pop(block, None)
        if rows:
            attempt.has_rows = True
            self.failed_sequences |= attempt.unproved_failures
            attempt.unproved_failures = {}
        self.last_progress = time.time()
        self.sequences += rows
        self.tokens += tokens
        self.batches += 1
        bucket = bisect_left(BATCH_BOUNDS_S, seconds)
        self.batch_counts = tuple(count + (number == bucket) for number, count in enumerate(self.batch_counts))
        self.batch_total_s += seconds
        self.packing += float(message["packing"])
        self.oom_splits += int(message["oom_splits"])
        attempt.tokens_done, attempt.share_tokens = attempt.tokens_done + planned_tokens, 0
        self.rate.mark(time.monotonic(), attempt.tokens_done)


def durable_messages(
    blocks: Iterable[int], *, short: Mapping[int, int], written_bytes: int = 0
) -> Iterator[dict[str, Any]]:
    """
    Yield messages that blocks have become durable, or were found so.

    Args:
        blocks: Numbers of those that hold every sequence.
        short: Number of each that lacks sequences -> the rows that it gives, copies included.
    """
    runs = list(runs_of(sorted(blocks)))
    exceptions = [[block, rows] for block, rows in short.items()]
    yield {"kind": "durable", "bytes": written_bytes, "runs": runs[:ITEMS_IN_A_MESSAGE]}
    for start in range(ITEMS_IN_A_MESSAGE, len(runs), ITEMS_IN_A_MESSAGE):
        yield {"kind": "durable", "runs": runs[start : start + ITEMS_IN_A_MESSAGE]}
    for start in range(0, len(exceptions), ITEMS_IN_A_MESSAGE):
        yield {"kind": "durable", "short": exceptions[start : start + ITEMS_IN_A_MESSAGE]}


def done_messages(blocks: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Yield messages that these blocks have nothing left to compute."""
    yield from _messages("done", blocks)


def claimed_messages(blocks: Iterable[int]) -> Iterator[dict[str, Any]]:
    yield from _messages("claimed", blocks)


def whole_blocks(message: Mapping[str, Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the numbers of the blocks that a message names as whole, int64 (blocks,)."""
    runs = [np.arange(first, last + 1, step, dtype=np.int64) for first, last, step in message.get("runs", ())]
    return np.concatenate([np.empty(0, np.int64), *runs])


def runs_of(numbers: list[int]) -> Iterator[list[int]]:
    """Yield ascending *numbers* as [first, last, step]."""
    start = 0
    while start < len(numbers):
        last = min(start + 1, len(numbers) - 1)
        step = max(1, numbers[last] - numbers[start])
        while last + 1 < len(numbers) and numbers[last + 1] - numbers[last] == step:
            last += 1
        yield [numbers[start], numbers[last], step]
        start = last + 1


def _messages(kind: str, blocks: Iterable[int]) -> Iterator[dict[str, Any]]:
    runs = list(runs_of(sorted(blocks)))
    for start in range(0, len(runs), ITEMS_IN_A_MESSAGE):
        yield {"kind": kind, "runs": runs[start : start + ITEMS_IN_A_MESSAGE]}
