"""
What happens before the first stage of an identification: settings compared, contigs indexed, manifest opened.

The outcome is a ``PredictionRun``, which also keeps the book of stages: what is recorded there and still as it was
recorded is not done again.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from virnucpro import durable
from virnucpro.config import fingerprint
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.errors import BadInputError, ConfigurationError, OutputError, StoppedError
from virnucpro.pipeline.continuation import is_same_input, refuse_other_settings
from virnucpro.pipeline.frame_order import FrameOrder
from virnucpro.pipeline.fresh_start import start_afresh
from virnucpro.pipeline.prediction_settings import TableFormat
from virnucpro.pipeline.run_preparation import COMPUTING_PACKAGES, forget_unpacked, installed_version
from virnucpro.run_layout import PredictionLayout, RunLayout
from virnucpro.store.prediction_manifest import PredictionManifest, StageRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from virnucpro.pipeline.devices import Device
    from virnucpro.pipeline.prediction_settings import PredictionConfig

_SEQUENCE_SUFFIX = re.compile(r"(\.(fa|fas|fasta|fna|ffn|fsa|fq|fastq|bam|sam|txt|seq))?(\.gz)?$", re.IGNORECASE)


@dataclass(kw_only=True)
class PredictionRun:
    """An identification under way; the stages share it."""

    run_id: str
    """Unique to this start."""
    layout: PredictionLayout
    """Names of its files."""
    config: PredictionConfig
    """What to compute."""
    devices: tuple[Device, ...]
    """What ``select_devices`` gave."""
    stems: tuple[str, ...]
    """Of the input files; their frames' files begin with them."""
    manifest: PredictionManifest
    """As it stands on disk."""
    already_complete: bool
    """The folder holds exactly what is asked for."""

    def open_index(self) -> SequenceIndex:
        """Open the index of the contigs."""
        return SequenceIndex.open(self.layout.contig_index)

    def frame_order(self) -> FrameOrder:
        """Return all frames in their order; the fragments must have been cut."""
        config = self.config
        return FrameOrder(self.open_index(), self.layout.open_frames, chunk_nt=config.chunk_nt, min_nt=config.min_nt)

    @property
    def nucleotide_files(self) -> list[Path]:
        """Nucleotides of the kept frames, one file an input file."""
        return [self.layout.nucleotide_frames(stem) for stem in self.stems]

    @property
    def protein_files(self) -> list[Path]:
        """Proteins of the kept frames, one file an input file."""
        return [self.layout.protein_frames(stem) for stem in self.stems]

    @property
    def chunk_files(self) -> list[Path]:
        """Chunks, one file an input file; written on request."""
        return [self.layout.chunks(stem, self.config.chunk_nt) for stem in self.stems]

    @property
    def scores_fingerprint(self) -> str:
        """Identity of everything that decides the scores."""
        return fingerprint([self.manifest.settings, self.manifest.inputs])

    def is_done(self, stage: str, stage_fingerprint: str, *, needed: Sequence[Path] = ()) -> bool:
        """
        Whether a stage was recorded for these settings, and everything that it wrote is as it was recorded.

        Args:
            stage: Its name.
            stage_fingerprint: Identity of its settings.
            needed: Files that it must have written.
        """
        record = self.manifest.stages.get(stage)
        if record is None or record.fingerprint != stage_fingerprint:
            return False
        if not {self._relative(path) for path in needed} <= record.files.keys():
            return False
        return all(_is_intact(self.layout.output_dir / name, sha256) for name, sha256 in record.files.items())

    def record(
        self,
        stage: str,
        stage_fingerprint: str,
        files: Sequence[Path],
        counts: dict[str, int],
        *,
        seconds: float,
        notes: Sequence[str] = (),
    ) -> None:
        """
        Note that a stage is done.

        Raises:
            OutputError: The manifest cannot be written.
        """
        self.manifest.stages[stage] = StageRecord(
            fingerprint=stage_fingerprint,
            seconds=round(seconds, 3),
            files={self._relative(path): durable.sha256_of(path) for path in files},
            counts=counts,
            notes=list(notes),
        )
        self.manifest.write(self.layout.manifest)

    def _relative(self, path: Path) -> str:
        return path.relative_to(self.layout.output_dir).as_posix()


