"""
A training under way: its files and its settings.

The classifier's files take their names in the folder at the very end, all of them, so that a folder with a card holds a
whole classifier.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from virnucpro import durable
from virnucpro.models.classifier_files.card import CARD_NAME, CONTIG_WEIGHTS_NAME, WEIGHTS_NAME
from virnucpro.pipeline.run.run import Preparation, about_file, all_intact, prepare, remove_files, remove_run
from virnucpro.pipeline.run.stages import StagedRun
from virnucpro.run_layout import RunLayout, TrainingLayout
from virnucpro.store.manifest import COMPUTING_PACKAGES, TrainingManifest
from virnucpro.training.genomes.artificial_genomes import artificial_genomes
from virnucpro.training.genomes.labelled_genomes import LabelledInput, files_of, read_labelled
from virnucpro.training.training_settings import CHUNKS_NT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virnucpro.training.training_settings import TrainingConfig


OUTCOME_NAME = "outcome.json"
"""How the fitting went, beside the classifier before it was measured."""


@dataclass(kw_only=True)
class TrainingRun(StagedRun):
    """A training under way; the stages share it."""

    layout: TrainingLayout
    manifest: TrainingManifest
    config: TrainingConfig
    files: list[Path]
    labelled: LabelledInput
    """The genomes; none where nothing is left to be done."""


def prepare_training(
    inputs: Sequence[str | Path],
    output_dir: str | Path,
    config: TrainingConfig,
    device_type: str,
    *,
    run_id: str,
    restart: bool = False,
) -> TrainingRun:
    """
    Compare with what the folder holds, read the genomes with their labels, and open or resume the manifest.

    The caller holds the folder's lock. Nothing is removed before the input is known to be fit.

    Raises:
        BadInputError: The input cannot be used; names every problem.
        SettingsChangedError: The folder holds a training of other input or settings.
        OutputError: The folder cannot be written, or holds files that no run wrote.
        ResultError: The folder holds another kind of run.
    """
    files = files_of([Path(path) for path in inputs])
    kind = _TrainingPreparation(
        run_id=run_id,
        layout=TrainingLayout(Path(output_dir)),
        inputs=[*files, *([config.genomes] if config.genomes else []), *config.annotations, *config.leave_out],
        files=files,
        config=config,
        device_type=device_type,
    )
    manifest, labelled = prepare(kind, restart=restart)
    return TrainingRun(
        run_id=run_id,
        layout=kind.layout,
        manifest=manifest,
        config=config,
        files=files,
        labelled=labelled or LabelledInput([], []),
        already_complete=labelled is None,
    )


@dataclass(kw_only=True)
class _TrainingPreparation(Preparation[TrainingManifest, LabelledInput]):
    manifest_type = TrainingManifest

    run_id: str
    layout: TrainingLayout
    inputs: list[Path]
    files: list[Path]
    """Of genomes."""
    config: TrainingConfig
    device_type: str
    about: list[dict[str, Any]] = field(default_factory=list)
    """The files that were read, as ``run.json`` has them."""

    def read_input(self) -> LabelledInput:
        self.about = [about_file(path) for path in self.inputs]  # also of files that only later stages read
        found, asked = read_labelled(self.files, self.config.genomes), self.config.asked
        return replace(
            found, genomes=found.genomes + artificial_genomes(found.genomes, asked.num_fragments, asked.seed)
        )

    def start_from_scratch(self, earlier: TrainingManifest, source: LabelledInput) -> None:
        del earlier, source
        remove_files(self.layout, reversed(classifier_files(self.layout)), with_manifest=False)
        remove_work(self.layout)
        remove_files(self.layout, [self.layout.split, self.layout.fragments_table])

    def foreign(self, earlier: TrainingManifest | None) -> list[Path]:
        del earlier
        layout = self.layout
        if layout.manifest.exists():
            return []
        others = [layout.with_chunks(chunk_nt).output_dir for chunk_nt in CHUNKS_NT]
        return [*classifier_files(layout), layout.dna_dir, layout.protein_dir, *others]

    def settings(self, earlier: TrainingManifest | None) -> dict[str, Any]:
        del earlier
        return self.config.settings(self.device_type)

    def is_finished(self, earlier: TrainingManifest) -> bool:
        return earlier.state == "complete" and bool(earlier.files) and all_intact(self.layout.output_dir, earlier.files)

    def begin(self, source: LabelledInput, earlier: TrainingManifest | None) -> TrainingManifest:
        del source
        manifest = TrainingManifest.begin(
            self.run_id,
            packages=(*COMPUTING_PACKAGES, "scipy"),
            inputs=self.about,
            settings=self.settings(earlier),
            devices=earlier.devices if earlier is not None else [],
            stages=earlier.stages if earlier is not None else {},
        )
        manifest.write(self.layout.manifest)
        return manifest


def classifier_files(layout: TrainingLayout) -> list[Path]:
    """Return the files of the classifier, its card last."""
    names = (WEIGHTS_NAME, CONTIG_WEIGHTS_NAME, layout.evaluation.name, layout.card_text.name, CARD_NAME)
    return [layout.output_dir / name for name in names]


def trained_files(layout: TrainingLayout) -> list[Path]:
    """Return the files of the classifier before it was measured."""
    names = (WEIGHTS_NAME, CONTIG_WEIGHTS_NAME, CARD_NAME, OUTCOME_NAME)
    return [layout.trained_dir / name for name in names]


def remove_work(layout: TrainingLayout) -> None:
    """Remove what only the making of the classifier needed: embeddings, frames and fragments."""
    for one in (*(layout.with_chunks(chunk_nt) for chunk_nt in CHUNKS_NT), layout):
        for embedding in (one.dna_dir, one.protein_dir):
            remove_run(RunLayout(embedding))
        frames = [one.nucleotide_frames, one.protein_frames, one.open_frames]
        for path in [*trained_files(one), *frames, one.fragments, one.contig_index, *one.unpacked()]:
            durable.remove(path)
        for folder in (one.trained_dir, one.unpacked_dir):
            durable.remove_strays(folder)
            durable.remove_empty(folder)
        if one != layout:
            durable.remove(one.fragments_table)
            for folder in (one.work_dir, one.output_dir):
                durable.remove_strays(folder)
                durable.remove_empty(folder)
