"""
The training as a Prefect flow: a form, its stages as tasks, and each embedding run as a run of the flow ``embed``.

The flow ends Completed, or Failed with the message that the command line would print: a classifier is whole, or there
is none.
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
from flows.run.artifacts import publish_training
from flows.run.hooks import say_how_to_continue
from flows.run.outcome import ended
from flows.run.parent_lines import send_lines_to_prefect
from flows.run.telemetry import run_telemetry
from flows.tasks import as_tasks, from_scratch
from virnucpro.models.registry import is_path
from virnucpro.pipeline.devices import CPU
from virnucpro.settings import Cache, Hardware, Limits, Monitoring, Training, TrainingOutput, TrainingSettings
from virnucpro.telemetry.metrics.options import metrics_options
from virnucpro.training.classifier_training import TrainingResult, run_training
from virnucpro.training.genomes.labelled_genomes import check_files
from virnucpro.training.training_settings import TrainingConfig, configure_training

TASKS = {
    "index": "read_genomes",
    "split": "split_genomes",
    "pieces": "cut_pieces",
    "train": "train_classifier",
    "evaluate": "evaluate_classifier",
}
"""Stage -> name of its task."""

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
    name = training.name or Path(output_dir).absolute().name
    command = training.command or f"the flow train, with the parameters {training.model_dump_json()}"
    settings = TrainingSettings(
        labels=labels,
        annotations=annotations,
        leave_out=leave_out,
        training=training.model_copy(update={"name": name, "command": command}),
        result=result,
        hardware=hardware,
        cache=cache,
        limits=limits,
        monitoring=monitoring,
    )
    work = partial(_train, labelled, output_dir, settings)
    return ended(work, time_limit_minutes=limits.time_limit_minutes)


def _train(labelled: list[str], output_dir: str, settings: TrainingSettings) -> State[Any]:
    hardware, cache, training = settings.hardware, settings.cache, settings.training
    encoders = {"dna": training.dna_model, "protein": training.protein_model}
    check_allowed(
        data={
            "labelled": labelled,
            "output_dir": output_dir,
            "labels": settings.labels,
            "annotations": settings.annotations,
            "leave_out": settings.leave_out,
            "cache_dir": cache.cache_dir,
            "metrics_targets": settings.monitoring.metrics_targets,
        },
        models={
            **{f"{kind}_model": model if is_path(model) else None for kind, model in encoders.items()},
            "weights_dir": cache.weights_dir,
        },
    )
    others = [Path(path) for path in (settings.labels, *settings.annotations, *settings.leave_out) if path]
    check_files([Path(path) for path in labelled], *others)
    metrics = metrics_options(settings.monitoring)
    boxes = {
        "hardware": hardware,
        "cache": cache,
        "monitoring": Monitoring(log_level=settings.monitoring.log_level),
        "limits": settings.limits.model_copy(update={"time_limit_minutes": 0}),  # our time limit holds within them, too
    }

    def configured(device_type: str) -> TrainingConfig:
        return configure_training(settings, device_type=device_type)

    with computing_on(hardware, lambda: configured(CPU.type)) as claim:
        config = configured(claim.type)
        with run_telemetry(metrics) as telemetry, kept(claim):
            outcome = run_training(
                labelled,
                Path(output_dir),
                config,
                claim,
                embed=embedding_flow({kind: {**boxes, "model": model} for kind, model in encoders.items()}),
                stage_runner=as_tasks(TASKS),
                telemetry=telemetry,
                restart=from_scratch(settings.result.restart),
            )
            publish_training(outcome.output_dir)
        return Completed(message=outcome.worth, data=outcome)


def run_from_command_line(**parameters: Any) -> TrainingResult:
    """Run the flow in this process; see ``run_here``."""
    result = run_here(train, parameters)
    assert isinstance(result, TrainingResult)
    return result
