"""
The identification as a Prefect flow: fragments -> embed (DNA) and embed (protein) -> classify -> calls -> report.

Each embedding run is a run of the ``embed`` flow of its own, with its ranks as tasks. The final states are those of
``embed``: Completed, Completed and named ``Partial``, or Failed with the sentence that the command line would print.
"""

from pathlib import Path
from typing import Any, Literal, cast

from prefect import flow
from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from flows.allowed_roots import check_allowed
from flows.command_line import run_here
from flows.embed import embed
from flows.parent_lines import send_lines_to_prefect
from flows.tasks import call_contigs, classify_frames, fragments_of, index_contigs, report
from flows.telemetry import run_telemetry
from virnucpro.config import AUTO_TOKEN_BUDGET, DEFAULT_CACHE_GIB, MetricsOptions
from virnucpro.errors import VirNucProError
from virnucpro.models.classifier_card import BUNDLED_CLASSIFIERS, DEFAULT_CLASSIFIER
from virnucpro.models.registry import is_path
from virnucpro.pipeline.devices import select_devices
from virnucpro.pipeline.multi_gpu_inference import new_run_id
from virnucpro.pipeline.prediction import (
    embedding_dir,
    embedding_job,
    finished_prediction,
    record_embedding,
    stages_to_embed,
)
from virnucpro.pipeline.prediction_result import PredictionResult
from virnucpro.pipeline.prediction_run import PredictionRun, prediction_failure_noted, timed
from virnucpro.pipeline.prediction_settings import configure_prediction
from virnucpro.pipeline.run_result import RunResult
from virnucpro.report.artifacts import markdown_text, report_markdown, report_table
from virnucpro.run_layout import PredictionLayout
from virnucpro.store.run_lock import RunLock
from virnucpro.telemetry.run_telemetry import RunTelemetry


