"""
The training: from labelled genomes to a classifier by a split, fragments, embedding runs, training and measuring.

``run_training`` reads as the pipeline. A stage that was recorded and whose files are intact is not done again, and the
embedding runs resume.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from virnucpro import durable, run_folders
from virnucpro.pipeline.hardware.device_claim import DeviceClaim
from virnucpro.pipeline.multi_gpu_inference import embed_job
from virnucpro.pipeline.run.run import failure_noted, running
from virnucpro.pipeline.run.stages import EmbeddingJob, Stage, Stages, call_stage
from virnucpro.run_layout import TrainingLayout
from virnucpro.training.fitting.embedded_fragments import cut_frames
from virnucpro.training.fitting.training_fragments import (
    FragmentRules,
    cut_training_fragments,
    write_training_fragments,
)
from virnucpro.training.genomes.genome_split import SPLITS, TEST, TRAIN, SplitGenomes, split_labelled, training_data_of
from virnucpro.training.genomes.records import read_genomes
from virnucpro.training.training_run import TrainingRun, classifier_files, prepare_training, remove_work, trained_files
from virnucpro.training.training_settings import ERROR_SHARE, MEASURED_COVERAGE, TRAINING_COVERAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from virnucpro.config import RunLimits
    from virnucpro.pipeline.devices import Device
    from virnucpro.pipeline.run.run_result import RunResult
    from virnucpro.pipeline.run.stages import StageRunner
    from virnucpro.telemetry.run_telemetry import RunTelemetry
    from virnucpro.training.genomes.labelled_genomes import LabelledGenome
    from virnucpro.training.training_settings import TrainingConfig


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """How a training went."""

    output_dir: Path
    """Folder of the classifier."""
    name: str
    counts: dict[str, int]
    """Genomes, fragments, chunks and frames."""
    notes: tuple[str, ...]
    """What the user should know, a sentence each."""
    stages_s: dict[str, float]
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
    embed: Callable[[EmbeddingJob], RunResult] | None = None,
    stage_runner: StageRunner = call_stage,
    telemetry: RunTelemetry | None = None,
    stop: threading.Event | None = None,
    restart: bool = False,
) -> TrainingResult:
    """
    Train a classifier; starting again in the same folder resumes what is missing.

    Args:
        inputs: Files of labelled genomes, or folders of them.
        output_dir: Folder of the classifier.
        config: What to make.
        devices: As in ``run_prediction``; likewise all that follow.

    Raises:
        VirNucProError: With the exit code of the command.
    """
    stop = stop or threading.Event()
    layout = TrainingLayout(Path(output_dir))
    claim = DeviceClaim.of(devices)
    with running(layout, telemetry) as (run_id, shown):
        stages = Stages(shown, stage_runner)
        run = stages.do(
            "index", lambda: prepare_training(inputs, output_dir, config, claim.type, run_id=run_id, restart=restart)
        )
        if run.already_complete:
            return training_result(run, was_complete=True)
        embed = embed or partial(embed_job, claim=claim, workers=workers, limits=limits, telemetry=shown, stop=stop)
        with failure_noted(layout):
            stages.do("split", lambda: run.do(split_stage(run)))
            stages.do("training_fragments", lambda: run.do(fragments_stage(run, stop)))
            with claim.held(shown, run_id=run_id, stop=stop):
                for job in embedding_jobs(run):
                    with stages.shown(job.stage):
                        result = embed(job)
                    result.raise_unless(allow_partial=False)  # a training needs every row
                    seconds = stages.seconds()[job.stage]
                    run.record_embedding(job.stage, result, {"rows": result.num_rows}, seconds=seconds)
            stages.do("train", lambda: run.do(train_stage(run, stop)))
            return stages.do("evaluate", lambda: evaluate(run))


def split_stage(run: TrainingRun) -> Stage:
    """Split the genomes into three parts that are not related."""
    config, layout = run.config, run.layout

    def work() -> dict[str, int]:
        seen = training_data_of(config.dna)
        found = split_labelled(
            run.labelled.genomes,
            read_genomes(config.leave_out),
            seed=config.asked.seed,
            share=config.asked.held_out_share,
            shuffle_labels=config.asked.shuffle_labels,
            is_seen=[seen is not None and seen.has(genome) for genome in run.labelled.genomes],
        )
        durable.write_bytes(layout.split, (json.dumps(_as_json(found), indent=1) + "\n").encode())
        by_part = Counter(found.parts)
        return {
            "records": len(run.labelled.genomes),
            "left out": len(found.left_out),
            "clusters": len(set(found.clusters)),
            **{f"{part} records": by_part[part] for part in SPLITS},
        }

    return Stage(name="split", fingerprint=run.fingerprint, files=[layout.split], work=work)


def read_split(run: TrainingRun) -> SplitGenomes:
    data = json.loads(run_folders.read_bytes(run.layout.split))
    by_accession = {genome.accession: genome for genome in run.labelled.genomes}
    return SplitGenomes(
        genomes=[
            replace(by_accession[row["accession"]], is_virus=row["is_virus"], group=row["group"])
            for row in data["records"]
        ],
        parts=[row["part"] for row in data["records"]],
        clusters=[row["cluster"] for row in data["records"]],
        **{name: data[name] for name in ("left_out", "largest_share", "notes")},
    )


def fragments_stage(run: TrainingRun, stop: threading.Event | None = None) -> Stage:
    """Make fragments of each part's genomes, and chunks and frames of the fragments."""
    config, layout = run.config, run.layout
    others = {chunk_nt: layout.with_chunks(chunk_nt) for chunk_nt in config.also_chunk_nt}

    def work() -> dict[str, int]:
        found = read_split(run)
        fragments, further = [], []
        for part in SPLITS:
            rules = fragment_rules(config, part, found.of_part(part))
            count = config.asked.num_fragments if part == TRAIN else config.measured_fragments
            of_part = cut_training_fragments(found.of_part(part), count, rules, part=part, seed=config.asked.seed)
            embedded = config.embedded_fragments(part)
            fragments += of_part[:embedded]
            further += of_part[embedded:]
        write_training_fragments(fragments, layout.fragments, layout.fragments_table)
        write_training_fragments(further, layout.further_fragments, layout.further_fragments_table)
        counts = asdict(cut_frames(layout, config.asked.chunk_nt, stop))
        for chunk_nt, other in others.items():
            write_training_fragments(
                [fragment for fragment in fragments if fragment.part == TEST], other.fragments, other.fragments_table
            )
            cut_frames(other, chunk_nt, stop)
        fragments += further
        by_part = Counter(fragment.part for fragment in fragments)
        return {
            **{f"{part} fragments": by_part[part] for part in SPLITS},
            "nucleotides": sum(len(fragment.letters) for fragment in fragments),
            **{name: counts[name] for name in ("chunks", "open_chunks", "frames")},
        }

    names = ("fragments", "fragments_table", "contig_index", "nucleotide_frames", "protein_frames", "open_frames")
    written = [getattr(one, name) for one in (layout, *others.values()) for name in names]
    written += [layout.further_fragments, layout.further_fragments_table]
    return Stage(name="training_fragments", fingerprint=run.fingerprint, files=written, work=work)


