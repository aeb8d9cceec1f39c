"""
The stages and ranks of a run as Prefect tasks: their names, their retries, what must not be cached.

The files in the run's folder are the truth about what is done, so no task result is cached or persisted: a task that
runs again finds there what the one before has finished.
"""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from typing import Any, TypeVar, cast

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.futures import PrefectConcurrentFuture
from prefect.logging import get_run_logger
from prefect.runtime import flow_run, task_run
from prefect.states import Failed

from flows.run.telemetry import log_level
from virnucpro.config import RunLimits
from virnucpro.errors import VirNucProError
from virnucpro.pipeline.executor import GPU_WORKER, Executor
from virnucpro.pipeline.run.run_completion import Reasons
from virnucpro.pipeline.run.run_preparation import PreparedRun
from virnucpro.pipeline.run.stages import StageRunner
from virnucpro.pipeline.work.rank_runner import run_rank
from virnucpro.pipeline.work.recovery import Recovery
from virnucpro.settings import MAX_STARTS
from virnucpro.telemetry.embedding_telemetry import EmbeddingTelemetry
from virnucpro.telemetry.log_lines import log_sentence
from virnucpro.telemetry.ranks import Rank

Outcome = TypeVar("Outcome")

POLL_S = 0.5
"""Seconds between two moments at which a run that waits for its ranks can be interrupted."""


def as_tasks(names: Mapping[str, str]) -> StageRunner:
    """Return what does each stage as a task of this flow run; *names*: stage -> name of the task."""

    def run(name: str, work: Callable[[], Outcome], /) -> Outcome:
        stage = task(name=names[name], cache_policy=NO_CACHE, persist_result=False)(without_traceback)
        return cast("Outcome", stage(work, return_state=True).result())

    return run


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
    return f"embed_shard {parameters['rank']} on {parameters['run'].devices[parameters['rank']].label}"


@task(
    name="embed_shard",
    task_run_name=_rank_run_name,
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=MAX_STARTS - 1,  # the retry condition says when to give up
    retry_delay_seconds=[1, 2, 5],
    retry_jitter_factor=0.5,
    retry_condition_fn=_another_process_may_help,
)
def embed_shard(
    run: PreparedRun, rank: int, recovery: Recovery, telemetry: EmbeddingTelemetry, stop: threading.Event
) -> Rank:
    """Start the rank's process, wait for it, and leave none behind; a retry starts a new one that resumes."""
    logger = get_run_logger()

    def on_message(rank: int, message: dict[str, Any]) -> None:
        recovery.on_message(rank, message)
        if message.get("kind") == "log":
            logger.log(log_level(message["level"]), "%s", log_sentence(message))

    with recovery.turn(rank, stop):
        outcome = run_rank(
            GPU_WORKER,
            recovery.worker_args(rank, run.worker_args, task=str(task_run.id)),
            rank=recovery.ranks[rank],
            world_size=run.world_size,
            device=run.devices[rank],
            limits=recovery.limits,
            stop=stop,
            on_message=on_message,
            oom_kills=recovery.oom_kills,
            next_blocks=recovery.next_blocks,
        )
    is_final = not recovery.another_attempt(outcome)
    if outcome.state != "complete":
        if outcome.state == "failed":
            logger.error("%s", telemetry.failure_of(rank))
        else:
            logger.warning("rank %s: %s", rank, outcome.reason)
        raise RankFailedError(outcome, is_final=is_final)
    logger.info(
        "rank %s: %s sequences computed, %s resumed, %.0f tokens/s",
        rank,
        f"{outcome.sequences:,}",
        f"{outcome.sequences_resumed:,}",
        outcome.tokens_per_second,
    )
    return outcome


class TaskRanks(Executor):
    """One task a device of this machine, each of which runs a worker process."""

    def __init__(self) -> None:
        self._recovery: Recovery | None = None

    def embed(self, run: PreparedRun, limits: RunLimits, telemetry: EmbeddingTelemetry, stop: threading.Event) -> None:
        """
        Run one task a rank to its last attempt.

        When it is interrupted, no worker is left.
        """
        self._recovery = recovery = run.recovery(limits, telemetry)
        futures: list[PrefectConcurrentFuture[Any]] = []
        try:
            futures.extend(
                cast("Any", embed_shard.submit(run, rank, recovery, telemetry, stop)) for rank in range(run.world_size)
            )
            _wait_for(futures)
        except BaseException:
            stop.set()
            get_run_logger().warning("stopping: workers end at their next batch boundary")
            _wait_for(futures)
            raise

    def outcomes(self) -> list[Rank]:
        """See ``Executor.outcomes``."""
        return [] if self._recovery is None else list(self._recovery.ranks)

    def reasons(self) -> Reasons:
        """See ``Executor.reasons``."""
        assert self._recovery is not None
        return self._recovery


def _wait_for(futures: list[PrefectConcurrentFuture[Any]]) -> None:
    """Wait until all have ended; what Prefect raises in this thread lands only between two short waits."""
    while wait([future.wrapped_future for future in futures], timeout=POLL_S).not_done:
        pass
