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

from flows.clusters.hardware import computing_on, kept
from flows.embed import embedding_flow
from flows.run.api import run_here
from flows.run.artifacts import publish_training
from flows.run.form import RUN, OutputFolder, PathTexts, check_paths, form_of, titled
from flows.run.names import run_name
from flows.run.outcome import ended
from flows.run.telemetry import run_telemetry
from flows.tasks import TaskStages, from_scratch
from virnucpro.pipeline.devices import CPU
from virnucpro.stage_names import TRAINING
from virnucpro.telemetry.metrics.options import metrics_options
from virnucpro.training.classifier_training import run_training
from virnucpro.training.genomes.labelled_genomes import check_files
from virnucpro.training.training_knobs import Training, TrainingSettings
from virnucpro.training.training_settings import configure_training


@flow(name="train", flow_run_name=run_name("train into {output_dir}"), **RUN)
@form_of(TrainingSettings)
def train(
    labelled: Annotated[PathTexts, titled("Labelled genomes")], output_dir: OutputFolder, **fields: Any
) -> State[Any]:
    """
    Train a classifier on labelled genomes, and measure it on others that are not related to them.

    Args:
        labelled: FASTA files of genomes, or folders of them; their names say what they hold, unless a table does.
        output_dir: Folder of the classifier. A second run in it continues the first.
        genomes: Table, tab-separated: id or file, label, group, genome. Empty: names of files say it.
        annotations: Proteins of the genomes, GenBank flat files or FASTA, that reading frames must be part of.
        leave_out: Genomes or contigs that the classifier will be judged by; relatives of them are not used.
        training: Encoders, chunks, fragments and passes, and what chance begins with.
        result: What becomes of the classifier, and of an earlier one in the folder.
        hardware: Which devices compute, with how many processes, in which precision.
        cache: Where weights and rows of earlier runs are found and kept.
        limits: How long the run may take, and how often workers are retried.
        monitoring: Where metrics go, how much is logged, and the timeline.
    """
    asked: Training = fields["training"]
    name = asked.name or Path(output_dir).absolute().name
    command = asked.command or f"the flow train, with the parameters {asked.model_dump_json()}"
    settings = TrainingSettings(**{**fields, "training": asked.model_copy(update={"name": name, "command": command})})
    return ended(partial(_train, labelled, output_dir, settings), settings.limits)


def _train(labelled: list[str], output_dir: str, settings: TrainingSettings) -> State[Any]:
    encoders = {"dna": settings.training.dna_model, "protein": settings.training.protein_model}
    check_paths(
        settings,
        encoders={f"{kind}_model": model for kind, model in encoders.items()},
        labelled=labelled,
        output_dir=output_dir,
        genomes=settings.genomes,
        annotations=settings.annotations,
        leave_out=settings.leave_out,
    )
    others = [Path(path) for path in (settings.genomes, *settings.annotations, *settings.leave_out) if path]
    check_files([Path(path) for path in labelled], *others)
    metrics = metrics_options(settings.monitoring)
    with computing_on(settings.hardware, partial(configure_training, settings, device_type=CPU.type)) as claim:
        config = configure_training(settings, device_type=claim.type)
        stages = TaskStages(TRAINING)
        with run_telemetry(metrics) as telemetry, kept(claim):
            outcome = run_training(
                labelled,
                Path(output_dir),
                config,
                claim,
                embed=embedding_flow(settings, encoders, stages),
                stage_runner=stages,
                telemetry=telemetry,
                restart=from_scratch(settings.result.restart),
            )
            publish_training(outcome.output_dir)
        return Completed(message=outcome.worth, data=outcome)


run_from_command_line = partial(run_here, train)
