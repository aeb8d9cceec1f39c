"""
The identification as a Prefect flow: fragments -> embed (DNA) and embed (protein) -> classify -> calls -> report.

Each embedding run is a run of the ``embed`` flow of its own, with its ranks as tasks. The final states are those of
``embed``: Completed, Completed and named ``Partial``, or Failed with the sentence that the command line would print.
"""

from pathlib import Path
from typing import Annotated, Any, cast

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger
from prefect.states import Completed
from pydantic import Field

from flows.allowed_roots import check_allowed
from flows.artifacts import publish_prediction
from flows.command_line import run_here
from flows.embed import embed
from flows.hardware import computing_on, kept
from flows.hooks import say_how_to_continue
from flows.outcome import ended
from flows.parent_lines import send_lines_to_prefect
from flows.tasks import call_contigs, classify_frames, fragments_of, index_contigs, report
from flows.telemetry import run_telemetry
from virnucpro.data.index.build import check_readable
from virnucpro.models.classifier_files.card import BUNDLED_CLASSIFIERS
from virnucpro.models.registry import is_path
from virnucpro.pipeline.device_claim import DeviceClaim
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.multi_gpu_inference import new_run_id
from virnucpro.pipeline.prediction import (
    embedding_dir,
    embedding_job,
    finished_prediction,
    record_embedding,
    stages_to_embed,
)
from virnucpro.pipeline.prediction_result import PredictionResult
from virnucpro.pipeline.prediction_run import PredictionRun, prediction_failure_noted
from virnucpro.pipeline.prediction_settings import PredictionConfig, configure_prediction
from virnucpro.pipeline.run_result import RunResult
from virnucpro.run_layout import PredictionLayout
from virnucpro.settings import (
    DEFAULT_CLASSIFIER,
    Cache,
    ContigRules,
    EmbeddingResult,
    Hardware,
    Limits,
    Models,
    Monitoring,
    PredictionOutput,
    PredictionSettings,
    ResultForm,
    SequenceRules,
)
from virnucpro.store.run_lock import RunLock
from virnucpro.telemetry.metrics_options import metrics_options
from virnucpro.telemetry.run_telemetry import RunTelemetry


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

    def work() -> State[Any]:
        check_allowed(
            data={
                "input_files": input_files,
                "output_dir": output_dir,
                "cache_dir": cache.cache_dir,
                "metrics_targets": monitoring.metrics_targets,
            },
            models={
                "classifier": None if classifier in BUNDLED_CLASSIFIERS else classifier,
                "dna_model": models.dna_model if models.dna_model and is_path(models.dna_model) else None,
                "protein_model": models.protein_model
                if models.protein_model and is_path(models.protein_model)
                else None,
                "weights_dir": cache.weights_dir,
            },
        )
        check_readable(input_files)
        metrics = metrics_options(monitoring)

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

        def configured(device_type: str) -> PredictionConfig:
            return configure_prediction(settings, device_type=device_type)

        with computing_on(hardware, lambda: configured(CPU.type)) as claim:
            config = configured(claim.type)
            # how each embedding run is told to run: the frames of the contigs are its input, and may be none
            boxes = {
                "hardware": hardware,
                "sequences": SequenceRules(allow_empty=True),
                "result": EmbeddingResult(allow_partial=True, form=ResultForm.SINGLE),
                "cache": cache,
                "monitoring": Monitoring(log_level=monitoring.log_level, profile=monitoring.profile),
            }
            names = {
                "dna": models.dna_model or config.card.dna_model.name,
                "protein": models.protein_model or config.card.protein_model.name,
            }
            parameters = {stage: {**boxes, "model": name} for stage, name in names.items()}
            layout = PredictionLayout(Path(output_dir))
            with run_telemetry(metrics) as telemetry:
                outcome = _predict_in(
                    layout, input_files, config, claim, telemetry, parameters, limits, restart=result.restart
                )
                publish_prediction(outcome)
            outcome.raise_unless(allow_partial=result.allow_partial)
            return _final_state(outcome)

    return ended(work, time_limit_minutes=limits.time_limit_minutes)


def run_from_command_line(**parameters: Any) -> PredictionResult:
    """
    Run the flow in this process, against the API that the environment names or an embedded server.

    Args:
        parameters: Of ``predict``.

    Returns:
        How it went.

    Raises:
        VirNucProError: As the plain command would raise, with the same exit code.
    """
    result = run_here(predict, parameters)
    assert isinstance(result, PredictionResult)
    return result


def _predict_in(
    layout: PredictionLayout,
    input_files: list[str],
    config: PredictionConfig,
    claim: DeviceClaim,
    telemetry: RunTelemetry,
    embedding_parameters: dict[str, dict[str, Any]],
    limits: Limits,
    *,
    restart: bool,
) -> PredictionResult:
    """Run the stages in the folder, which nobody else has meanwhile."""
    run_id = new_run_id()
    with RunLock(layout.lock, run_id=run_id), telemetry.running(layout, run_id):
        with telemetry.stage("index"):
            indexed = index_contigs(
                input_files, str(layout.output_dir), config, claim.type, run_id, restart, return_state=True
            )
            run = cast("PredictionRun", indexed.result())
        for notice in run.notices:
            get_run_logger().info(notice)
        if run.already_complete:
            return finished_prediction(run)
        with prediction_failure_noted(run):
            return _identify(run, claim, telemetry, embedding_parameters, limits)


def _final_state(result: PredictionResult) -> State[Any]:
    counts = result.counts
    calls = f"{counts['virus']:,} of {counts['contigs']:,} {result.sequences} are called viral: {result.report_path}"
    if result.state == "partial":
        missing = f"{counts['missing_frames']:,} of {counts['frames']:,} open frames without a score"
        return Completed(name="Partial", message=f"{missing}; {calls}", data=result)
    return Completed(message=calls, data=result)


def _identify(
    run: PredictionRun,
    claim: DeviceClaim,
    telemetry: RunTelemetry,
    embedding_parameters: dict[str, dict[str, Any]],
    limits: Limits,
) -> PredictionResult:
    with telemetry.stage("fragments"):
        fragments_of(run, return_state=True).result()
    embeddings = []
    with kept(claim, telemetry, run.run_id):
        for stage in stages_to_embed(run):
            with telemetry.stage(stage):
                own = Limits(worker_retries=limits.worker_retries)  # our time limit rings within it, too
                outcome = _embed(run, stage, {**embedding_parameters[stage], "limits": own})
            record_embedding(run, stage, outcome, seconds=telemetry.stages_s()[stage])
            embeddings.append(outcome)
    with telemetry.stage("classify"):
        classify_frames(run, return_state=True).result()
    with telemetry.stage("contigs"):
        call_contigs(run, return_state=True).result()
    with telemetry.stage("report"):
        return cast("PredictionResult", report(run, embeddings, return_state=True).result())


def _embed(run: PredictionRun, stage: str, parameters: dict[str, Any]) -> RunResult:
    """Run the flow embed on the frames' nucleotides or proteins."""
    _, files = embedding_job(run, stage)
    state: State[Any] = cast("Any", embed)(
        fasta_files=[str(path) for path in files],
        output_dir=str(embedding_dir(run, stage)),
        **parameters,
        return_state=True,
    )
    outcome = state.result(raise_on_failure=False)
    if isinstance(outcome, BaseException):
        raise outcome
    assert isinstance(outcome, RunResult)
    return outcome
