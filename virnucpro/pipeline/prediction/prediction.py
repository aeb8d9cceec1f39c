"""
The prediction: from contigs to calls by fragments, two embedding runs, scores, calls, report.

``run_prediction`` reads as the pipeline. A stage that was recorded and whose files are intact is not done again.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog

from virnucpro import durable
from virnucpro.calls.contig_calls import BY_SEQUENCE, CallRules, call_contigs
from virnucpro.calls.contig_scores import score_contigs
from virnucpro.choices import TableFormat
from virnucpro.config import fingerprint
from virnucpro.data.fragments import write_fragments
from virnucpro.pipeline.hardware.device_claim import DeviceClaim
from virnucpro.pipeline.multi_gpu_inference import embed_job
from virnucpro.pipeline.prediction.preparation import prepare_prediction
from virnucpro.pipeline.prediction.result import PredictionResult, notes_on_contigs, prove_counts
from virnucpro.pipeline.run.run import failure_noted, is_intact, remove_unpacked, running
from virnucpro.pipeline.run.stages import EmbeddingJob, Stage, Stages, call_stage
from virnucpro.pipeline.shard_aggregator import FAILED_HEADER
from virnucpro.run_layout import PredictionLayout, RunLayout
from virnucpro.store.contig_table import Call
from virnucpro.store.manifest import RunManifest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from virnucpro.config import RunLimits
    from virnucpro.pipeline.devices import Device
    from virnucpro.pipeline.prediction.prediction_run import PredictionRun
    from virnucpro.pipeline.prediction.settings import PredictionConfig
    from virnucpro.pipeline.run.run_result import RunResult
    from virnucpro.pipeline.run.stages import StageRunner
    from virnucpro.telemetry.run_telemetry import RunTelemetry

    ReportWriter = Callable[[PredictionLayout], Path]
    """Makes ``report.html`` from the other files of a run."""

log = structlog.get_logger(__name__)

EMBEDDING_STAGES = ("dna", "protein")
CLASSIFICATION = "virnucpro.calls.classification"
CLASSIFIER = "virnucpro.models.classifier"
CONTIG_MODEL = "virnucpro.models.contigs.contig_model"
"""By name: they import torch, which this process does without until its workers have ended."""


def run_prediction(
    input_files: Sequence[str | Path],
    output_dir: str | Path,
    config: PredictionConfig,
    devices: DeviceClaim | Sequence[Device],
    *,
    write_report: ReportWriter,
    workers: int | None = None,
    limits: RunLimits | None = None,
    embed: Callable[[EmbeddingJob], RunResult] | None = None,
    stage_runner: StageRunner = call_stage,
    telemetry: RunTelemetry | None = None,
    stop: threading.Event | None = None,
    restart: bool = False,
) -> PredictionResult:
    """
    Call every contig viral or not; starting again in the same folder resumes what is missing.

    Args:
        input_files: FASTA, FASTQ or unaligned BAM, plain or gzip, in the order of the result.
        output_dir: The run's folder.
        config: What to compute.
        devices: A claim, whose devices are waited for once they are needed and kept over both embedding runs, or one
            device a worker, which no other process may use.
        write_report: Makes the report.
        workers: Number of CPU workers; None for as many as the machine bears.
        limits: Attempts and time limits of the embedding runs.
        embed: Does an embedding run; by default with processes of this machine.
        stage_runner: Does each other stage; by default in place.
        telemetry: Shows the run; by default one of its own, which leaves metrics and status in the folder, and reports
            failures on standard error.
        stop: Set it to end the run at the next batch boundary.
        restart: Remove what the folder holds of earlier runs first.

    Raises:
        BadInputError: The input cannot be used.
        ConfigurationError: A setting cannot work, or the folder holds another run.
        RunLockedError: Another run holds the folder.
        WorkersFailedError: There is no embedding at all.
        OutputError: Something cannot be written.
        StoppedError: *stop* was set.
    """
    stop = stop or threading.Event()
    layout = PredictionLayout(Path(output_dir))
    claim = DeviceClaim.of(devices)
    with running(layout, telemetry) as (run_id, shown):
        stages = Stages(shown, stage_runner)
        run = stages.do(
            "index",
            lambda: prepare_prediction(input_files, output_dir, config, claim.type, run_id=run_id, restart=restart),
        )
        for notice in run.notices:
            shown.say(notice)
            log.info("settings.kept", reason=notice)  # for Prefect; a terminal has it already
        if run.already_complete:
            return finished_prediction(run)
        embed = embed or partial(embed_job, claim=claim, workers=workers, limits=limits, telemetry=shown, stop=stop)
        with failure_noted(layout):
            stages.do("fragments", lambda: run.do(fragments_stage(run, stop)))
            embeddings = []
            with claim.held(shown, run_id=run_id, stop=stop):
                for job in embedding_jobs(run):
                    with stages.shown(job.stage):
                        result = embed(job)
                    record_embedding(run, job.stage, result, seconds=stages.seconds()[job.stage])
                    embeddings.append(result)
            stages.do("classify", lambda: run.do(classify_stage(run, stop)))
            stages.do("contigs", lambda: call(run, stop))
            return stages.do("report", lambda: close_prediction(run, embeddings, write_report))


def fragments_stage(run: PredictionRun, stop: threading.Event | None = None) -> Stage:
    """Make chunks of the contigs, and keep their open frames."""
    config, layout = run.config, run.layout
    chunked = run.chunk_files if config.keep_chunks else None

    def work() -> object:
        return write_fragments(
            run.open_index(),
            chunk_nt=config.chunk_nt,
            min_nt=config.min_nt,
            nucleotide=run.nucleotide_files,
            protein=run.protein_files,
            chunked=chunked,
            open_frames=layout.open_frames,
            stop=stop,
        )

    written = [*run.nucleotide_files, *run.protein_files, layout.open_frames, *(chunked or [])]
    return Stage(name="fragments", fingerprint=run.fingerprint, files=written, work=work)


def embedding_jobs(run: PredictionRun) -> list[EmbeddingJob]:
    """Return the embedding runs that scores still need: none where every frame has its score."""
    if run.is_done(classify_stage(run)):
        return []
    return [job for job in map(partial(_embedding_job, run), EMBEDDING_STAGES) if not _has_moved_whole(run, job)]


def _embedding_job(run: PredictionRun, stage: str) -> EmbeddingJob:
    config, layout = run.config, run.layout
    if stage == "dna":
        return EmbeddingJob(stage=stage, model=config.dna, files=run.nucleotide_files, folder=layout.dna_dir)
    return EmbeddingJob(stage=stage, model=config.protein, files=run.protein_files, folder=layout.protein_dir)


def record_embedding(run: PredictionRun, stage: str, result: RunResult, *, seconds: float) -> None:
    """
    Note how an embedding run ended; the next stages make do with rows that are missing, not with none at all.

    Raises:
        StoppedError: It was stopped.
        ConfigurationError, BadInputError, OutputError, WorkersFailedError: It has no row, or could not be written.
    """
    result.raise_unless(allow_partial=True)
    counts = {"rows": result.num_rows, "missing": result.num_missing, "copies": result.num_copies}
    run.record_embedding(stage, result, counts, seconds=seconds, notes=result.notes())


def classify_stage(run: PredictionRun, stop: threading.Event | None = None) -> Stage:
    """Score every frame that has its embeddings and, by a contig model, the contigs."""
    layout, config = run.layout, run.config
    written = [layout.frame_scores, layout.prediction_results, layout.highest_score]
    if config.card.contig_model is not None:
        written += [layout.contig_scores, layout.window_scores]

    def work() -> object:
        order = run.frame_order()
        rows: dict[str, Any] = {stage: _rows_of(run, stage) for stage in EMBEDDING_STAGES}
        classifier: Any = importlib.import_module(CLASSIFIER).load_classifier(config.classifier_dir)
        counts: object = importlib.import_module(CLASSIFICATION).classify_frames(
            order, classifier, layout, **rows, threads=config.dna.settings.hardware.threads, stop=stop
        )
        if config.card.contig_model is not None:
            model: Any = importlib.import_module(CONTIG_MODEL).load_contig_model(config.classifier_dir, config.card)
            score_contigs(order, model, layout, **rows, stop=stop)
        return counts

    return Stage(
        name="classify",
        fingerprint=run.fingerprint,
        files=written,
        work=work,
        is_whole=lambda record: record.counts.get("scored") == record.counts.get("frames"),
    )


def call(run: PredictionRun, stop: threading.Event | None = None) -> None:
    """Call every contig, and remove the tables of formats that are not wanted any more."""
    layout, config = run.layout, run.config
    formats = {TableFormat.JSON: layout.contigs_json, TableFormat.PARQUET: layout.contigs_parquet}
    chosen = [path for one, path in formats.items() if one in config.formats]
    written = [layout.contigs, layout.viral_fasta, layout.tracks, layout.viral_regions, *chosen]
    identity = fingerprint([run.manifest.stages["classify"].files, config.output_settings()])
    for path in formats.values():
        if path not in chosen and path.name in run.manifest.outputs:
            durable.remove(path)  # of another threshold; a killed start may have left it
    rules = CallRules(
        threshold=config.threshold,
        min_nt=config.min_nt,
        classifier=config.card.name,
        fingerprint=config.fingerprint,
        has_contig_model=config.card.contig_model is not None,
    )

    def work() -> dict[str, int]:
        calls = call_contigs(
            run.frame_order(),
            layout,
            rules,
            as_json=TableFormat.JSON in config.formats,
            as_parquet=TableFormat.PARQUET in config.formats,
            stop=stop,
        )
        counted = (*map(str, Call), BY_SEQUENCE) if rules.has_contig_model else tuple(Call)
        return {name.replace(" ", "_"): calls[name] for name in counted}

    run.do(Stage(name="contigs", fingerprint=identity, files=written, work=work))


def close_prediction(
    run: PredictionRun, embeddings: Sequence[RunResult], write_report: ReportWriter
) -> PredictionResult:
    """
    List what is missing, prove that the counts add up, write the outcome into the manifest, and then the report.

    Raises:
        OutputError: A file cannot be written.
    """
    layout, manifest, config = run.layout, run.manifest, run.config
    index = run.open_index()
    stages = manifest.stages
    fragments, classified, calls = (stages[name].counts for name in ("fragments", "classify", "contigs"))
    looked_at = index.lengths[:] >= config.min_nt
    manifest.counts = {
        **fragments,
        "skipped": index.num_skipped,
        "scored_frames": classified["scored"],
        "missing_frames": classified["frames"] - classified["scored"],
        "short_for_classifier": int(np.count_nonzero((index.lengths[:] < config.chunk_nt / 2) & looked_at)),
        **calls,
    }
    _list_failed(run)
    prove_counts(manifest.counts)
    manifest.notes = notes_on_contigs(
        manifest.counts, manifest.sequences, chunk_nt=config.chunk_nt, min_nt=config.min_nt
    )
    manifest.notes += [f"{stage}: {note}" for stage in EMBEDDING_STAGES for note in stages[stage].notes]
    manifest.notes += [config.card.worth] if config.card.worth else []
    manifest.end("partial" if manifest.counts["missing_frames"] else "complete")
    manifest.output_settings = config.output_settings()
    manifest.files = {
        name: sha256 for stage in ("fragments", "classify", "contigs") for name, sha256 in stages[stage].files.items()
    }
    if layout.failed_sequences.exists():
        manifest.files[layout.failed_sequences.name] = durable.sha256_of(layout.failed_sequences)
    stages.pop("report", None)
    manifest.write(layout.manifest)
    began_s = time.monotonic()
    written = write_report(layout)
    seconds = time.monotonic() - began_s
    manifest.files[written.name] = durable.sha256_of(written)
    run.record("report", fingerprint(manifest.files), [written], {}, seconds=seconds)
    if manifest.state == "complete":
        remove_unpacked(layout)
    return _result(run, embeddings)


def finished_prediction(run: PredictionRun) -> PredictionResult:
    """Return what a folder holds that has everything already."""
    return _result(run, (), was_complete=True)


def _result(run: PredictionRun, embeddings: Sequence[RunResult], *, was_complete: bool = False) -> PredictionResult:
    manifest = run.manifest
    return PredictionResult(
        output_dir=run.layout.output_dir,
        state=manifest.state,
        counts=manifest.counts,
        sequences=manifest.sequences,
        notes=tuple(manifest.notes),
        stages_s={name: stage.seconds for name, stage in manifest.stages.items()},
        computed=tuple(run.computed),
        contigs_path=run.layout.contigs,
        report_path=run.layout.report,
        fingerprint=manifest.fingerprint,
        embeddings=tuple(embeddings),
        was_complete=was_complete,
    )


def _has_moved_whole(run: PredictionRun, job: EmbeddingJob) -> bool:
    """
    Whether an embedding run was recorded as done, and the folder was moved since with all that it holds.

    The manifest records input paths, so a moved embedding run cannot be resumed. A complete one does not need to be.
    """
    layout, files = RunLayout(job.folder), job.files
    record = run.manifest.stages.get(job.stage)
    if record is None or record.fingerprint != run.fingerprint or not layout.manifest.exists():
        return False
    earlier = RunManifest.read(layout.manifest)
    if [item["path"] for item in earlier.inputs] == [os.path.realpath(path) for path in files]:
        return False
    is_same = [item["sha256"] for item in earlier.inputs] == [durable.sha256_of(path) for path in files]
    return is_same and is_intact(layout.embeddings, earlier.files.get(layout.embeddings.name, ""))


def _rows_of(run: PredictionRun, stage: str) -> Path:
    embedded = RunLayout(_embedding_job(run, stage).folder)
    return embedded.embeddings if embedded.embeddings.exists() else embedded.partial_embeddings


def _list_failed(run: PredictionRun) -> None:
    """List the skipped contigs, then the frames that a model has no row of."""
    layout, index = run.layout, run.open_index()
    if not index.num_skipped and not run.manifest.counts["missing_frames"]:
        durable.remove(layout.failed_sequences)
        return
    with durable.replacing(layout.failed_sequences) as file:
        file.write(FAILED_HEADER.encode())
        for record in index.skipped():
            file.write(f"{record.sequence_id}\t{record.reason}\t0\n".encode())
        for stage in EMBEDDING_STAGES:
            listed = RunLayout(_embedding_job(run, stage).folder).failed_sequences
            if listed.is_file():
                with listed.open(encoding="utf-8", newline="\n") as lines:
                    next(lines, None)
                    for line in lines:
                        name, _, rest = line.partition("\t")
                        file.write(f"{name}\t{stage}: {rest}".encode())
