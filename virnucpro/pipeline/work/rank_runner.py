"""
The life of one worker: its processes, one after the other, until it is complete or its policy starts no more.

``run_rank`` starts one process, watches it, and notes in the record how it ended. ``run_worker`` is the one loop over
processes: for workers of this machine, of a Prefect task, and of a host of a cluster.
"""

from __future__ import annotations

import signal
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from virnucpro.pipeline.failures import FailureClass, OomKills, classify_exit
from virnucpro.pipeline.work.warm_process import BECOMES, take_waiting
from virnucpro.pipeline.work.worker_process import WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from threading import Event

    from virnucpro.config import RunLimits
    from virnucpro.pipeline.devices import Device
    from virnucpro.pipeline.work.worker_process import WorkerFunction
    from virnucpro.telemetry.ranks import Rank

    MessageHandler = Callable[[int, dict[str, Any]], None]
    BlockSource = Callable[[int], list[dict[str, Any]]]

POLL_S = 0.2
"""Seconds between looks at the stop event and the clocks."""
WAITING_POLL_S = 0.05
"""The same, while the process waits for blocks that another may give back."""


class RetryPolicy:
    """Up to ``limits.attempts`` processes for each worker, while a retry may help; called from the workers' threads."""

    run_id: str = ""
    """Of the run whose waiting processes are taken first."""

    def __init__(self, ranks: Sequence[Rank], limits: RunLimits, oom_kills: OomKills | None = None) -> None:
        self.ranks, self.limits = ranks, limits
        self.oom_kills = OomKills() if oom_kills is None else oom_kills

    def worker_args(self, rank: int, args: tuple[Any, ...], *, task: str = "") -> tuple[Any, ...]:  # noqa: ARG002
        """Return what the next process of *rank* gets for *args*; *task*: the orchestrator's name of what starts it."""
        return args

    def turn(self, rank: int, stop: Event) -> AbstractContextManager[None]:  # noqa: ARG002
        """Wait until *rank* may have a process; it ends with the context."""
        return nullcontext()

    def on_message(self, rank: int, message: dict[str, Any]) -> None:
        """Called with a message that was applied to its rank before."""

    def next_blocks(self, rank: int) -> list[dict[str, Any]]:  # noqa: ARG002
        """Return the answer to a process of *rank* that asks for blocks; none while it has to wait."""
        return []

    def another_attempt(self, rank: Rank) -> bool:
        """Learn from a process that has ended; whether another one is to be started for its rank."""
        failure = FailureClass(rank.failure or FailureClass.DIED)
        return rank.state == "failed" and failure.is_worth_a_retry and rank.attempts < self.limits.attempts


def run_worker(
    worker_fn: WorkerFunction,
    worker_args: tuple[Any, ...],
    *,
    rank: Rank,
    policy: RetryPolicy,
    world_size: int,
    device: Device,
    stop: Event,
    task: str = "",
    on_message: MessageHandler = lambda *_: None,
    on_start: Callable[[WorkerProcess], None] = lambda _: None,
    on_end: Callable[[bool], None] = lambda _: None,
) -> None:
    """
    Run the processes of one worker until it is complete, *stop* is set, or *policy* starts no more.

    Args:
        on_message: Called with the rank's number and each message, after the policy.
        on_end: Called after each process, with whether another one follows; what it raises ends the loop.
    """

    def take(number: int, message: dict[str, Any]) -> None:
        policy.on_message(number, message)
        on_message(number, message)

    if stop.is_set():
        rank.state, rank.failure = "stopped", FailureClass.STOPPED.value
    starts_again = True
    while starts_again and not stop.is_set():
        with policy.turn(rank.rank, stop):
            args = policy.worker_args(rank.rank, worker_args, task=task)
            run_rank(
                worker_fn,
                args,
                rank=rank,
                world_size=world_size,
                device=device,
                limits=policy.limits,
                stop=stop,
                on_message=take,
                on_start=on_start,
                oom_kills=policy.oom_kills,
                next_blocks=policy.next_blocks,
                warm=take_waiting(policy.run_id, device, worker_fn, (rank.rank, world_size, args)),
            )
        starts_again = policy.another_attempt(rank)
        on_end(starts_again)


