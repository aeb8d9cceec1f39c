"""
The embedding job as a Prefect flow: build_index -> embed_shard per device -> aggregate_shards -> validate_embeddings.

Completed when every sequence has its row; Completed and named ``Partial`` when rows are missing and that was allowed;
Failed otherwise, with a sentence that counts what is missing and names where the rest is. Running it again in the
same folder continues it.
"""

from concurrent.futures import wait
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.futures import PrefectConcurrentFuture
from prefect.logging import get_run_logger
from prefect.states import Completed
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import Field

from flows.allowed_roots import check_allowed
from flows.artifacts import publish_embedding
from flows.cluster_embedding import OnCluster
from flows.cluster_result import result_on_hosts
from flows.command_line import run_here
from flows.hardware import cluster_here, computing_on
from flows.hooks import say_how_to_continue
from flows.outcome import ended
from flows.parameters import (
    Cache,
    EmbeddingResult,
    Hardware,
    Limits,
    Monitoring,
    SequenceRules,
    metrics_of,
    model_settings,
)
from flows.parent_lines import send_lines_to_prefect
from flows.tasks import RankBook, aggregate_shards, build_index, embed_shard, validate_embeddings
from flows.telemetry import run_telemetry
from virnucpro.config import ModelConfig, ResultForm, RunLimits
from virnucpro.data.index_build import check_readable
from virnucpro.errors import printable
from virnucpro.models.registry import DEFAULT_PROTEIN_MODEL, is_path
from virnucpro.pipeline.cpu_workers import devices_for
from virnucpro.pipeline.device_claim import DeviceClaim
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.multi_gpu_inference import configure_model, new_run_id
from virnucpro.pipeline.run_completion import Reasons, close_run, failure_noted, finished_result, stop_run
from virnucpro.pipeline.run_preparation import PreparedRun
from virnucpro.pipeline.run_result import RunResult
from virnucpro.run_layout import RunLayout
from virnucpro.store.run_lock import RunLock
from virnucpro.telemetry.embedding_telemetry import EmbeddingTelemetry
from virnucpro.telemetry.ranks import Rank
from virnucpro.telemetry.run_telemetry import RunTelemetry

MAX_RANKS = 64
"""Ranks that run at the same time; more than any one machine has devices."""
POLL_S = 0.5
"""Seconds between two moments at which a run that waits for its ranks can be interrupted."""


@flow(
    name="embed",
    flow_run_name="embed into {output_dir}",
    task_runner=ThreadPoolTaskRunner(max_workers=MAX_RANKS),  # type: ignore[arg-type]
    persist_result=False,
    validate_parameters=True,
    on_failure=[say_how_to_continue],
    on_crashed=[say_how_to_continue],
    on_cancellation=[say_how_to_continue],
)
def embed(
    fasta_files: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)],
    output_dir: Annotated[str, Field(min_length=1)],
    model: Annotated[str, Field(min_length=1)] = DEFAULT_PROTEIN_MODEL,
    hardware: Hardware = Hardware(),
    sequences: SequenceRules = SequenceRules(),
    result: EmbeddingResult = EmbeddingResult(),
    cache: Cache = Cache(),
    limits: Limits = Limits(),
    monitoring: Monitoring = Monitoring(),
) -> State[Any]:
    """
    Embed every sequence of the input (proteins, or DNA with a model of DNA) into OUT/embeddings.h5.

    A large result is a folder of shards, OUT/embeddings, instead.

    Args:
        fasta_files: FASTA files of what the model takes, plain or gzip; the result has their order.
        output_dir: Folder of the run: result, manifest, logs. A second run in it continues the first.
        model: A registered name, or the path of a checkpoint; by default the bundled demonstration encoder.
        hardware: Which devices compute, with how many processes, in which precision.
        sequences: How the sequences of the input are read, and what happens to odd ones.
        result: What becomes of the result, also of one that is not whole.
        cache: Where weights and rows of earlier runs are found and kept.
        limits: How long the run may take, and how often it tries again.
        monitoring: Where metrics go, how much is logged, and the timeline.
    """
    send_lines_to_prefect()

    def work() -> State[Any]:
        check_allowed(
            data={
                "fasta_files": fasta_files,
                "output_dir": output_dir,
                "cache_dir": cache.cache_dir,
                "metrics_targets": monitoring.metrics_targets,
            },
            models={"model": model if is_path(model) else None, "weights_dir": cache.weights_dir},
        )
        check_readable(fasta_files)
        metrics = metrics_of(monitoring)

        def configured(device_type: str) -> ModelConfig:
            return configure_model(
                model,
                device_type=device_type,
                max_residues=sequences.max_residues or None,
                long_policy=sequences.long,
                gaps=sequences.gaps,
                stops=sequences.stop,
                on_bad_record=sequences.on_bad_record,
                allow_empty=sequences.allow_empty,
                **model_settings(hardware, cache, monitoring),
            )

        with computing_on(hardware, lambda: configured(CPU.type)) as claimed:
            model_config = configured(claimed.type)
            place = Path(output_dir)
            if cluster_here() is not None:  # whose hosts have another working directory
                place = place.absolute()
                model_config = replace(model_config, weights_path=_absolute(model_config.weights_path))
            workers = cluster.slots if (cluster := cluster_here()) else hardware.workers or None
            claim = devices_for(claimed, model_config, fasta_files, workers=workers)
            with run_telemetry(metrics) as telemetry:
                outcome = _embed_in(RunLayout(place), fasta_files, model_config, claim, telemetry, result, limits)
                publish_embedding(outcome)
            outcome.raise_unless(allow_partial=result.allow_partial)
            return _final_state(outcome)

    return ended(work, time_limit_minutes=limits.time_limit_minutes)