def prepare_prediction(
    input_files: Sequence[str | Path],
    output_dir: str | Path,
    config: PredictionConfig,
    devices: Sequence[Device],
    *,
    run_id: str,
    restart: bool = False,
) -> PredictionRun:
    """
    Compare with what the folder holds, index the contigs, and open or continue the manifest. The caller holds the lock.

    Args:
        input_files: FASTA, FASTQ or unaligned BAM, plain or gzip, in the order of the result.
        output_dir: The run's folder.
        config: What to compute.
        devices: What ``select_devices`` gave.
        run_id: Unique to this start.
        restart: Remove what the folder holds of earlier runs first.

    Raises:
        BadInputError: The input cannot be used; tells every problem.
        ConfigurationError: Two inputs would write the same files.
        SettingsChangedError: The folder holds a run of other input or settings.
        OutputError: The folder cannot be written, or holds files of somebody else.
        ResultError: The folder holds an embedding run.
    """
    layout = PredictionLayout(Path(output_dir))
    stems = _stems(input_files)
    for folder in (layout.output_dir, layout.work_dir, layout.unpacked_dir):
        if folder.is_dir():
            durable.remove_strays(folder)
    outputs = _outputs(layout, stems, config)
    _refuse_to_overwrite_inputs(layout, outputs, input_files)
    if restart and layout.manifest.exists():
        PredictionManifest.read(layout.manifest)
        start_prediction_afresh(layout, _ensure_index(layout, input_files, config))
    earlier = PredictionManifest.read(layout.manifest) if layout.manifest.exists() else None
    _refuse_foreign_files(layout, outputs, earlier)
    settings = config.scores_settings(devices[0].type)
    if earlier is not None and earlier.stages:
        is_same = is_same_input(layout.output_dir, earlier, input_files, settings)
        refuse_other_settings(layout.output_dir, earlier, settings)
        if is_same and _finished_as_asked(layout, earlier, config):
            return PredictionRun(
                run_id=run_id,
                layout=layout,
                config=config,
                devices=tuple(devices),
                stems=stems,
                manifest=earlier,
                already_complete=True,
            )
    elif earlier is not None:  # it did not get anything done: what it began to write may be of another input
        keep = {Path(os.path.realpath(path)) for path in input_files}
        _remove(layout, set(earlier.outputs) - set(outputs), keep=keep)
    index = _ensure_index(layout, input_files, config)
    manifest = PredictionManifest(
        run_id=run_id,
        state="running",
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        host=socket.gethostname(),
        inputs=[{"path": file.real_path, "size_bytes": file.size_bytes, "sha256": file.sha256} for file in index.files],
        settings=settings,
        output_settings=config.output_settings(),
        models=config.models(),
        fingerprint=config.fingerprint,
        versions={
            "python": platform.python_version(),
            **{name: installed_version(name) for name in COMPUTING_PACKAGES},
        },
        devices=[device.label for device in devices],
        outputs=sorted({*outputs, *(earlier.outputs if earlier is not None else [])}),
        stages=earlier.stages if earlier is not None else {},
    )
    run = PredictionRun(
        run_id=run_id,
        layout=layout,
        config=config,
        devices=tuple(devices),
        stems=stems,
        manifest=manifest,
        already_complete=False,
    )
    manifest.write(layout.manifest)
    return run


@contextmanager
def prediction_failure_noted(run: PredictionRun) -> Iterator[None]:
    """Note in the manifest that the run failed, or was stopped, when the block ends with an error."""
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
        for folder in (run.layout.output_dir, run.layout.work_dir):
            durable.remove_strays(folder)


@contextmanager
def timed() -> Iterator[list[float]]:
    """Yield a list that holds the seconds that the block took once it has ended."""
    begun = time.monotonic()
    seconds: list[float] = []
    yield seconds
    seconds.append(time.monotonic() - begun)