def run_rank(
    worker_fn: WorkerFunction,
    worker_args: tuple[Any, ...],
    *,
    rank: Rank,
    world_size: int,
    device: Device,
    limits: RunLimits,
    stop: Event,
    on_message: MessageHandler = lambda *_: None,
    on_start: Callable[[WorkerProcess], None] = lambda _: None,
    oom_kills: OomKills | None = None,
    next_blocks: BlockSource = lambda _: [],
    warm: WorkerProcess | None = None,
    may_wait: bool = False,
) -> Rank:
    """
    Run one process of one rank to its end, and return *rank*; no process is left when this returns or raises.

    Args:
        rank: The record; the new attempt is added to it.
        stop: Ends the process at its next batch boundary.
        on_message: Called with the rank's number and each message, after it was applied to *rank*.
        next_blocks: Called with the rank's number when its process asks for blocks, until it returns an answer.
        warm: A process that waited and goes on with this work, instead of a new one.
        may_wait: Leave a process whose report says what it becomes: it counts as complete.

    Raises:
        ConfigurationError: The worker function cannot be imported by another process.
    """
    worker = warm or WorkerProcess(
        worker_fn, rank=rank.rank, world_size=world_size, device=device, worker_args=worker_args
    )
    is_left = False
    rank.begin_attempt(None if warm is None else warm.started_s)

    def take_messages(timeout_s: float) -> None:
        for message in worker.wait_for_messages(timeout_s):
            rank.apply(message)
            on_message(rank.rank, message)

    def answer() -> None:
        if rank.attempt.wants is not None and (answers := next_blocks(rank.rank)):
            rank.attempt.wants = None
            worker.answer(answers)

    try:
        if warm is None and not _has_started(worker, rank):
            return rank
        rank.pids.append(worker.process.pid or 0)
        on_start(worker)
        while not is_left and worker.process.exitcode is None and not _is_overdue(rank, limits):
            if stop.is_set():
                worker.end(limits.stop_grace_s)
            answer()  # may take long; what came meanwhile is read before anything is judged overdue
            take_messages(POLL_S if rank.attempt.wants is None else WAITING_POLL_S)
            is_left = may_wait and BECOMES in (rank.attempt.report or {})
    finally:
        if not is_left:
            if worker.process.pid is not None:
                worker.kill()
                take_messages(0)
            worker.close()
        rank.exit_code = 0 if is_left else worker.process.exitcode
        _conclude(rank, oom_kills, stopping=stop.is_set())
    return rank


def _has_started(worker: WorkerProcess, rank: Rank) -> bool:
    try:
        worker.start()
    except OSError as error:
        rank.failure, rank.reason = FailureClass.DIED.value, f"the process could not be started ({error.strerror})"
        try:
            Path.cwd()
        except OSError:
            what = "the folder that this command was started in was removed: start it again in another folder"
            rank.failure, rank.reason = FailureClass.CONFIGURATION.value, what
        return False
    return True


def _is_overdue(rank: Rank, limits: RunLimits) -> bool:
    """Whether the running process has passed a time limit, which is noted in the record."""
    attempt, now_s = rank.attempt, time.monotonic()
    if now_s - attempt.message_s > limits.heartbeat_timeout_s:
        rank.reason = f"no heartbeat for {limits.heartbeat_timeout_s:g} s"
    elif attempt.progress_s is None and now_s - attempt.step_s > limits.startup_timeout_s:
        rank.reason = f"not ready after {limits.startup_timeout_s:g} s"
    elif attempt.progress_s is not None and now_s - attempt.progress_s > limits.progress_timeout_s:
        rank.reason = f"no batch finished for {limits.progress_timeout_s:g} s"
    else:
        return False
    rank.failure = FailureClass.HUNG.value
    return True


def _conclude(rank: Rank, oom_kills: OomKills | None, *, stopping: bool) -> None:
    """Record how the process ended, once it is gone."""
    report = rank.attempt.report or {}
    if rank.failure is None and rank.exit_code == 0 and report and report.get("status") != "failed":
        rank.state = "complete"
        rank.end_attempt()
        return
    if rank.failure is None:
        rank.failure = classify_exit(
            rank.exit_code,
            report.get("failure"),
            sent_a_message=rank.attempt.has_messages,
            oom_killed=rank.exit_code == -signal.SIGKILL and oom_kills is not None and oom_kills.explain_one(),
        ).value
    if stopping:
        rank.state, rank.failure = "stopped", FailureClass.STOPPED.value
    elif rank.failure == FailureClass.STOPPED:  # another process sent the signal
        rank.failure, rank.reason = FailureClass.DIED.value, "another process stopped it"
    rank.reason = rank.reason or report.get("error") or _ending(rank.exit_code, rank.failure)
    rank.failures.append(rank.failure)
    rank.end_attempt()


def _ending(exit_code: int | None, failure: str | None) -> str:
    if exit_code is None:
        return "the process never started"
    if failure == FailureClass.OOM_KILL:
        return "the kernel killed the process because memory ran out"
    if failure == FailureClass.HOST_OUT_OF_MEMORY:
        return f"out of memory: the process ended with {exit_code} within ulimit -v: allow more, or use fewer --workers"
    if failure == FailureClass.CONFIGURATION:
        return (
            f"the process ended with exit code {exit_code} before its first message: its traceback is on standard error"
        )
    if exit_code < 0:
        return f"the process was ended by signal {-exit_code}"
    return f"the process ended with exit code {exit_code} and without a report"
