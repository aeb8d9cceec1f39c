"""
A training under way: its files, its settings, and the book of its stages.

What is recorded there and still as it was recorded is not done again. The classifier's files take their names in the
folder at the very end, all of them, so that a folder with a card holds a whole classifier.
"""

from __future__ import annotations

import os
import platform
import socket
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from virnucpro import durable
from virnucpro.config import fingerprint
from virnucpro.data.reading.input_files import hash_content, open_regular
from virnucpro.errors import OutputError, StoppedError
from virnucpro.models.classifier_files.card import CARD_NAME, CONTIG_WEIGHTS_NAME, WEIGHTS_NAME
from virnucpro.pipeline.continuation import is_same_input, refuse_other_settings
from virnucpro.pipeline.fresh_start import remove_run
from virnucpro.pipeline.prediction_run import is_intact
from virnucpro.pipeline.run_preparation import COMPUTING_PACKAGES, installed_version
from virnucpro.run_layout import RunLayout, TrainingLayout
from virnucpro.store.prediction_manifest import StageRecord
from virnucpro.store.training_manifest import TrainingManifest
from virnucpro.training.genomes.labelled_genomes import LabelledInput, files_of, read_labelled
from virnucpro.training.training_settings import CHUNKS_NT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from virnucpro.training.training_settings import TrainingConfig


OUTCOME_NAME = "outcome.json"
"""How the fitting went, beside the classifier before it was measured."""


