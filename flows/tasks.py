"""
Each stage of the pipeline wrapped once as a task: its name, its retries, what must not be cached.

The files in the run's folder are the truth about what is done, so no task result is cached or persisted: a task that
runs again finds there what the one before has finished.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.logging import get_run_logger
from prefect.runtime import flow_run, task_run
from prefect.states import Failed

from flows.hardware import cluster_here
from flows.parent_lines import log_level
from virnucpro.config import ModelConfig, ResultForm, RunLimits
from virnucpro.errors import VirNucProError
from virnucpro.pipeline.budget_probe import DeviceProbe
from virnucpro.pipeline.device_claim import DeviceClaim
from virnucpro.pipeline.device_task import probe_device_here
from virnucpro.pipeline.multi_gpu_inference import GPU_WORKER
from virnucpro.pipeline.prediction import classify, close_prediction, cut_fragments, decide
from virnucpro.pipeline.prediction_preparation import prepare_prediction
from virnucpro.pipeline.prediction_result import PredictionResult
from virnucpro.pipeline.prediction_run import PredictionRun
from virnucpro.pipeline.prediction_settings import PredictionConfig
from virnucpro.pipeline.rank_runner import run_rank
from virnucpro.pipeline.recovery import MAX_STARTS
from virnucpro.pipeline.result_passes import ResultPasses
from virnucpro.pipeline.run_completion import Reasons, aggregate_run, validate_run
from virnucpro.pipeline.run_preparation import PreparedRun, prepare_run
from virnucpro.pipeline.run_result import RunResult
from virnucpro.pipeline.shard_aggregator import Aggregation
from virnucpro.report.page import write_report
from virnucpro.telemetry.embedding_telemetry import EmbeddingTelemetry
from virnucpro.telemetry.log_lines import log_sentence
from virnucpro.telemetry.ranks import Rank

Result = TypeVar("Result")

PROBE_S = 900.0
"""Seconds that each host has to try one of its GPUs out; it may have to fetch the weights first."""


class RankFailedError(VirNucProError):
    """One attempt at a rank failed; unless it is final, Prefect starts another."""

    def __init__(self, outcome: Rank, *, is_final: bool) -> None:
        self.rank = outcome.rank
        self.is_final = is_final
        super().__init__(f"rank {outcome.rank} on {outcome.device}: {outcome.failure}: {outcome.reason}")


class RankBook:
    """What the task runs of one flow run share: the stop event, what is known of failures, and how each rank went."""

    def __init__(self, run: PreparedRun, limits: RunLimits, telemetry: EmbeddingTelemetry) -> None:
        self.stop = threading.Event()
        self.telemetry = telemetry
        self.recovery = run.recovery(limits, telemetry)
        self.outcomes = telemetry.ranks

    def in_order(self) -> list[Rank]:
        """Return how each rank went, by rank."""
        return list(self.outcomes)


def _another_process_may_help(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
    error = state.result(raise_on_failure=False)
    return isinstance(error, RankFailedError) and not error.is_final


def _rank_run_name() -> str:
    parameters = task_run.parameters
    return f"embed_shard {parameters['rank']} on {parameters['run'].devices[parameters['rank']].label}"


@task(name="build_index", cache_policy=NO_CACHE, persist_result=False)
def build_index(
    fasta_files: list[str],
    output_dir: str,
    model_config: ModelConfig,
    claim: DeviceClaim,
    run_id: str,
    restart: bool,
    result_form: ResultForm,
) -> PreparedRun | State[Any]:
    """Check and index the input, wait for the devices, and settle the plan; see ``prepare_run``."""
    cluster = cluster_here()

    def probe_on_hosts(index_path: str, output_dir: str, config: ModelConfig) -> list[DeviceProbe]:
        assert cluster is not None

        def probe() -> list[DeviceProbe]:
            return probe_device_here(index_path, output_dir, config, run_id=run_id)

        return [found for of_host in cluster.on_a_gpu_of_every_host(probe, timeout_s=PROBE_S) for found in of_host]

    def prepare() -> PreparedRun:
        run = prepare_run(
            fasta_files,
            Path(output_dir),
            model_config,
            claim,
            run_id=run_id,
            probe_elsewhere=None if cluster is None else probe_on_hosts,
            restart=afresh(restart),
            result_form=result_form,
        )
        index = run.open_index()
        get_run_logger().info("%s sequences indexed, token budget %s", f"{len(index):,}", run.model_config.token_budget)
        return run

    return without_traceback(prepare)


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
def embed_shard(run: PreparedRun, rank: int, book: RankBook) -> Rank:
    """Start the rank's process, wait for it, and leave none behind; a retry starts a new one that resumes."""
    logger = get_run_logger()
    recovery = book.recovery

    def hear(rank: int, message: dict[str, Any]) -> None:
        recovery.on_message(rank, message)
        if message.get("kind") == "log":
            logger.log(log_level(message["level"]), "%s", log_sentence(message))

    with recovery.turn(rank, book.stop):
        outcome = run_rank(
            GPU_WORKER,
            recovery.worker_args(rank, run.worker_args, task=str(task_run.id)),
            rank=book.outcomes[rank],
            world_size=run.world_size,
            device=run.devices[rank],
            limits=recovery.limits,
            stop=book.stop,
            on_message=hear,
            oom_kills=recovery.oom_kills,
            next_blocks=recovery.next_blocks,
        )
    is_final = not recovery.another_attempt(outcome)
    if outcome.state != "complete":
        if outcome.state == "failed":
            logger.error("%s", book.telemetry.failure_of(rank))
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