@flow(name="predict", flow_run_name="predict into {output_dir}", persist_result=False, validate_parameters=True)
def predict(
    input_files: list[str],
    output_dir: str,
    classifier: str = DEFAULT_CLASSIFIER,
    dna_model: str | None = None,
    protein_model: str | None = None,
    chunk: int | None = None,
    min_length: int | None = None,
    threshold: float | None = None,
    formats: list[Literal["tsv", "json", "parquet"]] | None = None,
    keep_chunks: bool = False,
    devices: str = "auto",
    workers: int | None = None,
    workers_per_device: int = 1,
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto",
    token_budget: int | None = None,
    threads: int = 1,
    gaps: Literal["error", "remove"] = "error",
    on_bad_record: Literal["error", "skip"] = "error",
    allow_empty: bool = False,
    weights_dir: str | None = None,
    cache_dir: str | None = None,
    cache_gib: float = DEFAULT_CACHE_GIB,
    allow_partial: bool = False,
    restart: bool = False,
    metrics_port: int | None = None,
    metrics_targets: str | None = None,
    pushgateway: str | None = None,
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO",
    profile: bool = False,
    worker_retries: int = 2,
) -> State[Any]:
    """
    Say of every contig of the input whether it is viral: OUT/contigs.tsv, OUT/viral.fasta, OUT/report.html.

    Args:
        input_files: Contigs or reads: FASTA, FASTQ (both plain or gzip) or unaligned BAM.
        output_dir: Folder of the run. A second run in it continues the first.
        classifier: Name of a bundled classifier, or the folder of a converted one.
        dna_model: A registered name or a path; by default, and best, what the classifier was trained with.
        protein_model: Likewise.
        chunk: Nucleotides of a chunk; only what the classifier was trained with is taken.
        min_length: Nucleotides below which contigs are listed but not looked at.
        threshold: P(virus) from which a contig is called viral; by default the classifier's.
        formats: Formats of the table of contigs beside TSV.
        keep_chunks: Write the chunks as FASTA, too.
        devices: auto (every visible GPU, else the CPU), cpu, or a list such as 0,1.
        workers: CPU workers, by default one a core as far as memory and the input go.
        workers_per_device: Workers that share each GPU.
        precision: auto is fp32 on a CPU; on a GPU fp16 for ESM-2, bf16 for DNABERT-S.
        token_budget: Tokens in one block at the most; by default a number that suits CPUs, or what a short trial on
            each GPU finds.
        threads: Threads of each CPU worker, and of the classifier.
        gaps: What happens to - and . in a contig.
        on_bad_record: What happens to a contig that breaks a rule; skip lists it in failed_sequences.tsv.
        allow_empty: An input without contigs gives empty tables instead of an error.
        weights_dir: Folder that is looked into for weights first.
        cache_dir: Folder, on a local disk, that keeps rows for later runs and serves those of earlier ones.
        cache_gib: GiB that the cache takes at the most.
        allow_partial: Complete with the name Partial when some frames could not be embedded.
        restart: Remove what the folder holds of earlier runs first, and start afresh.
        metrics_port: Serve Prometheus metrics at this port of 127.0.0.1 while the run goes on; 0 takes a free one.
        metrics_targets: Folder of Prometheus' file_sd_configs: gets a file with the port while the run goes on.
        pushgateway: URL of a Prometheus pushgateway that gets the metrics, too.
        log_level: Of the workers' log files.
        profile: Record when each worker did what to every batch, and write OUT/trace.json, a timeline for
            ui.perfetto.dev.
        worker_retries: As in the flow embed.
    """
    send_lines_to_prefect()
    run_id = new_run_id()
    try:
        check_allowed(
            input_files=input_files,
            output_dir=output_dir,
            classifier=None if classifier in BUNDLED_CLASSIFIERS else classifier,
            dna_model=dna_model if dna_model and is_path(dna_model) else None,
            protein_model=protein_model if protein_model and is_path(protein_model) else None,
            weights_dir=weights_dir,
            cache_dir=cache_dir,
            metrics_targets=metrics_targets,
        )
        metrics = MetricsOptions(port=metrics_port, targets_dir=metrics_targets, pushgateway=pushgateway)
        chosen = select_devices(devices, workers=workers, workers_per_device=workers_per_device)
        config = configure_prediction(
            classifier=classifier,
            dna_model=dna_model,
            protein_model=protein_model,
            chunk_nt=chunk,
            min_nt=min_length or 0,
            threshold=threshold,
            formats=formats or ["tsv"],
            keep_chunks=keep_chunks,
            device_type=chosen[0].type,
            precision=precision,
            weights_dir=None if weights_dir is None else Path(weights_dir),
            token_budget=AUTO_TOKEN_BUDGET if token_budget is None else token_budget,
            threads_per_worker=threads,
            workers_per_device=workers_per_device,
            gaps=gaps,
            on_bad_record=on_bad_record,
            allow_empty=allow_empty,
            cache_dir=cache_dir,
            cache_gib=cache_gib,
            log_level=log_level,
            profile=profile,
        )
        embedding_parameters = {
            "devices": devices,
            "workers": workers,
            "workers_per_device": workers_per_device,
            "precision": precision,
            "token_budget": token_budget,
            "threads": threads,
            "allow_empty": True,
            "weights_dir": weights_dir,
            "cache_dir": cache_dir,
            "cache_gib": cache_gib,
            "allow_partial": True,
            "log_level": log_level,
            "profile": profile,
            "worker_retries": worker_retries,
        }
        names = {"dna": dna_model or config.card.dna_model.name}
        names["protein"] = protein_model or config.card.protein_model.name
        layout = PredictionLayout(Path(output_dir))
        with run_telemetry(metrics) as telemetry:
            with RunLock(layout.lock, run_id=run_id), telemetry.running(layout, run_id):
                with telemetry.stage("index"):
                    indexed = index_contigs(input_files, output_dir, config, chosen, run_id, restart, return_state=True)
                    run = cast("PredictionRun", indexed.result())
                if run.already_complete:
                    result = finished_prediction(run)
                else:
                    with prediction_failure_noted(run):
                        parameters = {stage: {**embedding_parameters, "model": names[stage]} for stage in names}
                        result = _identify(run, telemetry, parameters)
            _publish(result)
        result.raise_unless(allow_partial=allow_partial)
    except VirNucProError as error:
        return Failed(message=str(error), data=error)
    counts = result.counts
    calls = f"{counts['virus']:,} of {counts['contigs']:,} contigs are called viral: {result.report_path}"
    if result.state == "partial":
        missing = f"{counts['missing_frames']:,} of {counts['frames']:,} open frames without a score"
        return Completed(name="Partial", message=f"{missing}; {calls}", data=result)
    return Completed(message=calls, data=result)


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


def _identify(
    run: PredictionRun, telemetry: RunTelemetry, embedding_parameters: dict[str, dict[str, Any]]
) -> PredictionResult:
    with telemetry.stage("fragments"):
        fragments_of(run, return_state=True).result()
    embeddings = []
    for stage in stages_to_embed(run):
        with telemetry.stage(stage):
            embeddings.append(_embed(run, stage, embedding_parameters[stage]))
    with telemetry.stage("classify"):
        classify_frames(run, return_state=True).result()
    with telemetry.stage("contigs"):
        call_contigs(run, return_state=True).result()
    with telemetry.stage("report"):
        return cast("PredictionResult", report(run, embeddings, return_state=True).result())


def _embed(run: PredictionRun, stage: str, parameters: dict[str, Any]) -> RunResult:
    """Run the flow embed on the frames' nucleotides or proteins."""
    _, files = embedding_job(run, stage)
    with timed() as seconds:
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
    record_embedding(run, stage, outcome, seconds=seconds[0])
    return outcome


def _publish(result: PredictionResult) -> None:
    """Leave the summary, the table of the likeliest contigs and a link to the report where Prefect's users look."""
    layout = PredictionLayout(result.output_dir.absolute())  # who reads the page does not know our working directory
    where = markdown_text(str(layout.output_dir))
    create_markdown_artifact(markdown=report_markdown(layout), key="predict-summary", description=where)
    create_table_artifact(
        table=report_table(layout), key="predict-contigs", description=f"Likeliest contigs of {where}"
    )
    create_link_artifact(link=layout.report.as_uri(), link_text="report.html", key="predict-report", description=where)