def fragment_rules(config: TrainingConfig, part: str, genomes: Sequence[LabelledGenome]) -> FragmentRules:
    """Return how fragments of a part's genomes are drawn; groups with both labels, shuffled, give as many of each."""
    weights = dict(config.asked.group_weights)
    if config.asked.shuffle_labels:
        num_nt: Counter[str] = Counter()
        for genome in genomes:
            num_nt[genome.group] += len(genome.letters)
        weights = {group: num_nt[group] ** 0.5 for group in num_nt} | weights
    return FragmentRules(
        lengths_nt=config.lengths_nt,
        group_weights=weights,
        most_coverage=TRAINING_COVERAGE if part == TRAIN else MEASURED_COVERAGE,
        error_share=ERROR_SHARE,
    )


def embedding_jobs(run: TrainingRun) -> list[EmbeddingJob]:
    """Return the embedding runs that the classifier needs: of DNA and proteins, for each length of chunks."""
    config, jobs = run.config, []
    for chunk_nt in (None, *config.also_chunk_nt):
        layout, suffix = (run.layout, "") if chunk_nt is None else (run.layout.with_chunks(chunk_nt), f"_{chunk_nt}")
        for kind, model, frames, folder in (
            ("dna", config.dna, layout.nucleotide_frames, layout.dna_dir),
            ("protein", config.protein, layout.protein_frames, layout.protein_dir),
        ):
            jobs.append(EmbeddingJob(stage=kind + suffix, model=model, files=[frames], folder=folder))
    return jobs


def train_stage(run: TrainingRun, stop: threading.Event | None = None) -> Stage:
    """Train the frame classifier and the contig model."""

    def work() -> object:
        # it imports torch, which this process does without until its workers have ended
        from virnucpro.training.fitting.classifier_fitting import fit_classifier  # noqa: PLC0415

        return fit_classifier(run, read_split(run), stop)

    return Stage(name="train", fingerprint=run.fingerprint, files=trained_files(run.layout), work=work)


def evaluate(run: TrainingRun) -> TrainingResult:
    """Measure the classifier on the test part, and write it with its cards into the folder."""
    from virnucpro.training.fitting.classifier_fitting import publish_classifier  # noqa: PLC0415  as in train_stage

    manifest, layout = run.manifest, run.layout
    found = read_split(run)
    began_s = time.monotonic()
    written = publish_classifier(run, found)
    seconds = time.monotonic() - began_s
    manifest.counts = {
        name: count
        for stage in ("split", "training_fragments", "train")
        for name, count in manifest.stages[stage].counts.items()
    }
    manifest.notes = [*run.labelled.notes, *found.notes]
    manifest.files = {path.name: durable.sha256_of(path) for path in written}
    manifest.end("complete")
    run.record("evaluate", run.fingerprint, written, {}, seconds=seconds)
    if not run.config.asked.keep_work:
        remove_work(layout)
    return training_result(run)


def training_result(run: TrainingRun, *, was_complete: bool = False) -> TrainingResult:
    """Return what a folder holds that has everything."""
    manifest = run.manifest
    card = json.loads(run_folders.read_bytes(classifier_files(run.layout)[-1]))
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
            {"accession": one.accession, "part": part, "cluster": number, "group": one.group, "is_virus": one.is_virus}
            for one, part, number in rows
        ],
        **{name: getattr(found, name) for name in ("left_out", "largest_share", "notes")},
    }
