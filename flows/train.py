"""
The training as a Prefect flow: genomes -> parts -> pieces -> embed (DNA) and embed (protein) -> train -> evaluate.

Each embedding run is a run of the ``embed`` flow of its own, with its ranks as tasks. The flow ends Completed, or
Failed with the sentence that the command line would print: a classifier is whole, or there is none.
"""

from pathlib import Path
from typing import Annotated, Any, cast

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed
from pydantic import Field

from flows.allowed_roots import check_allowed
from flows.artifacts import publish_training
from flows.command_line import run_here
from flows.embed import embed
from flows.hardware import computing_on, kept
from flows.hooks import say_how_to_continue
from flows.outcome import ended
from flows.parent_lines import send_lines_to_prefect
from flows.telemetry import run_telemetry
from flows.training_tasks import cut_pieces, evaluate_classifier, read_genomes, split_genomes, train_classifier
from virnucpro.models.registry import is_path
from virnucpro.pipeline.device_claim import DeviceClaim
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.multi_gpu_inference import new_run_id
from virnucpro.pipeline.run_result import RunResult
from virnucpro.run_layout import TrainingLayout
from virnucpro.settings import Cache, Hardware, Limits, Monitoring, Training, TrainingOutput, TrainingSettings
from virnucpro.store.run_lock import RunLock
from virnucpro.telemetry.metrics_options import metrics_options
from virnucpro.telemetry.run_telemetry import RunTelemetry
from virnucpro.training.classifier_training import (
    TrainingResult,
    embedding_dir,
    embedding_job,
    embedding_kind,
    record_embedding,
    stages_to_embed,
    training_result,
)
from virnucpro.training.genomes.labelled_genomes import check_files
from virnucpro.training.training_run import TrainingRun, training_failure_noted
from virnucpro.training.training_settings import TrainingConfig, configure_training

_Path = Annotated[str, Field(min_length=1)]


@flow(
    name="train",
    flow_run_name="train into {output_dir}",
    persist_result=False,
    validate_parameters=True,
    on_failure=[say_how_to_continue],
    on_crashed=[say_how_to_continue],
    on_cancellation=[say_how_to_continue],
)
def train(
    labelled: Annotated[list[_Path], Field(min_length=1)],
    output_dir: _Path,
    labels: str = "",
    annotations: list[_Path] = [],  # noqa: B006  Prefect copies what a run is given
    leave_out: list[_Path] = [],  # noqa: B006
    training: Training = Training(),
    result: TrainingOutput = TrainingOutput(),
    hardware: Hardware = Hardware(),
    cache: Cache = Cache(),
    limits: Limits = Limits(),
    monitoring: Monitoring = Monitoring(),
) -> State[Any]:
    """
    Train a classifier on labelled genomes, and measure it on others that are not related to them.

    Args:
        labelled: FASTA files of genomes, or folders of them; their names say what they hold, unless a table does.
        output_dir: Folder of the classifier. A second run in it continues the first.
        labels: Table of labels, tab-separated: accession or file, label, group, genome. Empty: names say it.
        annotations: Proteins of the genomes, GenBank flat files or FASTA, that reading frames must be part of.
        leave_out: Genomes or contigs that the classifier will be judged by; relatives of them are not used.
        training: Encoders, chunks, pieces and passes, and what chance begins with.
        result: What becomes of the classifier, and of an earlier one in the folder.
        hardware: Which devices compute, with how many processes, in which precision.
        cache: Where weights and rows of earlier runs are found and kept.
        limits: How long the run may take, and how often it tries again.
        monitoring: Where metrics go, how much is logged, and the timeline.
    """
    send_lines_to_prefect()

    def work() -> State[Any]:
        encoders = {"dna_model": training.dna_model, "protein_model": training.protein_model}
        check_allowed(
            data={
                "labelled": labelled,
                "output_dir": output_dir,
                "labels": labels,
                "annotations": annotations,
                "leave_out": leave_out,
                "cache_dir": cache.cache_dir,
                "metrics_targets": monitoring.metrics_targets,
            },
            models={
                **{name: model if is_path(model) else None for name, model in encoders.items()},
                "weights_dir": cache.weights_dir,
            },
        )
        others = [Path(path) for path in (labels, *annotations, *leave_out) if path]
        check_files([Path(path) for path in labelled], *others)
        metrics = metrics_options(monitoring)
        named = training.name or Path(output_dir).absolute().name
        command = training.command or f"the flow train, with the parameters {training.model_dump_json()}"
        settings = TrainingSettings(
            labels=labels,
            annotations=annotations,
            leave_out=leave_out,
            training=training.model_copy(update={"name": named, "command": command}),
            hardware=hardware,
            cache=cache,
            monitoring=monitoring,
        )

        def configured(device_type: str) -> TrainingConfig:
            return configure_training(settings, device_type=device_type)

        with computing_on(hardware, lambda: configured(CPU.type)) as claim:
            config = configured(claim.type)
            # how each embedding run is told to run: the frames of the pieces are its input
            boxes = {"hardware": hardware, "cache": cache, "monitoring": Monitoring(log_level=monitoring.log_level)}
            parameters = {
                "dna": {**boxes, "model": training.dna_model},
                "protein": {**boxes, "model": training.protein_model},
            }
            layout = TrainingLayout(Path(output_dir))
            with run_telemetry(metrics) as telemetry:
                outcome = _train_in(
                    layout, labelled, config, claim, telemetry, parameters, limits, restart=result.restart
                )
                publish_training(outcome.output_dir)
            return Completed(message=outcome.worth, data=outcome)

    return ended(work, time_limit_minutes=limits.time_limit_minutes)


