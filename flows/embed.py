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
from prefect.utilities.engine import link_state_to_flow_run_result

from flows.clusters.hardware import cluster_here, computing_on
from flows.clusters.on_cluster import OnCluster
from flows.run.api import run_here
from flows.run.artifacts import publish_embedding
from flows.run.form import RUN, OutputFolder, PathTexts, check_paths, form_of, titled
from flows.run.names import run_name
from flows.run.outcome import ended
from flows.run.telemetry import run_telemetry
from flows.tasks import TaskRanks, TaskStages, from_scratch
from virnucpro.config import RunLimits
from virnucpro.data.index.build import check_readable
from virnucpro.errors import printable
from virnucpro.knobs import Box
from virnucpro.models.configuration import configure_model
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.hardware.device_claim import devices_for
from virnucpro.pipeline.multi_gpu_inference import run_embedding
from virnucpro.pipeline.run.run_result import RunResult
from virnucpro.pipeline.run.stages import EmbeddingJob
from virnucpro.settings import EmbeddingSettings, Monitoring, RunSettings
from virnucpro.stage_names import EMBEDDING
from virnucpro.store.results.forms import require_form
from virnucpro.telemetry.metrics.options import metrics_options

MAX_RANKS = 64
"""Ranks that run at the same time; more than any one machine has devices."""


@flow(
    name="embed",
    flow_run_name=run_name("embed into {output_dir}"),
    task_runner=ThreadPoolTaskRunner(max_workers=MAX_RANKS),  # type: ignore[arg-type]
    **RUN,
)
@form_of(EmbeddingSettings)
def embed(
    fasta_files: Annotated[PathTexts, titled("FASTA files")], output_dir: OutputFolder, **fields: Any
) -> State[Any]:
    """
    Embed every sequence of the input (proteins, or DNA with a model of DNA) into OUT/embeddings.h5.

    A large result is a folder of shards, OUT/embeddings, instead.

    Args:
        fasta_files: FASTA files of what the model takes, plain or compressed; the result has their order.
        output_dir: Folder of the run: result, manifest, logs. A second run in it continues the first.
        model: A registered name, or the path of a checkpoint; by default the bundled demonstration encoder.
        hardware: Which devices compute, with how many processes, in which precision.
        sequences: How the sequences of the input are read, and what happens to odd ones.
        result: What becomes of the result, also of one that is not whole.
        cache: Where weights and rows of earlier runs are found and kept.
        limits: How long the run may take, and how often workers are retried.
        monitoring: Where metrics go, how much is logged, and the timeline.
    """
    settings = EmbeddingSettings(**fields)
    return ended(partial(_embed, fasta_files, output_dir, settings), settings.limits)


def _embed(fasta_files: list[str], output_dir: str, settings: EmbeddingSettings) -> State[Any]:
    hardware, result = settings.hardware, settings.result
    check_paths(settings, encoders={"model": settings.model}, fasta_files=fasta_files, output_dir=output_dir)
    check_readable(fasta_files)
    require_form(result.form)
    metrics = metrics_options(settings.monitoring)
    with computing_on(hardware, partial(configure_model, settings, device_type=CPU.type)) as claimed:
        model_config = configure_model(settings, device_type=claimed.type)
        place, cluster = Path(output_dir), cluster_here()
        if cluster is not None:  # its hosts have another working directory
            place = place.absolute()
            if weights := model_config.weights_path:
                model_config = replace(model_config, weights_path=str(Path(weights).absolute()))
        workers = cluster.slots if cluster is not None else hardware.workers or None
        stages = TaskStages(EMBEDDING)
        with run_telemetry(metrics) as telemetry:
            outcome = run_embedding(
                fasta_files,
                place,
                model_config,
                devices_for(claimed, model_config, fasta_files, workers=workers),
                limits=RunLimits.of(settings.limits),
                executor=TaskRanks(stages) if cluster is None else OnCluster(cluster),
                stage_runner=stages,
                telemetry=telemetry,
                keep_shards=result.keep_shards,
                restart=from_scratch(result.restart),
                result_form=result.form,
            )
            publish_embedding(outcome, model_config.model_name)
        outcome.raise_unless(allow_partial=result.allow_partial)
        return _final_state(outcome)


def embedding_flow(
    settings: RunSettings, encoders: Mapping[str, str], stages: TaskStages, **fields: Box
) -> Callable[[EmbeddingJob], RunResult]:
    """Return what does an embedding run as a flow run in another flow; *encoders*: kind -> name or path."""
    shown = settings.monitoring
    fields |= {
        "hardware": settings.hardware,
        "cache": settings.cache,
        "monitoring": Monitoring(log_level=shown.log_level, profile=shown.profile),
        "limits": settings.limits.model_copy(update={"time_limit_minutes": 0}),  # the flow's own holds within it, too
    }

    def run(job: EmbeddingJob) -> RunResult:
        state: State[Any] = cast("Any", embed)(
            fasta_files=[str(path) for path in job.files],
            output_dir=str(job.folder),
            model=encoders[job.kind],
            **fields,
            return_state=True,
            wait_for=stages.before,
        )
        outcome = state.result(raise_on_failure=False)
        if isinstance(outcome, BaseException):
            raise outcome
        assert isinstance(outcome, RunResult)
        link_state_to_flow_run_result(state, outcome)  # as Prefect does where it returns the result
        stages.did(outcome)
        return outcome

    return run


run_from_command_line = partial(run_here, embed)


def _final_state(result: RunResult) -> State[Any]:
    if result.state == "partial":
        missing = f"{result.num_missing:,} of {result.num_records:,} sequences missing"
        return Completed(name="Partial", message=f"{missing}, partial result at {result.output_path}", data=result)
    lost = f"; the remaining workers did the work of {printable(result.lost_ranks)}" if result.lost_ranks else ""
    return Completed(message=f"{result.num_rows:,} sequences in {result.output_path}{lost}", data=result)
