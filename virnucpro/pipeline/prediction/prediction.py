"""
The prediction: from contigs to calls by composition scores, two embedding runs of their frames, calls, report.

What the scores do not need is skipped: no contig is embedded for a classifier that reads composition alone, nor one
whose composition score a cascade takes as it is.
``run_prediction`` reads as the pipeline. A stage that was recorded and whose files are intact is not done again.
"""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from virnucpro import durable
from virnucpro.calls.contig_calls import BY_COMPOSITION, BY_SEQUENCE, ESCAPED_IDS, CallOutputs, CallRules, call_contigs
from virnucpro.calls.contig_scores import score_contigs
from virnucpro.choices import TableFormat, WrittenGenes
from virnucpro.config import RunLimits, fingerprint
from virnucpro.data.fragments import write_fragments
from virnucpro.models.contigs.contig_model import load_contig_model
from virnucpro.pipeline.executor import LocalRanks
from virnucpro.pipeline.hardware.device_claim import DeviceClaim
from virnucpro.pipeline.multi_gpu_inference import embed_job
from virnucpro.pipeline.prediction.composition import Composition, Homology
from virnucpro.pipeline.prediction.contig_run import compute_contigs
from virnucpro.pipeline.prediction.genes import Genes
from virnucpro.pipeline.prediction.preparation import prepare_prediction
from virnucpro.pipeline.prediction.result import EMBEDDING_STAGES, close_prediction, prediction_result
from virnucpro.pipeline.prediction.sample import read_sample
from virnucpro.pipeline.run.run import failure_noted, is_intact, running
from virnucpro.pipeline.run.stages import Stage, Stages, call_stage
from virnucpro.run_layout import PredictionLayout, RunLayout
from virnucpro.store.contig_table import Call
from virnucpro.store.locks.worker_lock import taking_part
from virnucpro.store.manifest import RunManifest

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Sequence

    from virnucpro.arrays import BoolArray
    from virnucpro.calls.frame_order import FrameOrder
    from virnucpro.pipeline.devices import Device
    from virnucpro.pipeline.executor import Executor
    from virnucpro.pipeline.hosts.result_passes import ItemMap
    from virnucpro.pipeline.prediction.contig_run import ContigRun
    from virnucpro.pipeline.prediction.preparation import PredictionRun
    from virnucpro.pipeline.prediction.result import PredictionResult, ReportWriter
    from virnucpro.pipeline.prediction.settings import PredictionConfig
    from virnucpro.pipeline.run.run_result import RunResult
    from virnucpro.pipeline.run.stages import EmbeddingJob, StageRunner
    from virnucpro.store.manifest import StageRecord
    from virnucpro.telemetry.run_telemetry import RunTelemetry

log = structlog.get_logger(__name__)


