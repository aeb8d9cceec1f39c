"""
The stages and ranks of a run as Prefect tasks: their names, their retries, what must not be cached.

The files in the run's folder are the truth about what is done, so no task result is cached or persisted: a task that
runs again finds there what the one before has finished.
"""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, cast
from uuid import UUID

from prefect import Task, allow_failure, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.futures import PrefectConcurrentFuture
from prefect.logging import get_run_logger
from prefect.runtime import flow_run, task_run
from prefect.states import Cancelled, Failed, Running

from flows.run.api import client_that_asks_once
from flows.run.telemetry import log_level
from virnucpro.config import RunLimits
from virnucpro.errors import VirNucProError
from virnucpro.pipeline.executor import Executor
from virnucpro.pipeline.run.run_completion import Reasons
from virnucpro.pipeline.run.run_result import RunResult
from virnucpro.pipeline.run.stages import StageRunner
from virnucpro.pipeline.work.rank_runner import run_worker
from virnucpro.pipeline.work.recovery import Recovery
from virnucpro.pipeline.work.work import Work
from virnucpro.stage_names import StageNames
from virnucpro.telemetry.log_lines import log_sentence
from virnucpro.telemetry.ranks import Rank
from virnucpro.telemetry.snapshot import SEQUENCES
from virnucpro.telemetry.work_telemetry import WorkTelemetry

Outcome = TypeVar("Outcome")

POLL_S = 0.5
"""Seconds between two moments at which a run that waits for its ranks can be interrupted."""
RETRY_DELAYS_S: list[float] = [1, 2, 5]
"""Seconds between two processes of a rank."""


class TaskStages(StageRunner):
    """Does each stage as a task of this flow run, each following the one before, as Prefect's graph shows."""

    def __init__(self, names: Mapping[str, StageNames]) -> None:
        self._names = names
        self._before: list[object] = []

    def __call__(self, name: str, work: Callable[[], Outcome], /) -> Outcome:
        title = self._names[name].task
        stage = task(name=title, task_run_name=title, cache_policy=NO_CACHE, persist_result=False)(without_traceback)
        state = stage(work, return_state=True, wait_for=self.before)
        self.did(state)
        return cast("Outcome", state.result())

    @property
    def before(self) -> Any:
        """What the next task waits for, failed or not: the run itself decides whether it continues."""
        return [allow_failure(one) for one in self._before]

    def did(self, *done: State[Any] | RunResult) -> None:
        """Record what was done next: final states of tasks, or what a flow run within this one has returned."""
        self._before = [
            one for one in done if not isinstance(one, State) or one.is_completed() or one.is_failed()
        ]  # a task that was interrupted would hold up the next


def without_traceback(work: Callable[[], Any]) -> Any:
    """Return what *work* returns, or its error as a state: of one that is raised Prefect prints the traceback."""
    try:
        return work()
    except VirNucProError as error:
        return Failed(message=str(error), data=error)


def from_scratch(restart: bool) -> bool:
    """Whether the folder's files are removed first: a flow run that Prefect starts again resumes its own."""
    return restart and flow_run.run_count <= 1


class RankFailedError(VirNucProError):
    """One attempt at a rank failed; unless it is final, Prefect starts another."""

    def __init__(self, outcome: Rank, *, is_final: bool) -> None:
        self.rank = outcome.rank
        self.is_final = is_final
        super().__init__(f"rank {outcome.rank} on {outcome.device}: {outcome.failure}: {outcome.reason}")