def start_prediction_afresh(layout: PredictionLayout, index: SequenceIndex) -> None:
    """
    Remove every file of an earlier identification, and nothing else; the manifest goes last.

    Args:
        layout: The run's folder.
        index: Of the contigs that are to be identified now; it stays, and so does what it reads.

    Raises:
        OutputError: A file cannot be removed.
        ResultError: ``run.json`` is of an embedding run, or none of ours.
    """
    manifest = PredictionManifest.read(layout.manifest)
    for embedding in (layout.dna_dir, layout.protein_dir):
        start_afresh(RunLayout(embedding))
    needed = {Path(file.read_path) for file in index.files}
    _remove(layout, manifest.outputs, keep=needed | {Path(file.real_path) for file in index.files})
    unpacked = [path for path in RunLayout(layout.output_dir).unpacked() if path.absolute() not in needed]
    for path in [*unpacked, layout.open_frames, layout.frame_scores]:
        durable.remove(path)
    durable.remove(layout.manifest)


def _ensure_index(
    layout: PredictionLayout, input_files: Sequence[str | Path], config: PredictionConfig
) -> SequenceIndex:
    try:
        return SequenceIndex.ensure(
            input_files, layout.contig_index, unpack_dir=layout.unpacked_dir, rules=config.rules
        )
    except BadInputError:
        if not layout.manifest.exists():  # no earlier run needs what was unpacked
            forget_unpacked(layout.unpacked_dir, layout.work_dir)
        raise


def _outputs(layout: PredictionLayout, stems: Sequence[str], config: PredictionConfig) -> list[str]:
    """Return the names of all files that a run is to write into its folder, beside the embedding runs."""
    formats = {layout.contigs_json: TableFormat.JSON, layout.contigs_parquet: TableFormat.PARQUET}
    results = [path for path in layout.results() if formats.get(path, TableFormat.TSV) in config.formats]
    frames = [path(stem) for stem in stems for path in (layout.nucleotide_frames, layout.protein_frames)]
    chunks = [layout.chunks(stem, config.chunk_nt) for stem in stems] if config.keep_chunks else []
    return sorted(path.name for path in [*results, *frames, *chunks])


def _refuse_to_overwrite_inputs(
    layout: PredictionLayout, outputs: Sequence[str], input_files: Sequence[str | Path]
) -> None:
    inputs = {os.path.realpath(path) for path in input_files}
    for path in (layout.output_dir / name for name in outputs):
        if os.path.realpath(path) in inputs:
            raise OutputError(path, "it is an input, and the run would write a file of that name: use another folder")


def _refuse_foreign_files(layout: PredictionLayout, outputs: Sequence[str], earlier: PredictionManifest | None) -> None:
    """Refuse to write over a file that no run of this folder was to write."""
    announced = set(earlier.outputs) if earlier is not None else set()
    for path in (layout.output_dir / name for name in outputs):
        if path.name not in announced and os.path.lexists(path):
            raise OutputError(path, "there is such a file, and no run.json that tells whose: use another folder")


def _remove(layout: PredictionLayout, names: Iterable[str], *, keep: set[Path]) -> None:
    for path in (layout.output_dir / name for name in sorted(names)):
        if path.resolve() not in keep:
            durable.remove(path)


def _stems(input_files: Sequence[str | Path]) -> tuple[str, ...]:
    names = [Path(os.fspath(path)).name for path in input_files]
    stems = [_SEQUENCE_SUFFIX.sub("", name) or name for name in names]
    for stem in stems:
        if stems.count(stem) > 1:
            same = ", ".join(os.fspath(path) for path, one in zip(input_files, stems, strict=True) if one == stem)
            raise ConfigurationError(
                f"{same}: the frames of each would be written to {stem}_identified_nucleotide.fa: "
                "rename one, or give each an output folder of its own"
            )
    return tuple(stems)


def _finished_as_asked(layout: PredictionLayout, earlier: PredictionManifest, config: PredictionConfig) -> bool:
    if earlier.state != "complete" or earlier.output_settings != config.output_settings():
        return False
    if not earlier.counts.get("contigs") and not config.rules.allow_empty:
        return False  # indexing says that there is nothing
    wanted = {layout.contigs.name, layout.report.name}
    return wanted <= earlier.files.keys() and all(
        _is_intact(layout.output_dir / name, sha256) for name, sha256 in earlier.files.items()
    )


def _is_intact(path: Path, sha256: str) -> bool:
    try:
        return path.is_file() and durable.sha256_of(path) == sha256
    except OSError:
        return False


def counts_of(values: object) -> dict[str, int]:
    """Return the fields of a dataclass of counts."""
    return dict(asdict(values))  # type: ignore[call-overload]