def run_prediction(
    input_files: Sequence[str | Path],
    output_dir: str | Path,
    config: PredictionConfig,
    devices: DeviceClaim | Sequence[Device],
    *,
    write_report: ReportWriter,
    workers: int | None = None,
    limits: RunLimits | None = None,
    executor: Callable[[], Executor] = LocalRanks,
    embed: Callable[[EmbeddingJob], RunResult] | None = None,
    elsewhere: ItemMap | None = None,
    stage_runner: StageRunner = call_stage,
    telemetry: RunTelemetry | None = None,
    stop: threading.Event | None = None,
    restart: bool = False,
) -> PredictionResult:
    """
    Call every contig viral or not; starting again in the same folder resumes what is missing.

    Args:
        input_files: FASTA, FASTQ or unaligned BAM, plain or compressed, in the order of the result.
        devices: A claim, whose devices are waited for once they are needed and kept over both embedding runs, or one
            device a worker, which no other process may use.
        workers: Number of CPU workers; None for as many as the machine bears.
        limits: Attempts and time limits of the worker processes.
        executor: Returns what computes the ranks of a work on contigs; by default processes of this machine.
        embed: Does an embedding run; by default with processes of this machine.
        elsewhere: Has frames classified on another host; None for this one.
        stage_runner: Does each other stage; by default in place.
        telemetry: Shows the run; by default one of its own, which reports failures on standard error.
        stop: Set it to end the run at the next batch boundary.
        restart: Remove what the folder holds of earlier runs first.
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
            shown.note(notice)
            log.info("settings.kept", reason=notice)  # for Prefect; a terminal has it already
        if run.already_complete:
            return prediction_result(run, was_complete=True)
        embed = embed or partial(embed_job, claim=claim, workers=workers, limits=limits, telemetry=shown, stop=stop)
        with failure_noted(layout):
            compute = partial(
                compute_contigs,
                run_id=run_id,
                workers=workers,
                log_level=config.log_level,
                limits=limits or RunLimits(),
                stages=stages,
                stop=stop,
            )
            if config.composition is not None:
                with stages.shown("composition"):
                    run.do(composition_stage(run, partial(compute, executor=executor()), stages))
                    if "composition" in run.computed:
                        _remove_parts(run)
            embeddings: list[RunResult] = []
            if config.cascade is not None:
                stages.do("fragments", lambda: run.do(fragments_stage(run, stop)))
                with claim.held(shown, run_id=run_id, stop=stop):
                    embeddings += [_embedded(run, job, embed, stages) for job in embedding_jobs(run)]
                stages.do("classify", lambda: run.do(classify_stage(run, stop, elsewhere)))
            with stages.shown("contigs"):
                call(run, partial(compute, executor=executor()), stages, stop)
            return stages.do("report", lambda: close_prediction(run, embeddings, write_report))


def composition_stage(run: PredictionRun, compute: Callable[..., ContigRun], stages: Stages) -> Stage:
    """Score the contigs by composition, and refine ambiguous scores."""
    config, layout = run.config, run.layout
    assert config.composition is not None
    common: dict[str, Any] = {"layout": layout, "fingerprint": run.fingerprint, "model": config.composition}
    common |= {"chunk_nt": config.chunk_nt, "min_nt": config.min_nt}
    works = Composition(**common), Homology(**common)
    quarantined: dict[int, tuple[str, int]] = {}

    def work() -> dict[str, int]:
        done = compute(works, task="score_contigs", join="aggregate_scores")
        quarantined.update(done.quarantined)
        stages.do("validate_scores", lambda: works[0].validate(done.units.lengths_nt))
        return done.counts

    def is_whole(record: StageRecord) -> bool:
        return not record.quarantined or "fragments" in run.manifest.stages  # what is embedded goes by the scores

    return Stage(
        name="composition",
        fingerprint=run.fingerprint,
        files=[layout.composition_scores, layout.composition_windows, layout.evidence, layout.topologies],
        work=work,
        is_whole=is_whole,
        quarantined=quarantined,
    )


def _remove_parts(run: PredictionRun) -> None:
    """Remove what was found of units, unless another start is to compute contigs in quarantine with the rest of it."""
    if not any(record.quarantined for record in run.manifest.stages.values()):
        durable.remove_tree(run.layout.contig_parts)


def _embedded(
    run: PredictionRun, job: EmbeddingJob, embed: Callable[[EmbeddingJob], RunResult], stages: Stages
) -> RunResult:
    with stages.shown(job.stage):
        result = embed(job)
    result.raise_unless(allow_partial=True)  # the next stages need rows, but not all
    counts = {"rows": result.num_rows, "missing": result.num_missing, "copies": result.num_copies}
    run.record_embedding(job.stage, result, counts, seconds=stages.seconds()[job.stage], notes=result.notes())
    return result


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
            chosen=run.is_embedded(),
            stop=stop,
        )

    written = [layout.open_frames, *(chunked or [])]
    if not run.is_done(classify_stage(run)):  # else they may have been removed
        written += [*run.nucleotide_files, *run.protein_files]
    return Stage(name="fragments", fingerprint=run.fingerprint, files=written, work=work)


def embedding_jobs(run: PredictionRun) -> list[EmbeddingJob]:
    """Return the embedding runs that scores still need: none where every frame has its score."""
    if run.is_done(classify_stage(run)):
        return []
    return [job for job in map(run.embedding_job, run.config.encoders) if not _has_moved_whole(run, job)]


def classify_stage(run: PredictionRun, stop: threading.Event | None = None, elsewhere: ItemMap | None = None) -> Stage:
    """Return the stage that does ``classify``, on another host where *elsewhere* is given."""
    layout, config = run.layout, run.config
    written = [layout.frame_scores, layout.prediction_results, layout.highest_score]
    if config.reads_embeddings:
        written += [layout.contig_scores, layout.window_scores]
    return Stage(
        name="classify",
        fingerprint=run.fingerprint,
        files=written,
        work=lambda: classify(run, stop) if elsewhere is None else elsewhere(_classify_for, [run])[0],
        is_whole=lambda record: record.counts.get("scored") == record.counts.get("frames"),
    )


def classify(run: PredictionRun, stop: threading.Event | None = None) -> dict[str, int]:
    """Score every frame that has its embeddings and, by a contig model that reads them, contigs; return the numbers."""
    # they import torch, which this process does without until its workers have ended
    from virnucpro.calls.classification import classify_frames  # noqa: PLC0415
    from virnucpro.models.classifier import load_classifier  # noqa: PLC0415

    layout, config = run.layout, run.config
    order, (dna, protein) = run.frame_order(), (_rows_of(run, stage) for stage in EMBEDDING_STAGES)
    classifier, threads = load_classifier(config.classifier_dir), config.encoders["dna"].settings.hardware.threads
    counts = classify_frames(order, classifier, layout, dna=dna, protein=protein, threads=threads, stop=stop)
    if config.reads_embeddings:
        model = load_contig_model(config.classifier_dir, config.card)
        written = (layout.contig_scores, layout.window_scores)
        score_contigs(order, model, written, dna=dna, protein=protein, stop=stop)
    return counts


def _classify_for(run: PredictionRun) -> dict[str, int]:
    with taking_part(run.layout.output_dir):
        return classify(run)


def call(
    run: PredictionRun, compute: Callable[..., ContigRun], stages: Stages, stop: threading.Event | None = None
) -> None:
    """Call every contig, find genes, and remove the files that are not wanted any more."""
    layout, config = run.layout, run.config
    outputs = CallOutputs(
        as_json=TableFormat.JSON in config.formats,
        as_parquet=TableFormat.PARQUET in config.formats,
        genes=config.genes,
        only_viral=config.only_viral,
        has_frames=config.cascade is not None,
    )
    has_genes = config.genes is not WrittenGenes.NONE
    optional = {
        layout.contigs_json: outputs.as_json,
        layout.contigs_parquet: outputs.as_parquet,
        layout.genes: has_genes,
        layout.gene_proteins: has_genes,
    }
    chosen = [path for path, is_chosen in optional.items() if is_chosen]
    written = [layout.contigs, layout.viral_fasta, layout.tracks, layout.viral_regions, layout.proviruses, *chosen]
    scores = [
        stage.files for name in ("composition", "classify") if (stage := run.manifest.stages.get(name)) is not None
    ]
    identity = fingerprint([scores, config.output_settings()])
    for path in optional:
        if path not in chosen and path.name in run.manifest.outputs:
            durable.remove(path)  # of another start; a killed one may have left it
    order = run.frame_order()
    rules = _call_rules(run, order)
    quarantined: dict[int, tuple[str, int]] = {}

    def called() -> tuple[Counter[str], BoolArray]:
        return call_contigs(order, layout, rules, run.score_reader(order), outputs, stop=stop)

    def work() -> dict[str, int]:
        calls, has_genes_C = stages.runner("contigs", called)
        counted = [*map(str, Call), *[BY_SEQUENCE] * rules.reads_embeddings]
        counted += [name for name in (BY_COMPOSITION, ESCAPED_IDS) if calls[name]]
        counts = {name.replace(" ", "_"): calls[name] for name in counted}
        if has_genes:
            genes = Genes(layout=layout, fingerprint=identity)
            genes.choose(has_genes_C)
            done = compute([genes], task="find_genes", join="aggregate_genes")
            counts |= done.counts
            quarantined.update(done.quarantined)
        return counts

    run.do(
        Stage(
            name="contigs",
            fingerprint=identity,
            files=written,
            work=work,
            is_whole=lambda record: not record.quarantined,
            quarantined=quarantined,
        )
    )
    _remove_parts(run)  # not before what is made of them is recorded: a kill between would cost it all


def _call_rules(run: PredictionRun, order: FrameOrder) -> CallRules:
    """Return the rules of calls, with the share of viruses in the sample, which is noted in the manifest."""
    config = run.config
    sample, limits, run.manifest.sample = read_sample(run, order)
    if sample is None and config.fdr is not None:
        log.warning("fdr.unused", reason=run.manifest.sample.why_off)
    return CallRules(
        limits=limits,
        sample=sample,
        min_nt=config.min_nt,
        classifier=config.card.name,
        fingerprint=config.fingerprint,
        has_contig_model=config.card.contig_model is not None,
        is_by_composition=config.is_by_composition,
        reads_embeddings=config.reads_embeddings,
        searches_proteins=config.composition is not None and config.composition.searches_proteins,
        quarantined=run.unscored(),
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
    embedded = RunLayout(run.embedding_job(stage).folder)
    return embedded.embeddings if embedded.embeddings.exists() else embedded.partial_embeddings
