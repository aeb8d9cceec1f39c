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
from prefect.task_runners import ThreadPoolTaskRunner

from flows.clusters.hardware import cluster_here, computing_on, kept
from flows.clusters.on_cluster import OnCluster
from flows.embed import MAX_RANKS, embedding_flow
from flows.run.api import run_here
from flows.run.artifacts import publish_prediction
from flows.run.form import RUN, OutputFolder, PathTexts, check_paths, form_of, settings_of_form, titled
from flows.run.names import run_name
from flows.run.outcome import ended
from flows.run.telemetry import run_telemetry
from flows.tasks import TaskRanks, TaskStages, from_scratch
from virnucpro.choices import ResultForm
from virnucpro.config import RunLimits
from virnucpro.data.index.build import check_readable
from virnucpro.knobs import from_flat
from virnucpro.models.classifier_files.card import BUNDLED_CLASSIFIERS
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.prediction.prediction import run_prediction
from virnucpro.pipeline.prediction.result import QUARANTINED, PredictionResult
from virnucpro.pipeline.prediction.settings import configure_prediction
from virnucpro.report.prediction.page import write_report
from virnucpro.settings import EmbeddingResult, PredictionSettings, SequenceRules
from virnucpro.stage_names import PREDICTION
from virnucpro.telemetry.metrics.options import metrics_options

_AS_FLOW: dict[str, Any] = {
    "name": "predict",
    "flow_run_name": run_name("predict into {output_dir}"),
    "task_runner": ThreadPoolTaskRunner(max_workers=MAX_RANKS),
    **RUN,
}


@flow(**_AS_FLOW)
@form_of(PredictionSettings)
def predict(
    input_files: Annotated[PathTexts, titled("Contigs or reads")], output_dir: OutputFolder, **fields: Any
) -> State[Any]:
    """
    Classify each contig of the input as viral or not: OUT/contigs.tsv, OUT/viral.fasta, OUT/report.html.

    Args:
        input_files: Contigs or reads: FASTA, FASTQ (both plain, gzip, bzip2, xz or Zstandard) or unaligned BAM.
        output_dir: Folder of the run. A second run in it continues the first.
        classifier: Name of a bundled classifier, or the folder of a trained or converted one.
        threshold: Score from which a contig is called viral. None: the folder's, at first the classifier's.
        prior: Share of viruses among the contigs: auto (estimated), off, or a number. Empty: the folder's, or auto.
        fdr: Call contigs viral up to this expected false discovery rate, in place of a threshold. None: the folder's.
        result: What is written, and what becomes of it, also where it is not whole.
        hardware: Which devices compute, with how many processes, in which precision.
        contigs: How the contigs of the input are read, and what happens to odd ones.
        cascade: Which contigs are embedded: auto (what the classifier needs), off (all), or LOW,HIGH.
        models: Other models than those that the classifier was trained with; seldom what you want.
        cache: Where weights and rows of earlier runs are found and kept.
        limits: How long the run may take, and how often workers are retried.
        monitoring: Where metrics go, how much is logged, and the timeline.
    """

    def work() -> State[Any]:
        return _predict(input_files, output_dir, settings_of_form(PredictionSettings, fields))

    return ended(work, fields["limits"])


@flow(**_AS_FLOW)
@form_of(PredictionSettings)
def predict_basic(
    input_files: Annotated[PathTexts, titled("Contigs or reads")], output_dir: OutputFolder, **fields: Any
) -> State[Any]:
    """
    Classify each contig of the input as viral or not: OUT/contigs.tsv, OUT/viral.fasta, OUT/report.html.

    The flow ``predict`` with the settings of daily use only.

    Args:
        input_files: Contigs or reads: FASTA, FASTQ (both plain, gzip, bzip2, xz or Zstandard) or unaligned BAM.
        output_dir: Folder of the run. A second run in it continues the first.
        classifier: Name of a bundled classifier, or the folder of a trained or converted one.
        fdr: Call contigs viral up to this expected false discovery rate, in place of a threshold. None: the folder's.
        threshold: Score from which a contig is called viral. None: the folder's, at first the classifier's.
        min_length: Nucleotides below which contigs are listed but not classified. 0: none.
        devices: auto (every GPU that is free, else the CPU), auto:2 (two free GPUs), cpu, or a list such as 0,1.
        restart: Remove what the output folder holds of earlier runs, instead of continuing them.
    """
    return ended(lambda: _predict(input_files, output_dir, from_flat(PredictionSettings, fields)))


def _predict(input_files: list[str], output_dir: str, settings: PredictionSettings) -> State[Any]:
    models, result = settings.models, settings.result
    check_paths(
        settings,
        encoders={"dna_model": models.dna_model, "protein_model": models.protein_model},
        classifier="" if settings.classifier in BUNDLED_CLASSIFIERS else settings.classifier,
        input_files=input_files,
        output_dir=output_dir,
    )
    check_readable(input_files)
    metrics = metrics_options(settings.monitoring)
    with computing_on(settings.hardware, partial(configure_prediction, settings, device_type=CPU.type)) as claim:
        config = configure_prediction(settings, device_type=claim.type)
        stages = TaskStages(PREDICTION)
        embed = embedding_flow(
            settings,
            {
                "dna": models.dna_model or config.card.dna_model.name,
                "protein": models.protein_model or config.card.protein_model.name,
            },
            stages,
            sequences=SequenceRules(allow_empty=True),  # the frames of the contigs, of which there may be none
            result=EmbeddingResult(allow_partial=True, form=ResultForm.SINGLE),
        )
        engine = cluster_here()
        with run_telemetry(metrics) as telemetry, kept(claim):
            outcome = run_prediction(
                input_files,
                Path(output_dir) if engine is None else Path(output_dir).absolute(),
                config,
                claim,
                write_report=write_report,
                workers=settings.hardware.workers or None,
                limits=RunLimits.of(settings.limits),
                executor=partial(TaskRanks, stages) if engine is None else partial(OnCluster, engine),
                embed=embed,
                elsewhere=None if engine is None else engine.map,
                stage_runner=stages,
                telemetry=telemetry,
                restart=from_scratch(result.restart),
            )
            publish_prediction(outcome)
        outcome.raise_unless(allow_partial=result.allow_partial)
        return _final_state(outcome)


run_from_command_line = partial(run_here, predict)


def _final_state(result: PredictionResult) -> State[Any]:
    counts = result.counts
    where = result.report_path or result.contigs_path
    calls = f"{counts['virus']:,} of {counts['contigs']:,} {result.sequences} are called viral: {where}"
    if result.state == "partial":
        missing = [
            f"{number:,} of {total:,} {what}"
            for number, total, what in (
                (counts.get(QUARANTINED, 0), counts["contigs"], f"{result.sequences} quarantined"),
                (counts["missing_frames"], counts["frames"], "open frames without a score"),
            )
            if number
        ]
        return Completed(name="Partial", message="; ".join([*missing, calls]), data=result)
    return Completed(message=calls, data=result)