def run_from_command_line(**parameters: Any) -> TrainingResult:
    """
    Run the flow in this process, against the API that the environment names or an embedded server.

    Args:
        parameters: Of ``train``.

    Returns:
        How it went.

    Raises:
        VirNucProError: As the plain command would raise, with the same exit code.
    """
    result = run_here(train, parameters)
    assert isinstance(result, TrainingResult)
    return result


def _train_in(
    layout: TrainingLayout,
    labelled: list[str],
    config: TrainingConfig,
    claim: DeviceClaim,
    telemetry: RunTelemetry,
    embedding_parameters: dict[str, dict[str, Any]],
    limits: Limits,
    *,
    restart: bool,
) -> TrainingResult:
    """Run the stages in the folder, which nobody else has meanwhile."""
    run_id = new_run_id()
    with RunLock(layout.lock, run_id=run_id), telemetry.running(layout, run_id):
        with telemetry.stage("index"):
            read = read_genomes(
                labelled, str(layout.output_dir), config, claim.type, run_id, restart, return_state=True
            )
            run = cast("TrainingRun", read.result())
        if run.already_complete:
            return training_result(run, was_complete=True)
        with training_failure_noted(run):
            return _make(run, claim, telemetry, embedding_parameters, limits)


def _make(
    run: TrainingRun,
    claim: DeviceClaim,
    telemetry: RunTelemetry,
    embedding_parameters: dict[str, dict[str, Any]],
    limits: Limits,
) -> TrainingResult:
    with telemetry.stage("split"):
        split_genomes(run, return_state=True).result()
    with telemetry.stage("pieces"):
        cut_pieces(run, return_state=True).result()
    with kept(claim, telemetry, run.run_id):
        for stage in stages_to_embed(run):
            with telemetry.stage(stage):
                own = Limits(worker_retries=limits.worker_retries)  # our time limit rings within it, too
                outcome = _embed(run, stage, {**embedding_parameters[embedding_kind(stage)], "limits": own})
            record_embedding(run, stage, outcome, seconds=telemetry.stages_s()[stage])
    with telemetry.stage("train"):
        train_classifier(run, return_state=True).result()
    with telemetry.stage("evaluate"):
        return cast("TrainingResult", evaluate_classifier(run, return_state=True).result())


def _embed(run: TrainingRun, stage: str, parameters: dict[str, Any]) -> RunResult:
    """Run the flow embed on the frames' nucleotides or proteins."""
    _, frames = embedding_job(run, stage)
    state: State[Any] = cast("Any", embed)(
        fasta_files=[str(frames)],
        output_dir=str(embedding_dir(run, stage)),
        **parameters,
        return_state=True,
    )
    outcome = state.result(raise_on_failure=False)
    if isinstance(outcome, BaseException):
        raise outcome
    assert isinstance(outcome, RunResult)
    return outcome