@dataclass(kw_only=True)
class TrainingRun:
    """A training under way; the stages share it."""

    run_id: str
    """Unique to this start."""
    layout: TrainingLayout
    """Names of its files."""
    config: TrainingConfig
    """What to make."""
    files: list[Path]
    """The files of genomes."""
    labelled: LabelledInput | None
    """The genomes; None where nothing is left to be done."""
    manifest: TrainingManifest
    """As it stands on disk."""
    already_complete: bool
    """The folder holds exactly what is asked for."""

    def results(self) -> list[Path]:
        """Return the files of the classifier, its card last."""
        names = (WEIGHTS_NAME, CONTIG_WEIGHTS_NAME, self.layout.evaluation.name, self.layout.card_text.name, CARD_NAME)
        return [self.layout.output_dir / name for name in names]

    def is_done(self, stage: str) -> bool:
        """Whether a stage was recorded, and everything that it wrote is as it was recorded."""
        record = self.manifest.stages.get(stage)
        return record is not None and all(
            is_intact(self.layout.output_dir / name, sha256) for name, sha256 in record.files.items()
        )

    def record(self, stage: str, files: Sequence[Path], counts: dict[str, int], *, seconds: float) -> None:
        """
        Note that a stage is done.

        Raises:
            OutputError: The manifest cannot be written.
        """
        here = self.layout.output_dir
        self.manifest.stages[stage] = StageRecord(
            fingerprint=fingerprint([self.manifest.settings, self.manifest.inputs]),
            seconds=round(seconds, 3),
            files={path.relative_to(here).as_posix(): durable.sha256_of(path) for path in files},
            counts=counts,
        )
        self.manifest.write(self.layout.manifest)


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
    Compare with what the folder holds, read the genomes with their labels, and open or continue the manifest.

    The caller holds the folder's lock. Nothing is removed before the input is known to be fit.

    Args:
        inputs: Files of genomes, or folders of them.
        output_dir: Folder of the classifier.
        config: What to make.
        device_type: ``cpu`` or ``cuda``.
        run_id: Unique to this start.
        restart: Remove what the folder holds of earlier trainings first.

    Raises:
        BadInputError: The input cannot be used; tells every problem.
        SettingsChangedError: The folder holds a training of other input or settings.
        OutputError: The folder cannot be written, or holds files of somebody else.
        ResultError: The folder holds another kind of run.
    """
    layout = TrainingLayout(Path(output_dir))
    files = files_of([Path(path) for path in inputs])
    read = files_to_read(files, config)
    earlier = TrainingManifest.read(layout.manifest) if layout.manifest.exists() else None
    settings = config.settings(device_type)
    if earlier is not None and not restart:
        is_same_input(layout.output_dir, earlier, read, settings)
        refuse_other_settings(layout.output_dir, earlier, settings)
    manifest = TrainingManifest(
        run_id=run_id,
        state="running",
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        host=socket.gethostname(),
        inputs=[_about(path) for path in read],
        settings=settings,
        versions={
            "python": platform.python_version(),
            **{name: installed_version(name) for name in (*COMPUTING_PACKAGES, "scipy")},
        },
        devices=[],
    )
    run = TrainingRun(
        run_id=run_id,
        layout=layout,
        config=config,
        files=files,
        labelled=None,
        manifest=manifest,
        already_complete=False,
    )
    if earlier is not None and not restart:
        whole = all(is_intact(layout.output_dir / name, sha256) for name, sha256 in earlier.files.items())
        if earlier.state == "complete" and earlier.files and whole:
            _remove_strays(layout)
            run.manifest, run.already_complete = earlier, True
            return run
        manifest.devices, manifest.stages = earlier.devices, earlier.stages
    elif earlier is None:
        _refuse_foreign_files(run)
    run.labelled = read_labelled(files, config.labels)
    _remove_strays(layout)
    if restart and earlier is not None:
        _remove_earlier(run)
    manifest.write(layout.manifest)
    return run


def files_to_read(files: Sequence[Path], config: TrainingConfig) -> list[Path]:
    """Return every file that a training reads: the *files* of genomes, and those that its settings name."""
    return [*files, *([config.labels] if config.labels else []), *config.annotations, *config.leave_out]


@contextmanager
def training_failure_noted(run: TrainingRun) -> Iterator[None]:
    """Note in the manifest that the training failed, or was stopped, when the block ends with an error."""
    try:
        yield
    except BaseException as error:
        was_stopped = isinstance(error, StoppedError) or not isinstance(error, Exception)
        run.manifest.state = "stopped" if was_stopped else "failed"
        run.manifest.finished = datetime.now(UTC).isoformat(timespec="seconds")
        with suppress(OutputError):  # the disk may be what failed; the error itself is what counts
            run.manifest.write(run.layout.manifest)
        raise
    finally:
        _remove_strays(run.layout)


def _remove_strays(layout: TrainingLayout) -> None:
    """Remove what a training that was killed left half written; the input has been accepted."""
    for folder in (layout.output_dir, layout.work_dir):
        durable.remove_strays(folder)


def remove_work(layout: TrainingLayout) -> None:
    """
    Remove what only the making of the classifier needed: embeddings, frames and pieces.

    Raises:
        OutputError: A file cannot be removed.
    """
    for one in (*(layout.with_chunks(chunk_nt) for chunk_nt in CHUNKS_NT), layout):
        for embedding in (one.dna_dir, one.protein_dir):
            remove_run(RunLayout(embedding))
        trained = [one.trained_dir / name for name in (WEIGHTS_NAME, CONTIG_WEIGHTS_NAME, CARD_NAME, OUTCOME_NAME)]
        frames = [one.nucleotide_frames, one.protein_frames, one.open_frames]
        for path in [*trained, *frames, one.pieces, one.contig_index, *one.unpacked()]:
            durable.remove(path)
        for folder in (one.trained_dir, one.unpacked_dir):
            durable.remove_strays(folder)
            durable.remove_empty(folder)
        if one != layout:
            durable.remove(one.pieces_table)
            for folder in (one.work_dir, one.output_dir):
                durable.remove_strays(folder)
                durable.remove_empty(folder)


def _about(path: Path) -> dict[str, str | int]:
    with open_regular(os.fspath(path)) as descriptor:
        size, sha256 = hash_content(descriptor)
    return {"path": os.path.realpath(path), "size_bytes": size, "sha256": sha256}


def _refuse_foreign_files(run: TrainingRun) -> None:
    others = [run.layout.with_chunks(chunk_nt).output_dir for chunk_nt in CHUNKS_NT]
    for path in [*run.results(), run.layout.dna_dir, run.layout.protein_dir, *others]:
        if os.path.lexists(path):
            raise OutputError(path, "there is such a file, and no run.json that tells whose: use another folder")


def _remove_earlier(run: TrainingRun) -> None:
    """Remove every file of an earlier training, its manifest last."""
    for path in reversed(run.results()):
        durable.remove(path)
    remove_work(run.layout)
    for path in (run.layout.split, run.layout.pieces_table, run.layout.manifest):
        durable.remove(path)