@task(name="aggregate_shards", cache_policy=NO_CACHE, persist_result=False)
def aggregate_shards(
    run: PreparedRun, outcomes: list[Rank], reasons: Reasons, hosts: ResultPasses | None
) -> Aggregation:
    """Put the result together in the order of the input, and list what is missing."""
    return aggregate_run(run, outcomes, reasons, hosts=hosts)


@task(name="validate_embeddings", cache_policy=NO_CACHE, persist_result=False)
def validate_embeddings(run: PreparedRun, aggregation: Aggregation, hosts: ResultPasses | None) -> None:
    """Prove that the result is whole and that the counts add up."""
    validate_run(run, aggregation, hosts=hosts)


@task(name="index_contigs", cache_policy=NO_CACHE, persist_result=False)
def index_contigs(
    input_files: list[str],
    output_dir: str,
    config: PredictionConfig,
    device_type: str,
    run_id: str,
    restart: bool,
) -> PredictionRun | State[Any]:
    """Check and index the contigs; see ``prepare_prediction``."""
    return without_traceback(
        lambda: prepare_prediction(input_files, output_dir, config, device_type, run_id=run_id, restart=afresh(restart))
    )


@task(name="cut_fragments", cache_policy=NO_CACHE, persist_result=False)
def fragments_of(run: PredictionRun) -> State[Any] | None:
    """Cut the contigs into chunks and keep their open frames."""
    return without_traceback(lambda: cut_fragments(run))


@task(name="classify_frames", cache_policy=NO_CACHE, persist_result=False)
def classify_frames(run: PredictionRun) -> State[Any] | None:
    """Join the embeddings of each frame by its id, and score it."""
    return without_traceback(lambda: classify(run))


@task(name="call_contigs", cache_policy=NO_CACHE, persist_result=False)
def call_contigs(run: PredictionRun) -> State[Any] | None:
    """Say of every contig whether it is viral."""
    return without_traceback(lambda: decide(run))


@task(name="report", cache_policy=NO_CACHE, persist_result=False)
def report(run: PredictionRun, embeddings: Sequence[RunResult]) -> PredictionResult | State[Any]:
    """Prove that the counts add up, close the run, and write the report."""
    return without_traceback(lambda: close_prediction(run, embeddings, write_report))


def afresh(restart: bool) -> bool:
    """Whether the folder's work is removed first: a flow run that Prefect starts again goes on with its own."""
    return restart and flow_run.run_count <= 1


def without_traceback(stage: Callable[[], Result]) -> Result | State[Any]:
    """Return what *stage* returns, or its error as a state: of one that is raised Prefect prints the traceback."""
    try:
        return stage()
    except VirNucProError as error:
        return Failed(message=str(error), data=error)
