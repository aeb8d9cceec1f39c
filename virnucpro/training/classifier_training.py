"""
From labelled genomes to a classifier without an orchestrator: split, pieces, two embedding runs, training, measuring.

``run_training`` reads as the pipeline. The flow does the same stages, each as a task. A stage that was recorded and
whose files are intact is not done again, and the embedding runs continue where they were.
"""

from __future__ import annotations

import importlib
import json
import threading
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from virnucpro import durable
from virnucpro.pipeline.cpu_workers import devices_for
from virnucpro.pipeline.device_claim import DeviceClaim
from virnucpro.pipeline.multi_gpu_inference import new_run_id, run_embedding
from virnucpro.pipeline.prediction_run import counts_of, timed
from virnucpro.run_layout import TrainingLayout
from virnucpro.store.run_lock import RunLock
from virnucpro.telemetry.progress import QuietView
from virnucpro.telemetry.run_telemetry import RunTelemetry
from virnucpro.training.fitting.embedded_pieces import cut_frames
from virnucpro.training.fitting.pieces import PieceRules, cut_pieces, write_pieces
from virnucpro.training.genomes.encoder_data import training_data_of
from virnucpro.training.genomes.genome_split import SPLITS, TEST, TRAIN, SplitGenomes, split_labelled
from virnucpro.training.genomes.related import read_genomes
from virnucpro.training.training_run import TrainingRun, prepare_training, remove_work, training_failure_noted
from virnucpro.training.training_settings import MEASURED_COVERAGE, TRAINING_COVERAGE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virnucpro.config import ModelConfig, RunLimits
    from virnucpro.pipeline.devices import Device
    from virnucpro.pipeline.run_result import RunResult
    from virnucpro.training.genomes.labelled_genomes import LabelledGenome
    from virnucpro.training.training_settings import TrainingConfig