def run_from_command_line(**parameters: Any) -> RunResult:
    """
    Run the flow in this process, against the API that the environment names or an embedded server.

    Args:
        parameters: Of ``embed``.

    Returns:
        How it went.

    Raises:
        VirNucProError: As the plain command would raise, with the same exit code.
    """
    result = run_here(embed, parameters)
    assert isinstance(result, RunResult)
    return result


def _embed_in(
    layout: RunLayout,
    fasta_files: list[str],
    model_config: ModelConfig,
    claim: DeviceClaim,
    telemetry: RunTelemetry,
    result: EmbeddingResult,
    limits: Limits,
) -> RunResult:
    """Run the stages in the folder, which nobody else has meanwhile."""
    run_id = new_run_id()
    with (
        RunLock(layout.lock, run_id=run_id),
        telemetry.running(layout, run_id),
        claim.held(telemetry, run_id=run_id),
    ):
        with telemetry.stage("index", model=model_config.model_name):
            indexed = build_index(
                fasta_files,
                str(layout.output_dir),
                model_config,
                claim,
                run_id,
                result.restart,
                ResultForm(result.form),
                return_state=True,
            )
            run = cast("PreparedRun", indexed.result())
        if run.already_complete:
            return finished_result(run, keep_shards=result.keep_shards)
        return _embed_and_aggregate(
            run, telemetry, worker_retries=limits.worker_retries, keep_shards=result.keep_shards
        )


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if path else path


def _final_state(result: RunResult) -> State[Any]:
    if result.state == "partial":
        missing = f"{result.num_missing:,} of {result.num_records:,} sequences missing"
        return Completed(name="Partial", message=f"{missing}, partial result at {result.output_path}", data=result)
    lost = f"; the others did the work of {printable(result.lost_ranks)}" if result.lost_ranks else ""
    return Completed(message=f"{result.num_rows:,} sequences in {result.output_path}{lost}", data=result)


def _embed_and_aggregate(
    run: PreparedRun, telemetry: RunTelemetry, *, worker_retries: int, keep_shards: bool
) -> RunResult:
    stage = partial(telemetry.stage, model=run.model_config.model_name)
    stages_s = partial(telemetry.stages_s, run.model_config.model_name)
    cluster = cluster_here()
    with failure_noted(run):
        facts = run.facts() if cluster is None else replace(run.facts(), host="")
        embedding = telemetry.begin_embedding(facts)
        limits = RunLimits(attempts=worker_retries + 1)
        computing = (
            _OnThisMachine(run, limits, embedding)
            if cluster is None
            else OnCluster(cluster, run, limits, embedding, telemetry.for_hosts())
        )
        try:
            with stage("embed"):
                computing.embed()
        except BaseException:
            stop_run(run, computing.outcomes(), stages_s=stages_s())
            raise
        finally:
            embedding.over()
        with nullcontext() if cluster is None else result_on_hosts(cluster, run) as hosts:
            with stage("aggregate"):
                aggregation = aggregate_shards(run, computing.outcomes(), computing.reasons(), hosts)
                embedding.aggregated(run.missing_of_blocks(aggregation.missing_positions))
            with stage("validate"):
                validate_embeddings(run, aggregation, hosts)
        return close_run(run, computing.outcomes(), aggregation, stages_s=stages_s(), keep_shards=keep_shards)


def _wait_for(futures: list[PrefectConcurrentFuture[Any]]) -> None:
    """Wait until all have ended; what Prefect raises in this thread lands only between two short waits."""
    while wait([future.wrapped_future for future in futures], timeout=POLL_S).not_done:
        pass


class _OnThisMachine:
    """One task a device of this machine, each of which runs a worker process."""

    def __init__(self, run: PreparedRun, limits: RunLimits, embedding: EmbeddingTelemetry) -> None:
        self._run = run
        self._book = RankBook(run, limits, embedding)

    def embed(self) -> None:
        """
        Run one task a rank to its last attempt.

        When we are told to stop, no worker is left.
        """
        book = self._book
        futures: list[PrefectConcurrentFuture[Any]] = []
        try:
            futures.extend(
                cast("Any", embed_shard.submit(self._run, rank, book)) for rank in range(self._run.world_size)
            )
            _wait_for(futures)
        except BaseException:
            book.stop.set()
            get_run_logger().warning("stopping: workers end at their next batch boundary")
            _wait_for(futures)
            raise

    def outcomes(self) -> list[Rank]:
        """Return how each rank went."""
        return self._book.in_order()

    def reasons(self) -> Reasons:
        """Return what knows why a sequence has no row."""
        return self._book.recovery
