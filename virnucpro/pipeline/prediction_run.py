"""
An identification under way: its files, its settings, and the book of its stages.

What is recorded there and still as it was recorded is not done again.
"""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from virnucpro import durable
from virnucpro.config import fingerprint
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.errors import OutputError, StoppedError
from virnucpro.pipeline.frame_order import FrameOrder
from virnucpro.store.prediction_manifest import StageRecord

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from virnucpro.pipeline.prediction_settings import PredictionConfig
    from virnucpro.run_layout import PredictionLayout
    from virnucpro.store.prediction_manifest import PredictionManifest


@dataclass(kw_only=True)
class PredictionRun:
    """An identification under way; the stages share it."""

    run_id: str
    """Unique to this start."""
    layout: PredictionLayout
    """Names of its files."""
    config: PredictionConfig
    """What to compute."""
    stems: tuple[str, ...]
    """Of the input files; their frames' files begin with them."""
    manifest: PredictionManifest
    """As it stands on disk."""
    already_complete: bool
    """The folder holds exactly what is asked for."""
    notices: list[str] = field(default_factory=list)
    """What was kept of the folder's settings, and what was changed, a sentence each."""
    computed: list[str] = field(default_factory=list)
    """Stages that this start did."""

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
        return all(is_intact(self.layout.output_dir / name, sha256) for name, sha256 in record.files.items())

    def record(
        self,
        stage: str,
        stage_fingerprint: str,
        files: Sequence[Path],
        counts: dict[str, int],
        *,
        seconds: float,
        notes: Sequence[str] = (),
        was_done: bool = False,
    ) -> None:
        """
        Note that a stage is done; *was_done*: by an earlier start.

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
        if not was_done:
            self.computed.append(stage)
        self.manifest.write(self.layout.manifest)

    def _relative(self, path: Path) -> str:
        return path.relative_to(self.layout.output_dir).as_posix()


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


def is_intact(path: Path, sha256: str) -> bool:
    """Whether a file is there and has this hex sha256."""
    try:
        return path.is_file() and durable.sha256_of(path) == sha256
    except OSError:
        return False


def counts_of(values: object) -> dict[str, int]:
    """Return the fields of a dataclass of counts."""
    return dict(asdict(values))  # type: ignore[call-overload]
