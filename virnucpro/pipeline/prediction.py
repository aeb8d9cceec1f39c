"""
From contigs to calls without an orchestrator: fragments, two embedding runs, scores, calls, report.

``run_prediction`` reads as the pipeline. The flow does the same stages, each as a task. A stage that was recorded and
whose files are intact is not done again.
"""

from __future__ import annotations

import importlib
import os
import threading
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from virnucpro import durable
from virnucpro.config import fingerprint
from virnucpro.data.fragments import write_fragments
from virnucpro.pipeline.contig_calls import BY_SEQUENCE, CallRules, call_contigs
from virnucpro.pipeline.contig_scores import score_contigs
from virnucpro.pipeline.cpu_workers import devices_for
from virnucpro.pipeline.device_claim import DeviceClaim
from virnucpro.pipeline.multi_gpu_inference import new_run_id, run_embedding
from virnucpro.pipeline.prediction_preparation import prepare_prediction
from virnucpro.pipeline.prediction_result import PredictionResult, check_embedding, notes_on_contigs, prove_counts
from virnucpro.pipeline.prediction_run import PredictionRun, counts_of, prediction_failure_noted, timed
from virnucpro.pipeline.run_preparation import remove_unpacked
from virnucpro.pipeline.shard_aggregator import FAILED_HEADER
from virnucpro.run_layout import PredictionLayout, RunLayout
from virnucpro.settings import TableFormat
from virnucpro.store.contig_table import Call
from virnucpro.store.manifest import RunManifest
from virnucpro.store.run_lock import RunLock
from virnucpro.telemetry.progress import QuietView
from virnucpro.telemetry.run_telemetry import RunTelemetry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from virnucpro.config import ModelConfig, RunLimits
    from virnucpro.pipeline.devices import Device
    from virnucpro.pipeline.prediction_settings import PredictionConfig
    from virnucpro.pipeline.run_result import RunResult

    ReportWriter = Callable[[PredictionLayout], Path]
    """Makes ``report.html`` from the other files of a run."""

