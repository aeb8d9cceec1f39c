"""
The prediction as a Prefect flow: a form, its stages as tasks, and each embedding run as a run of the flow ``embed``.

The final states are those of ``embed``: Completed, Completed and named ``Partial``, or Failed with the message that the
command line would print.
"""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed
from pydantic import Field

from flows.clusters.hardware import computing_on, kept
from flows.command_line import run_here
from flows.embed import embedding_flow
from flows.run.allowed_roots import check_allowed
from flows.run.artifacts import publish_prediction
from flows.run.hooks import say_how_to_continue
from flows.run.outcome import ended
from flows.run.parent_lines import send_lines_to_prefect
from flows.run.telemetry import run_telemetry
from flows.tasks import as_tasks, from_scratch
from virnucpro.choices import DEFAULT_CLASSIFIER, ResultForm
from virnucpro.data.index.build import check_readable
from virnucpro.models.classifier_files.card import BUNDLED_CLASSIFIERS
from virnucpro.models.registry import is_path
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.prediction.prediction import run_prediction
from virnucpro.pipeline.prediction.result import PredictionResult
from virnucpro.pipeline.prediction.settings import PredictionConfig, configure_prediction
from virnucpro.report.prediction.page import write_report
from virnucpro.settings import (
    Cache,
    ContigRules,
    EmbeddingResult,
    Hardware,
    Limits,
    Models,
    Monitoring,
    PredictionOutput,
    PredictionSettings,
    SequenceRules,
)
from virnucpro.telemetry.metrics.options import metrics_options

TASKS = {
    "index": "index_contigs",
    "fragments": "cut_fragments",
    "classify": "classify_frames",
    "contigs": "call_contigs",
    "report": "report",
}
"""Stage -> name of its task."""


@flow(
    name="predict",
    flow_run_name="predict into {output_dir}",
    persist_result=False,
    validate_parameters=True,
    on_failure=[say_how_to_continue],
    on_crashed=[say_how_to_continue],
    on_cancellation=[say_how_to_continue],
)
def predict(
    input_files: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)],
    output_dir: Annotated[str, Field(min_length=1)],
    classifier: Annotated[str, Field(min_length=1)] = DEFAULT_CLASSIFIER,
    threshold: Annotated[float | None, Field(gt=0, lt=1)] = None,
    result: PredictionOutput = PredictionOutput(),
    hardware: Hardware = Hardware(),
    contigs: ContigRules = ContigRules(),
    models: Models = Models(),
    cache: Cache = Cache(),
    limits: Limits = Limits(),
    monitoring: Monitoring = Monitoring(),
) -> State[Any]:
    """
    Say of every contig of the input whether it is viral: OUT/contigs.tsv, OUT/viral.fasta, OUT/report.html.

    Args:
        input_files: Contigs or reads: FASTA, FASTQ (both plain or gzip) or unaligned BAM.
        output_dir: Folder of the run. A second run in it continues the first.
        classifier: Name of a bundled classifier, or the folder of a trained or converted one.
        threshold: P(virus) from which a contig is called viral. None: the folder's, at first the classifier's.
        result: What is written, and what becomes of it, also where it is not whole.
        hardware: Which devices compute, with how many processes, in which precision.
        contigs: How the contigs of the input are read, and what happens to odd ones.
        models: Other models than those that the classifier was trained with; seldom what you want.
        cache: Where weights and rows of earlier runs are found and kept.
        limits: How long the run may take, and how often it tries again.
        monitoring: Where metrics go, how much is logged, and the timeline.
    """
    send_lines_to_prefect()
    settings = PredictionSettings(
        classifier=classifier,
        threshold=threshold,
        models=models,
        hardware=hardware,
        contigs=contigs,
        result=result,
        cache=cache,
        limits=limits,
        monitoring=monitoring,
    )
    work = partial(_predict, input_files, output_dir, settings)
    return ended(work, time_limit_minutes=limits.time_limit_minutes)


def _predict(input_files: list[str], output_dir: str, settings: PredictionSettings) -> State[Any]:
    classifier, models, hardware, cache = settings.classifier, settings.models, settings.hardware, settings.cache
    encoders = {"dna_model": models.dna_model, "protein_model": models.protein_model}
    check_allowed(
        data={
            "input_files": input_files,
            "output_dir": output_dir,
            "cache_dir": cache.cache_dir,
            "metrics_targets": settings.monitoring.metrics_targets,
        },
        models={
            "classifier": None if classifier in BUNDLED_CLASSIFIERS else classifier,
            **{name: model if model and is_path(model) else None for name, model in encoders.items()},
            "weights_dir": cache.weights_dir,
        },
    )
    check_readable(input_files)
    metrics = metrics_options(settings.monitoring)

    def configured(device_type: str) -> PredictionConfig:
        return configure_prediction(settings, device_type=device_type)

    with computing_on(hardware, lambda: configured(CPU.type)) as claim:
        config = configured(claim.type)
        with run_telemetry(metrics) as telemetry, kept(claim):
            outcome = run_prediction(
                input_files,
                Path(output_dir),
                config,
                claim,
                write_report=write_report,
                embed=embedding_flow(_embedding_parameters(settings, config)),
                stage_runner=as_tasks(TASKS),
                telemetry=telemetry,
                restart=from_scratch(settings.result.restart),
            )
            publish_prediction(outcome)
        outcome.raise_unless(allow_partial=settings.result.allow_partial)
        return _final_state(outcome)


def _embedding_parameters(settings: PredictionSettings, config: PredictionConfig) -> dict[str, dict[str, Any]]:
    """Return the parameters of both embedding runs: the frames of the contigs are their input, and may be none."""
    models, monitoring = settings.models, settings.monitoring
    boxes = {
        "hardware": settings.hardware,
        "sequences": SequenceRules(allow_empty=True),
        "result": EmbeddingResult(allow_partial=True, form=ResultForm.SINGLE),
        "cache": settings.cache,
        "monitoring": Monitoring(log_level=monitoring.log_level, profile=monitoring.profile),
        "limits": settings.limits.model_copy(update={"time_limit_minutes": 0}),  # our time limit holds within them, too
    }
    return {
        "dna": {**boxes, "model": models.dna_model or config.card.dna_model.name},
        "protein": {**boxes, "model": models.protein_model or config.card.protein_model.name},
    }


def run_from_command_line(**parameters: Any) -> PredictionResult:
    """Run the flow in this process; see ``run_here``."""
    result = run_here(predict, parameters)
    assert isinstance(result, PredictionResult)
    return result


def _final_state(result: PredictionResult) -> State[Any]:
    counts = result.counts
    calls = f"{counts['virus']:,} of {counts['contigs']:,} {result.sequences} are called viral: {result.report_path}"
    if result.state == "partial":
        missing = f"{counts['missing_frames']:,} of {counts['frames']:,} open frames without a score"
        return Completed(name="Partial", message=f"{missing}; {calls}", data=result)
    return Completed(message=calls, data=result)
