"""
The life of one rank in one process: start it, watch it, say how it ended.

``run_rank`` is the only place where this is done. ``GPUProcessCoordinator`` loops over it with a bounded number of
attempts; the flow's task calls it once and lets Prefect own the attempts.
"""

from __future__ import annotations

import signal
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from virnucpro.pipeline.failures import FailureClass, classify_exit
from virnucpro.pipeline.worker_process import WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Callable
    from threading import Event

    from virnucpro.config import RunLimits
    from virnucpro.pipeline.devices import Device
    from virnucpro.pipeline.failures import OomKills
    from virnucpro.pipeline.worker_process import WorkerFunction

    MessageHandler = Callable[[int, dict[str, Any]], None]

POLL_S = 0.2
"""Seconds between looks at the stop event and the clocks."""


@dataclass(kw_only=True)
class RankOutcome:
    """How one rank went; small and plain, so that it travels between Prefect's tasks and into ``run.json``."""

    rank: int
    """Number of the rank."""
    device: str
    """Its device's label."""
    host: str | None = None
    """Its host, where a run has several."""
    state: str = "failed"
    """complete, failed or stopped."""
    failure: str | None = None
    """Failure class, where it failed."""
    reason: str | None = None
    """One sentence for a person, where it failed."""
    failures: list[str] = field(default_factory=list)
    """Failure class of every process that failed, those that were made up for included."""
    pids: list[int] = field(default_factory=list)
    """Every process that was started for it."""
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
    """Why the embedding cache was not used to the end, in the last attempt that said so."""
    tokens: int = 0
    """Tokens computed, over all attempts."""
    seconds: float = 0.0
    """Wall time, over all attempts."""
    compute_s: float = 0.0
    """Seconds from the loaded model to the last row, over all attempts."""
    attention_kernel: str | None = None
    """Attention kernel of the last process that loaded its model."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens computed over the seconds that computing took."""
        return self.tokens / self.compute_s if self.compute_s else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return plain data for the manifest."""
        return {**asdict(self), "tokens_per_second": round(self.tokens_per_second, 1)}


def run_rank(
    worker_fn: WorkerFunction,
    worker_args: tuple[Any, ...],
    *,
    outcome: RankOutcome,
    world_size: int,
    device: Device,
    limits: RunLimits,
    stop: Event,
    on_message: MessageHandler | None = None,
    on_start: Callable[[WorkerProcess], None] | None = None,
    oom_kills: OomKills | None = None,
) -> RankOutcome:
    """
    Run one process of one rank to its end; no process is left when this returns or raises.

    Args:
        worker_fn: The worker function, of an importable module.
        worker_args: Passed on after ``results_queue``.
        outcome: Of this rank so far; the new attempt is added to it.
        world_size: Number of ranks.
        device: The rank's device.
        limits: When to give up waiting.
        stop: Set by whoever wants the run to end.
        on_message: Called with rank and message for everything that the worker says.
        on_start: Called once with the started process.
        oom_kills: The kernel's count, which explains a process that was killed.

    Returns:
        *outcome*, with this attempt in it.

    Raises:
        ConfigurationError: The worker function cannot be imported by another process.
    """
    worker = WorkerProcess(worker_fn, rank=outcome.rank, world_size=world_size, device=device, worker_args=worker_args)
    outcome.attempts += 1
    outcome.state, outcome.failure, outcome.reason, outcome.exit_code = "failed", None, None, None
    watch = _Watch(outcome, limits, oom_kills)
    try:
        try:
            worker.start()
        except OSError as error:
            watch.give_up(*_why_not_started(error))
            return outcome
        outcome.pids.append(worker.process.pid or 0)
        if on_start is not None:
            on_start(worker)
        while worker.process.exitcode is None and not watch.overdue():
            if stop.is_set():
                worker.end(limits.stop_grace_s)
            for message in worker.wait_for_messages(POLL_S):
                watch.on_message(message)
                if on_message is not None:
                    on_message(outcome.rank, message)
    finally:
        if worker.process.pid is not None:
            worker.kill()
            for message in worker.wait_for_messages(0):
                watch.on_message(message)
                if on_message is not None:
                    on_message(outcome.rank, message)
            outcome.exit_code = worker.process.exitcode
        worker.close()
        watch.conclude(stopping=stop.is_set())
    return outcome


def _why_not_started(error: OSError) -> tuple[FailureClass, str]:
    """Return the class of a process that could not be started, and a sentence."""
    try:
        Path.cwd()
    except OSError:
        what = "the folder that this command was started in was removed: start it again in another folder"
        return FailureClass.CONFIGURATION, what
    return FailureClass.DIED, f"the process could not be started ({error.strerror})"


class _Watch:
    """What is known of a running attempt, and its clocks."""

    def __init__(self, outcome: RankOutcome, limits: RunLimits, oom_kills: OomKills | None) -> None:
        self.outcome = outcome
        self.limits = limits
        self.oom_kills = oom_kills
        self.started_s = self.heard_s = self.getting_ready_s = time.monotonic()
        self.sent_a_message = False
        self.progress_s: float | None = None
        self.loaded_s: float | None = None
        self.last_row_s: float | None = None
        self.computed = (outcome.sequences, outcome.tokens)
        self.report: dict[str, Any] | None = None

    def on_message(self, message: dict[str, Any]) -> None:
        now = self.heard_s = time.monotonic()
        self.sent_a_message = True
        kind = message.get("kind")
        if kind == "resumed":
            self.outcome.sequences_resumed = int(message["sequences"])
        elif kind == "cached":
            self.outcome.sequences_cached += int(message["sequences"])
        elif kind == "cache_unusable":
            self.outcome.cache_problem = str(message["reason"])
        elif kind == "model_loaded":
            self.loaded_s = self.progress_s = now
            self.outcome.attention_kernel = message.get("attention_kernel")
        elif kind == "progress":
            self.progress_s = self.last_row_s = now
            self.outcome.sequences = self.computed[0] + int(message["sequences"])
            self.outcome.tokens = self.computed[1] + int(message["tokens"])
        elif kind in {"start", "step"}:
            self.getting_ready_s = now
            self.progress_s = None if self.progress_s is None else now
        elif kind is None:
            self.report = message

    def overdue(self) -> bool:
        """Whether a limit has passed; notes which."""
        now, limits = time.monotonic(), self.limits
        if now - self.heard_s > limits.heartbeat_timeout_s:
            self.give_up(FailureClass.HUNG, f"no heartbeat for {limits.heartbeat_timeout_s:g} s")
        elif self.progress_s is None and now - self.getting_ready_s > limits.startup_timeout_s:
            self.give_up(FailureClass.HUNG, f"not ready after {limits.startup_timeout_s:g} s")
        elif self.progress_s is not None and now - self.progress_s > limits.progress_timeout_s:
            self.give_up(FailureClass.HUNG, f"no batch finished for {limits.progress_timeout_s:g} s")
        return self.outcome.failure is not None

    def give_up(self, failure: FailureClass, reason: str) -> None:
        self.outcome.failure, self.outcome.reason = failure.value, reason

    def conclude(self, *, stopping: bool) -> None:
        outcome, report = self.outcome, self.report or {}
        outcome.seconds += time.monotonic() - self.started_s
        if self.loaded_s is not None and self.last_row_s is not None:
            outcome.compute_s += self.last_row_s - self.loaded_s
        succeeded = (
            outcome.failure is None and outcome.exit_code == 0 and bool(report) and report.get("status") != "failed"
        )
        if succeeded:
            outcome.state = "complete"
            return
        if outcome.failure is None:
            outcome.failure = classify_exit(
                outcome.exit_code,
                report.get("failure"),
                sent_a_message=self.sent_a_message,
                oom_killed=outcome.exit_code == -signal.SIGKILL
                and self.oom_kills is not None
                and self.oom_kills.explain_one(),
            ).value
        if stopping:
            outcome.state, outcome.failure = "stopped", FailureClass.STOPPED.value
        elif outcome.failure == FailureClass.STOPPED:  # somebody else told the worker to stop
            outcome.failure, outcome.reason = FailureClass.DIED.value, "the process was told to stop, but not by us"
        outcome.reason = outcome.reason or report.get("error") or _ending(outcome.exit_code, outcome.failure)
        outcome.failures.append(outcome.failure)


def _ending(exit_code: int | None, failure: str | None) -> str:
    if exit_code is None:
        return "the process never started"
    if failure == FailureClass.OOM_KILL:
        return "the kernel killed the process because memory ran out"
    if failure == FailureClass.CONFIGURATION:
        return f"the process ended with exit code {exit_code} before it said a word: its traceback is on standard error"
    if exit_code < 0:
        return f"the process was ended by signal {-exit_code}"
    return f"the process ended with exit code {exit_code} and without a report"