EMBEDDING_STAGES = ("dna", "protein")
CLASSIFICATION = "virnucpro.pipeline.classification"
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
    telemetry: RunTelemetry | None = None,
    stop: threading.Event | None = None,
    restart: bool = False,
) -> PredictionResult:
    """
    Say which contigs are viral; starting again in the same folder continues what is missing.

    Args:
        input_files: FASTA, FASTQ or unaligned BAM, plain or gzip, in the order of the result.
        output_dir: The run's folder.
        config: What to compute.
        devices: A claim, whose devices are waited for once they are needed and kept over both embedding runs, or one
            device a worker, which nobody else may use.
        write_report: Makes the report.
        workers: CPU workers that were asked for.
        limits: Attempts and time limits of the embedding runs.
        telemetry: Shows the run; by default one of its own, which leaves metrics and status in the folder, and says
            what goes wrong on standard error.
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
    run_id = new_run_id()
    layout = PredictionLayout(Path(output_dir))
    claim = DeviceClaim.of(devices)
    with (
        RunTelemetry(views=[QuietView()]) if telemetry is None else nullcontext(telemetry) as shown,
        RunLock(layout.lock, run_id=run_id),
        shown.running(layout, run_id),
    ):
        with shown.stage("index"):
            run = prepare_prediction(input_files, output_dir, config, claim.type, run_id=run_id, restart=restart)
        for notice in run.notices:
            shown.say(notice)
        if run.already_complete:
            return finished_prediction(run)
        with prediction_failure_noted(run):
            with shown.stage("fragments"):
                cut_fragments(run, stop)
            embeddings = []
            with claim.held(shown, run_id=run_id, stop=stop):
                for stage in stages_to_embed(run):
                    model, files = embedding_job(run, stage)
                    with shown.stage(stage):
                        result = run_embedding(
                            files,
                            embedding_dir(run, stage),
                            model,
                            devices_for(claim, model, files, workers=workers),
                            limits=limits,
                            telemetry=shown,
                            stop=stop,
                        )
                    record_embedding(run, stage, result, seconds=shown.stages_s()[stage])
                    embeddings.append(result)
            with shown.stage("classify"):
                classify(run, stop)
            with shown.stage("contigs"):
                decide(run, stop)
            with shown.stage("report"):
                return close_prediction(run, embeddings, write_report)


def cut_fragments(run: PredictionRun, stop: threading.Event | None = None) -> None:
    """Cut the contigs into chunks and keep their open frames, unless that is done."""
    written = [*run.nucleotide_files, *run.protein_files, run.layout.open_frames]
    chunked = run.chunk_files if run.config.keep_chunks else None
    if run.is_done("fragments", run.scores_fingerprint, needed=[*written, *(chunked or [])]):
        return
    with timed() as seconds:
        counts = write_fragments(
            run.open_index(),
            chunk_nt=run.config.chunk_nt,
            min_nt=run.config.min_nt,
            nucleotide=run.nucleotide_files,
            protein=run.protein_files,
            chunked=chunked,
            open_frames=run.layout.open_frames,
            stop=stop,
        )
    run.record("fragments", run.scores_fingerprint, [*written, *(chunked or [])], counts_of(counts), seconds=seconds[0])


def needs_scores(run: PredictionRun) -> bool:
    """Whether some frame has no score yet, or what was scored is not as it was recorded."""
    record = run.manifest.stages.get("classify")
    all_scored = record is not None and record.counts.get("scored") == record.counts.get("frames")
    return not (all_scored and run.is_done("classify", run.scores_fingerprint))


def stages_to_embed(run: PredictionRun) -> tuple[str, ...]:
    """Return the embedding runs that scores still need: none where every frame has its score."""
    if not needs_scores(run):
        return ()
    return tuple(stage for stage in EMBEDDING_STAGES if not _has_moved_whole(run, stage))


def embedding_dir(run: PredictionRun, stage: str) -> Path:
    """Return the folder of an embedding run."""
    return run.layout.dna_dir if stage == "dna" else run.layout.protein_dir


def embedding_job(run: PredictionRun, stage: str) -> tuple[ModelConfig, list[Path]]:
    """Return the model and the input of an embedding run."""
    if stage == "dna":
        return run.config.dna, run.nucleotide_files
    return run.config.protein, run.protein_files


def record_embedding(run: PredictionRun, stage: str, result: RunResult, *, seconds: float) -> None:
    """
    Note how an embedding run ended; the next stages make do with rows that are missing, not with none at all.

    Raises:
        StoppedError: It was stopped.
        ConfigurationError, BadInputError, OutputError, WorkersFailedError: It has no row, or could not be written.
    """
    check_embedding(result)
    assert result.output_path is not None
    before = run.manifest.stages.get(stage)
    was_done = not result.ranks and before is not None
    if was_done and before is not None:  # keep what it took then
        seconds = before.seconds
    counts = {"rows": result.num_rows, "missing": result.num_missing, "copies": result.num_copies}
    if result.ranks:
        run.manifest.devices = [rank.device for rank in result.ranks]
    notes = result.notes() if result.ranks or before is None else before.notes
    run.record(stage, run.scores_fingerprint, [], counts, seconds=seconds, notes=notes, was_done=was_done)


def classify(run: PredictionRun, stop: threading.Event | None = None) -> None:
    """Score every frame that has its embeddings, and by a contig model the contigs, unless that is done."""
    if not needs_scores(run):
        return
    order, layout, config = run.frame_order(), run.layout, run.config
    rows: dict[str, Any] = {stage: _rows_of(run, stage) for stage in EMBEDDING_STAGES}
    threads = config.dna.settings.hardware.threads
    written = [layout.frame_scores, layout.prediction_results, layout.highest_score]
    with timed() as seconds:
        classifier: Any = importlib.import_module(CLASSIFIER).load_classifier(config.classifier_dir)
        counts = importlib.import_module(CLASSIFICATION).classify_frames(
            order, classifier, layout, **rows, threads=threads, stop=stop
        )
        if config.card.contig_model is not None:
            model: Any = importlib.import_module(CONTIG_MODEL).load_contig_model(config.classifier_dir, config.card)
            score_contigs(order, model, layout, **rows, stop=stop)
            written += [layout.contig_scores, layout.window_scores]
    run.record("classify", run.scores_fingerprint, written, counts_of(counts), seconds=seconds[0])


def decide(run: PredictionRun, stop: threading.Event | None = None) -> None:
    """Call every contig, unless that is done."""
    layout, config = run.layout, run.config
    formats = {TableFormat.JSON: layout.contigs_json, TableFormat.PARQUET: layout.contigs_parquet}
    chosen = [path for one, path in formats.items() if one in config.formats]
    written = [layout.contigs, layout.viral_fasta, layout.tracks, layout.viral_regions, *chosen]
    identity = fingerprint([run.manifest.stages["classify"].files, config.output_settings()])
    for path in formats.values():
        if path not in chosen and path.name in run.manifest.outputs:
            durable.remove(path)  # of another threshold
    if run.is_done("contigs", identity, needed=written):
        return
    rules = CallRules(
        threshold=config.threshold,
        min_nt=config.min_nt,
        classifier=config.card.name,
        fingerprint=config.fingerprint,
        has_contig_model=config.card.contig_model is not None,
    )
    with timed() as seconds:
        calls = call_contigs(
            run.frame_order(),
            layout,
            rules,
            as_json=TableFormat.JSON in config.formats,
            as_parquet=TableFormat.PARQUET in config.formats,
            stop=stop,
        )
    counted = (*map(str, Call), BY_SEQUENCE) if rules.has_contig_model else tuple(Call)
    counts = {name.replace(" ", "_"): calls[name] for name in counted}
    run.record("contigs", identity, written, counts, seconds=seconds[0])


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
    manifest.state = "partial" if manifest.counts["missing_frames"] else "complete"
    manifest.finished = datetime.now(UTC).isoformat(timespec="seconds")
    manifest.output_settings = config.output_settings()
    manifest.files = {
        name: sha256 for stage in ("fragments", "classify", "contigs") for name, sha256 in stages[stage].files.items()
    }
    if layout.failed_sequences.exists():
        manifest.files[layout.failed_sequences.name] = durable.sha256_of(layout.failed_sequences)
    stages.pop("report", None)
    manifest.write(layout.manifest)
    with timed() as seconds:
        written = write_report(layout)
    manifest.files[written.name] = durable.sha256_of(written)
    run.record("report", fingerprint(manifest.files), [written], {}, seconds=seconds[0])
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


def _has_moved_whole(run: PredictionRun, stage: str) -> bool:
    """
    Whether an embedding run was recorded as done, and the folder has moved since with all that it holds.

    An embedding run names its input by path, and so would not go on; but what is whole needs not to go on.
    """
    layout, files = RunLayout(embedding_dir(run, stage)), embedding_job(run, stage)[1]
    record = run.manifest.stages.get(stage)
    if record is None or record.fingerprint != run.scores_fingerprint or not layout.manifest.exists():
        return False
    earlier = RunManifest.read(layout.manifest)
    if [item["path"] for item in earlier.inputs] == [os.path.realpath(path) for path in files]:
        return False
    is_same = [item["sha256"] for item in earlier.inputs] == [durable.sha256_of(path) for path in files]
    whole = earlier.files.get(layout.embeddings.name)
    return is_same and layout.embeddings.is_file() and durable.sha256_of(layout.embeddings) == whole


def _rows_of(run: PredictionRun, stage: str) -> Path:
    embedded = RunLayout(embedding_dir(run, stage))
    return embedded.embeddings if embedded.embeddings.exists() else embedded.partial_embeddings


def _list_failed(run: PredictionRun) -> None:
    """List the contigs that were left out, then the frames that a model has no row of."""
    layout, index = run.layout, run.open_index()
    if not index.num_skipped and not run.manifest.counts["missing_frames"]:
        durable.remove(layout.failed_sequences)
        return
    with durable.replacing(layout.failed_sequences) as file:
        file.write(FAILED_HEADER.encode())
        for record in index.skipped():
            file.write(f"{record.sequence_id}\t{record.reason}\t0\n".encode())
        for stage in EMBEDDING_STAGES:
            listed = RunLayout(embedding_dir(run, stage)).failed_sequences
            if listed.is_file():
                with listed.open(encoding="utf-8", newline="\n") as lines:
                    next(lines, None)
                    for line in lines:
                        name, _, rest = line.partition("\t")
                        file.write(f"{name}\t{stage}: {rest}".encode())