EMBEDDING_STAGES = ("dna", "protein")
FITTING = "virnucpro.training.fitting.classifier_fitting"
"""By name: it imports torch, which this process does without until its workers have ended."""


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """How a training went."""

    output_dir: Path
    """Folder of the classifier."""
    name: str
    """Of the classifier."""
    counts: dict[str, int]
    """Genomes, pieces, chunks and frames."""
    notes: tuple[str, ...]
    """What a person should know, a sentence each."""
    stages_s: dict[str, float]
    """Seconds of each stage."""
    worth: str
    """What was measured, in one sentence."""
    was_complete: bool
    """The folder held it already."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "output_dir": str(self.output_dir), "notes": list(self.notes)}


def run_training(
    inputs: Sequence[str | Path],
    output_dir: str | Path,
    config: TrainingConfig,
    devices: DeviceClaim | Sequence[Device],
    *,
    workers: int | None = None,
    limits: RunLimits | None = None,
    telemetry: RunTelemetry | None = None,
    stop: threading.Event | None = None,
    restart: bool = False,
) -> TrainingResult:
    """
    Train a classifier; starting again in the same folder continues what is missing.

    Args:
        inputs: Files of labelled genomes, or folders of them.
        output_dir: Folder of the classifier.
        config: What to make.
        devices: A claim, whose devices are waited for once they are needed and kept over both embedding runs, or one
            device a worker, which nobody else may use.
        workers: CPU workers that were asked for.
        limits: Attempts and time limits of the embedding runs.
        telemetry: Shows the training; by default one of its own, which says what goes wrong on standard error.
        stop: Set it to end the training at the next batch boundary.
        restart: Remove what the folder holds of earlier trainings first.

    Raises:
        BadInputError: The genomes or labels cannot be used.
        ConfigurationError: A setting cannot work, or the folder holds another training.
        RunLockedError: Another run holds the folder.
        WorkersFailedError: A frame has no embedding.
        OutputError: Something cannot be written.
        StoppedError: *stop* was set.
    """
    stop = stop or threading.Event()
    run_id = new_run_id()
    layout = TrainingLayout(Path(output_dir))
    claim = DeviceClaim.of(devices)
    with (
        RunTelemetry(views=[QuietView()]) if telemetry is None else nullcontext(telemetry) as shown,
        RunLock(layout.lock, run_id=run_id),
        shown.running(layout, run_id),
    ):
        with shown.stage("index"):
            run = prepare_training(inputs, output_dir, config, claim.type, run_id=run_id, restart=restart)
        if run.already_complete:
            return training_result(run, was_complete=True)
        with training_failure_noted(run):
            with shown.stage("split"):
                split(run)
            with shown.stage("pieces"):
                cut(run, stop)
            with claim.held(shown, run_id=run_id, stop=stop):
                for stage in stages_to_embed(run):
                    model, frames = embedding_job(run, stage)
                    with shown.stage(stage):
                        result = run_embedding(
                            [frames],
                            embedding_dir(run, stage),
                            model,
                            devices_for(claim, model, [frames], workers=workers),
                            limits=limits,
                            telemetry=shown,
                            stop=stop,
                        )
                    record_embedding(run, stage, result, seconds=shown.stages_s()[stage])
            with shown.stage("train"):
                fit(run, stop)
            with shown.stage("evaluate"):
                return evaluate(run)


def split(run: TrainingRun) -> None:
    """
    Split the genomes into three parts that are not related, unless that is done.

    Raises:
        BadInputError: A label is missing, or cannot be in every part; or a file of relatives is no FASTA.
    """
    if run.is_done("split"):
        return
    config = run.config
    assert run.labelled is not None
    seen = training_data_of(config.dna)
    with timed() as seconds:
        found = split_labelled(
            run.labelled.genomes,
            read_genomes(config.leave_out),
            seed=config.seed,
            share=config.held_out_share,
            shuffle_labels=config.shuffle_labels,
            is_seen=[seen is not None and seen.has(genome) for genome in run.labelled.genomes],
        )
        durable.write_bytes(run.layout.split, (json.dumps(_as_json(found), indent=1) + "\n").encode())
    by_part = Counter(found.parts)
    counts = {
        "records": len(run.labelled.genomes),
        "left out": len(found.left_out),
        "clusters": len(set(found.clusters)),
        **{f"{part} records": by_part[part] for part in SPLITS},
    }
    run.record("split", [run.layout.split], counts, seconds=seconds[0])


def read_split(run: TrainingRun) -> SplitGenomes:
    """Return what ``split`` found."""
    assert run.labelled is not None
    data = json.loads(run.layout.split.read_bytes())
    by_accession = {genome.accession: genome for genome in run.labelled.genomes}
    return SplitGenomes(
        genomes=[
            replace(by_accession[row["accession"]], is_virus=row["is_virus"], group=row["group"])
            for row in data["records"]
        ],
        parts=[row["part"] for row in data["records"]],
        clusters=[row["cluster"] for row in data["records"]],
        left_out=data["left_out"],
        largest_share=data["largest_share"],
        notes=data["notes"],
    )


def cut(run: TrainingRun, stop: threading.Event | None = None) -> None:
    """
    Cut pieces out of each part's genomes, and chunks and frames out of the pieces, unless that is done.

    Raises:
        OutputError: A file cannot be written.
        StoppedError: *stop* was set.
    """
    if run.is_done("pieces"):
        return
    config, layout = run.config, run.layout
    found = read_split(run)
    with timed() as seconds:
        pieces = []
        for part in SPLITS:
            rules = piece_rules(config, part, found.of_part(part))
            count = config.num_pieces if part == TRAIN else config.measured_pieces
            pieces += cut_pieces(found.of_part(part), count, rules, part=part, seed=config.seed)
        write_pieces(pieces, layout.pieces, layout.pieces_table)
        counts = counts_of(cut_frames(layout, config.chunk_nt, stop))
        for chunk_nt in config.also_chunk_nt:
            other = layout.with_chunks(chunk_nt)
            write_pieces([piece for piece in pieces if piece.part == TEST], other.pieces, other.pieces_table)
            cut_frames(other, chunk_nt, stop)
    by_part = Counter(piece.part for piece in pieces)
    counts = {
        **{f"{part} pieces": by_part[part] for part in SPLITS},
        "nucleotides": sum(len(piece.letters) for piece in pieces),
        **{name: counts[name] for name in ("chunks", "open_chunks", "frames")},
    }
    layouts = [layout, *(layout.with_chunks(chunk_nt) for chunk_nt in config.also_chunk_nt)]
    written = [
        path
        for one in layouts
        for path in (
            one.pieces,
            one.pieces_table,
            one.contig_index,
            one.nucleotide_frames,
            one.protein_frames,
            one.open_frames,
        )
    ]
    run.record("pieces", written, counts, seconds=seconds[0])


def piece_rules(config: TrainingConfig, part: str, genomes: Sequence[LabelledGenome]) -> PieceRules:
    """Return how the pieces of a part's genomes are drawn; groups with both labels, shuffled, give as many of each."""
    weights = dict(config.group_weights)
    if config.shuffle_labels:
        num_nt: Counter[str] = Counter()
        for genome in genomes:
            num_nt[genome.group] += len(genome.letters)
        weights = {group: num_nt[group] ** 0.5 for group in num_nt} | weights
    return PieceRules(
        lengths_nt=config.lengths_nt,
        group_weights=weights,
        most_coverage=TRAINING_COVERAGE if part == TRAIN else MEASURED_COVERAGE,
    )


