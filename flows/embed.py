"""
The embedding run as a Prefect flow: a form, its stages as tasks, and its ranks as tasks of this machine or a cluster.

Completed when every sequence has its row; Completed and named ``Partial`` when rows are missing and that was allowed;
Failed otherwise, with a message that counts what is missing and names where the rest is. Running it again in the same
folder resumes it.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import Field

from flows.clusters.cluster_embedding import OnCluster
from flows.clusters.hardware import cluster_here, computing_on
from flows.command_line import run_here
from flows.run.allowed_roots import check_allowed
from flows.run.artifacts import publish_embedding
from flows.run.hooks import say_how_to_continue
from flows.run.outcome import ended
from flows.run.parent_lines import send_lines_to_prefect
from flows.run.telemetry import run_telemetry
from flows.tasks import TaskRanks, as_tasks, from_scratch
from virnucpro.choices import DEFAULT_PROTEIN_MODEL
from virnucpro.config import ModelConfig, RunLimits
from virnucpro.data.index.build import check_readable
from virnucpro.errors import printable
from virnucpro.models.configuration import configure_model
from virnucpro.models.registry import is_path
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.hardware.device_claim import devices_for
from virnucpro.pipeline.multi_gpu_inference import run_embedding
from virnucpro.pipeline.run.run_result import RunResult
from virnucpro.pipeline.run.stages import EmbeddingJob
from virnucpro.settings import Cache, EmbeddingResult, EmbeddingSettings, Hardware, Limits, Monitoring, SequenceRules
from virnucpro.store.results.forms import require_form
from virnucpro.telemetry.metrics.options import metrics_options

MAX_RANKS = 64
"""Ranks that run at the same time; more than any one machine has devices."""
TASKS = {"index": "build_index", "aggregate": "aggregate_shards", "validate": "validate_embeddings"}
"""Stage -> name of its task; the ranks' is ``embed_shard``."""


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
    settings = EmbeddingSettings(
        model=model,
        hardware=hardware,
        sequences=sequences,
        result=result,
        cache=cache,
        limits=limits,
        monitoring=monitoring,
    )
    work = partial(_embed, fasta_files, output_dir, settings)
    return ended(work, time_limit_minutes=limits.time_limit_minutes)


def _embed(fasta_files: list[str], output_dir: str, settings: EmbeddingSettings) -> State[Any]:
    model, hardware, result = settings.model, settings.hardware, settings.result
    check_allowed(
        data={
            "fasta_files": fasta_files,
            "output_dir": output_dir,
            "cache_dir": settings.cache.cache_dir,
            "metrics_targets": settings.monitoring.metrics_targets,
        },
        models={"model": model if is_path(model) else None, "weights_dir": settings.cache.weights_dir},
    )
    check_readable(fasta_files)
    require_form(result.form)
    metrics = metrics_options(settings.monitoring)

    def configured(device_type: str) -> ModelConfig:
        return configure_model(settings, device_type=device_type)

    with computing_on(hardware, lambda: configured(CPU.type)) as claimed:
        model_config = configured(claimed.type)
        place, cluster = Path(output_dir), cluster_here()
        if cluster is not None:  # whose hosts have another working directory
            place = place.absolute()
            model_config = replace(model_config, weights_path=_absolute(model_config.weights_path))
        workers = cluster.slots if cluster is not None else hardware.workers or None
        with run_telemetry(metrics) as telemetry:
            outcome = run_embedding(
                fasta_files,
                place,
                model_config,
                devices_for(claimed, model_config, fasta_files, workers=workers),
                limits=RunLimits.of(settings.limits),
                executor=TaskRanks() if cluster is None else OnCluster(cluster, telemetry.for_hosts),
                stage_runner=as_tasks(TASKS),
                telemetry=telemetry,
                keep_shards=result.keep_shards,
                restart=from_scratch(result.restart),
                result_form=result.form,
            )
            publish_embedding(outcome)
        outcome.raise_unless(allow_partial=result.allow_partial)
        return _final_state(outcome)


def embedding_flow(parameters: Mapping[str, Mapping[str, Any]]) -> Callable[[EmbeddingJob], RunResult]:
    """
    Return what does an embedding run within another flow: as a flow run of its own.

    Args:
        parameters: ``dna`` and ``protein`` -> parameters of ``embed`` beside input and folder.
    """

    def run(job: EmbeddingJob) -> RunResult:
        state: State[Any] = cast("Any", embed)(
            fasta_files=[str(path) for path in job.files],
            output_dir=str(job.folder),
            **parameters[job.kind],
            return_state=True,
        )
        outcome = state.result(raise_on_failure=False)
        if isinstance(outcome, BaseException):
            raise outcome
        assert isinstance(outcome, RunResult)
        return outcome

    return run


def run_from_command_line(**parameters: Any) -> RunResult:
    """Run the flow in this process; see ``run_here``."""
    result = run_here(embed, parameters)
    assert isinstance(result, RunResult)
    return result


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if path else path


def _final_state(result: RunResult) -> State[Any]:
    if result.state == "partial":
        missing = f"{result.num_missing:,} of {result.num_records:,} sequences missing"
        return Completed(name="Partial", message=f"{missing}, partial result at {result.output_path}", data=result)
    lost = f"; the others did the work of {printable(result.lost_ranks)}" if result.lost_ranks else ""
    return Completed(message=f"{result.num_rows:,} sequences in {result.output_path}{lost}", data=result)
