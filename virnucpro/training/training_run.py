"""
A training under way: its files and its settings.

The classifier's files take their names in the folder at the very end, all of them, so that a folder with a card holds a
whole classifier.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from virnucpro import durable
from virnucpro.models.classifier_files.card import CARD_NAME, CONTIG_WEIGHTS_NAME, WEIGHTS_NAME
from virnucpro.pipeline.run.run import (
    about_file,
    all_intact,
    is_same_input,
    refuse_foreign_files,
    refuse_other_settings,
    remove_files,
    remove_run,
    sweep,
)
from virnucpro.pipeline.run.stages import StagedRun
from virnucpro.run_layout import RunLayout, TrainingLayout
from virnucpro.store.manifest import COMPUTING_PACKAGES, TrainingManifest
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
    labelled: LabelledInput = field(default_factory=lambda: LabelledInput([], []))
    """The genomes; none where nothing is left to be done."""

    def results(self) -> list[Path]:
        """Return the files of the classifier, its card last."""
        names = (WEIGHTS_NAME, CONTIG_WEIGHTS_NAME, self.layout.evaluation.name, self.layout.card_text.name, CARD_NAME)
        return [self.layout.output_dir / name for name in names]


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
    layout = TrainingLayout(Path(output_dir))
    files = files_of([Path(path) for path in inputs])
    read = [*files, *([config.genomes] if config.genomes else []), *config.annotations, *config.leave_out]
    earlier = TrainingManifest.read(layout.manifest) if layout.manifest.exists() else None
    settings = config.settings(device_type)
    if earlier is not None and not restart:
        is_same_input(layout.output_dir, earlier, read, settings)
        refuse_other_settings(layout.output_dir, earlier, settings)
    manifest = TrainingManifest.begin(
        run_id,
        packages=(*COMPUTING_PACKAGES, "scipy"),
        inputs=[about_file(path) for path in read],
        settings=settings,
        devices=[],
    )
    run = TrainingRun(
        run_id=run_id, layout=layout, config=config, files=files, manifest=manifest, already_complete=False
    )
    if earlier is None:
        others = [layout.with_chunks(chunk_nt).output_dir for chunk_nt in CHUNKS_NT]
        refuse_foreign_files([*run.results(), layout.dna_dir, layout.protein_dir, *others])
    elif not restart:
        if earlier.state == "complete" and earlier.files and all_intact(layout.output_dir, earlier.files):
            sweep(layout)
            run.manifest, run.already_complete = earlier, True
            return run
        manifest.devices, manifest.stages = earlier.devices, earlier.stages
    run.labelled = read_labelled(files, config.genomes)
    sweep(layout)
    if restart and earlier is not None:
        remove_files(layout, reversed(run.results()), with_manifest=False)
        remove_work(layout)
        remove_files(layout, [layout.split, layout.pieces_table])
    manifest.write(layout.manifest)
    return run


def trained_files(layout: TrainingLayout) -> list[Path]:
    """Return the files of the classifier before it was measured."""
    names = (WEIGHTS_NAME, CONTIG_WEIGHTS_NAME, CARD_NAME, OUTCOME_NAME)
    return [layout.trained_dir / name for name in names]


def remove_work(layout: TrainingLayout) -> None:
    """Remove what only the making of the classifier needed: embeddings, frames and pieces."""
    for one in (*(layout.with_chunks(chunk_nt) for chunk_nt in CHUNKS_NT), layout):
        for embedding in (one.dna_dir, one.protein_dir):
            remove_run(RunLayout(embedding))
        frames = [one.nucleotide_frames, one.protein_frames, one.open_frames]
        for path in [*trained_files(one), *frames, one.pieces, one.contig_index, *one.unpacked()]:
            durable.remove(path)
        for folder in (one.trained_dir, one.unpacked_dir):
            durable.remove_strays(folder)
            durable.remove_empty(folder)
        if one != layout:
            durable.remove(one.pieces_table)
            for folder in (one.work_dir, one.output_dir):
                durable.remove_strays(folder)
                durable.remove_empty(folder)