def stages_to_embed(run: TrainingRun) -> tuple[str, ...]:
    """Return the embedding runs that the classifier needs: of DNA and proteins, for each length of chunks."""
    others = tuple(f"{kind}_{chunk_nt}" for chunk_nt in run.config.also_chunk_nt for kind in EMBEDDING_STAGES)
    return (*EMBEDDING_STAGES, *others)


def embedding_kind(stage: str) -> str:
    """Return what an embedding run is of: dna or protein."""
    return stage.partition("_")[0]


def embedding_dir(run: TrainingRun, stage: str) -> Path:
    """Return the folder of an embedding run."""
    layout = _layout_of(run, stage)
    return layout.dna_dir if embedding_kind(stage) == "dna" else layout.protein_dir


def embedding_job(run: TrainingRun, stage: str) -> tuple[ModelConfig, Path]:
    """Return the model and the input of an embedding run."""
    layout = _layout_of(run, stage)
    if embedding_kind(stage) == "dna":
        return run.config.dna, layout.nucleotide_frames
    return run.config.protein, layout.protein_frames


def _layout_of(run: TrainingRun, stage: str) -> TrainingLayout:
    _, _, chunk_nt = stage.partition("_")
    return run.layout.with_chunks(int(chunk_nt)) if chunk_nt else run.layout


def record_embedding(run: TrainingRun, stage: str, result: RunResult, *, seconds: float) -> None:
    """
    Note that an embedding run is whole: a training does without no row.

    Raises:
        StoppedError: It was stopped.
        ConfigurationError, BadInputError, OutputError, WorkersFailedError: A row is missing, or could not be written.
    """
    result.raise_unless(allow_partial=False)
    before = run.manifest.stages.get(stage)
    if not result.ranks and before is not None:  # it was complete already: keep what it took then
        seconds = before.seconds
    if result.ranks:
        run.manifest.devices = [rank.device for rank in result.ranks]
    run.record(stage, [], {"rows": result.num_rows}, seconds=seconds)


def fit(run: TrainingRun, stop: threading.Event | None = None) -> None:
    """
    Train the frame classifier and the contig model, unless that is done.

    Raises:
        StoppedError: *stop* was set.
        OutputError: A file cannot be written.
    """
    if run.is_done("train"):
        return
    with timed() as seconds:
        written, counts = importlib.import_module(FITTING).fit_classifier(run, read_split(run), stop)
    run.record("train", written, counts, seconds=seconds[0])


def evaluate(run: TrainingRun) -> TrainingResult:
    """
    Measure the classifier on the test part, and write it with its cards into the folder.

    Raises:
        OutputError: A file cannot be written.
    """
    manifest, layout = run.manifest, run.layout
    found = read_split(run)
    with timed() as seconds:
        written = importlib.import_module(FITTING).publish_classifier(run, found)
    assert run.labelled is not None
    manifest.counts = {
        name: count for stage in ("split", "pieces", "train") for name, count in manifest.stages[stage].counts.items()
    }
    manifest.notes = [*run.labelled.notes, *found.notes]
    manifest.files = {path.name: durable.sha256_of(path) for path in written}
    manifest.state = "complete"
    manifest.finished = datetime.now(UTC).isoformat(timespec="seconds")
    run.record("evaluate", written, {}, seconds=seconds[0])
    if not run.config.keep_work:
        remove_work(layout)
    return training_result(run)


def training_result(run: TrainingRun, *, was_complete: bool = False) -> TrainingResult:
    """Return what a folder holds that has everything."""
    manifest = run.manifest
    card = json.loads(run.results()[-1].read_bytes())
    return TrainingResult(
        output_dir=run.layout.output_dir,
        name=card["name"],
        counts=manifest.counts,
        notes=tuple(manifest.notes),
        stages_s={name: stage.seconds for name, stage in manifest.stages.items()},
        worth=card["worth"],
        was_complete=was_complete,
    )


def _as_json(found: SplitGenomes) -> dict[str, Any]:
    rows = zip(found.genomes, found.parts, found.clusters, strict=True)
    return {
        "records": [
            {
                "accession": genome.accession,
                "part": part,
                "cluster": number,
                "group": genome.group,
                "is_virus": genome.is_virus,
            }
            for genome, part, number in rows
        ],
        "left_out": found.left_out,
        "largest_share": found.largest_share,
        "notes": found.notes,
    }