def _another_process_may_help(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
    error = state.result(raise_on_failure=False)
    return isinstance(error, RankFailedError) and not error.is_final


def _rank_run_name() -> str:
    parameters = task_run.parameters
    work, rank = parameters["work"], parameters["rank"]
    return f"{work.task} {rank} on {work.devices[rank].label}"


@task(
    task_run_name=_rank_run_name,
    cache_policy=NO_CACHE,
    persist_result=False,
    retry_delay_seconds=RETRY_DELAYS_S,
    retry_jitter_factor=0.5,
    retry_condition_fn=_another_process_may_help,
)
def compute_rank(
    work: Work, rank: int, recovery: Recovery, telemetry: WorkTelemetry, stop: threading.Event
) -> Rank | State[Any]:
    """
    Start the rank's process, wait for it, and leave none behind; a retry starts a new one that resumes.

    Work too small for a process is done in this one, and its error is the state that is returned. The limit is for
    processes in a row that compute nothing. With the retries of the task used up, a process after one that computed
    something is started here.
    """
    if work.is_small:
        done: Rank | State[Any] = without_traceback(partial(_compute_here, work, recovery, stop))
        return done
    outcome, logger = recovery.ranks[rank], get_run_logger()
    if task_run.run_count > 1:
        _say_why_again(outcome)

    def on_message(_rank: int, message: dict[str, Any]) -> None:
        if message.get("kind") == "log":
            logger.log(log_level(message["level"]), "%s", log_sentence(message))

    def on_end(starts_again: bool) -> None:
        _log_end(outcome, telemetry)
        if outcome.state == "failed":
            if not starts_again or task_run.run_count < recovery.limits.attempts:
                raise RankFailedError(outcome, is_final=not starts_again)
            stop.wait(RETRY_DELAYS_S[-1])

    run_worker(
        work.worker_fn,
        work.worker_args,
        rank=outcome,
        policy=recovery,
        world_size=work.world_size,
        device=work.devices[rank],
        stop=stop,
        task=str(task_run.id),
        on_message=on_message,
        on_end=on_end,
    )
    if outcome.state == "stopped":
        return Cancelled(message=f"rank {rank} was stopped; what is finished is kept")
    if outcome.state != "complete":
        raise RankFailedError(outcome, is_final=True)
    return outcome


def _say_why_again(outcome: Rank) -> None:
    """Give the state of this attempt a message: Prefect's own, of a retry, has none."""
    with suppress(Exception), client_that_asks_once() as client:  # the task's log has it
        why: State[Any] = Running(name="Retrying", message=f"{outcome.failure}: {outcome.reason}")
        client.set_task_run_state(UUID(str(task_run.id)), why, force=True)


def _compute_here(work: Work, recovery: Recovery, stop: threading.Event) -> Rank:
    work.compute_here(recovery, stop)
    return recovery.ranks[0]


def _log_end(outcome: Rank, telemetry: WorkTelemetry) -> None:
    logger, facts = get_run_logger(), telemetry.facts
    if outcome.state == "failed":
        logger.error("%s", telemetry.failure_of(outcome.rank))
    elif outcome.state != "complete":
        logger.warning("rank %s: %s", outcome.rank, outcome.reason)
    else:
        logger.info(
            "rank %s: %s %s computed, %s resumed, %.0f %s/s",
            outcome.rank,
            f"{outcome.sequences if facts.counts == SEQUENCES else outcome.rows:,}",
            facts.counts,
            f"{outcome.sequences_resumed:,}",
            outcome.tokens_per_second,
            facts.measure,
        )


class TaskRanks(Executor):
    def __init__(self, stages: TaskStages) -> None:
        self._stages = stages
        self._recovery: Recovery | None = None

    def compute(self, work: Work, limits: RunLimits, telemetry: WorkTelemetry, stop: threading.Event) -> None:
        """Run one task a rank to its last attempt; leave no worker. Raises the error of work without a process."""
        self._recovery = recovery = work.recovery(limits, telemetry)
        rank_task = compute_rank.with_options(name=work.task, retries=limits.attempts - 1)
        start = partial(rank_task.submit, wait_for=self._stages.before)
        futures: list[PrefectConcurrentFuture[Any]] = []
        try:
            futures.extend(cast("Any", start(work, rank, recovery, telemetry, stop)) for rank in range(work.world_size))
            _wait_for(futures)
        except BaseException:
            stop.set()
            get_run_logger().warning("stopping: workers end at their next batch boundary")
            _wait_for(futures)
            raise
        for future in futures:
            future.wait()  # else its state is that of the server, which may not know yet
        self._stages.did(*(future.state for future in futures))
        if work.is_small:
            futures[0].result()

    def outcomes(self) -> list[Rank]:
        return [] if self._recovery is None else list(self._recovery.ranks)

    def reasons(self) -> Reasons:
        assert self._recovery is not None
        return self._recovery


def _wait_for(futures: list[PrefectConcurrentFuture[Any]]) -> None:
    """Wait until all have ended; what Prefect raises in this thread lands only between two short waits."""
    while wait([future.wrapped_future for future in futures], timeout=POLL_S).not_done:
        pass
