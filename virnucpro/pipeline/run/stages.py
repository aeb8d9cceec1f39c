"""The stages of a run. A stage that is recorded for the same settings, with unchanged files, is not done again."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from virnucpro import durable
from virnucpro.config import fingerprint
from virnucpro.pipeline.run.run import all_intact
from virnucpro.store.manifest import StageRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from virnucpro.config import ModelConfig
    from virnucpro.pipeline.run.run_result import RunResult
    from virnucpro.run_layout import FolderLayout
    from virnucpro.store.manifest import StagedManifest
    from virnucpro.telemetry.run_telemetry import RunTelemetry

Outcome = TypeVar("Outcome")


class StageRunner(Protocol):
    """Does a stage, and returns what its work does: in place, or as a task of an orchestrator."""

    def __call__(self, name: str, work: Callable[[], Outcome], /) -> Outcome: ...


def call_stage(_name: str, work: Callable[[], Outcome], /) -> Outcome:
    """Do a stage in place."""
    return work()


@dataclass(frozen=True)
class Stages:
    """Does the stages of one run, shows and times them."""

    telemetry: RunTelemetry
    runner: StageRunner
    model: str = ""
    """Of an embedding run."""

    def do(self, name: str, work: Callable[[], Outcome]) -> Outcome:
        with self.shown(name):
            return self.runner(name, work)

    def shown(self, name: str) -> AbstractContextManager[None]:
        """Return a context that is shown and timed as the stage *name*."""
        return self.telemetry.stage(name, model=self.model)

    def seconds(self) -> dict[str, float]:
        return self.telemetry.stages_s(self.model)


@dataclass(frozen=True, kw_only=True)
class EmbeddingJob:
    """An embedding run within a prediction or training."""

    stage: str
    """``dna`` or ``protein``; of other lengths of chunks with their number, as in ``dna_300``."""
    model: ModelConfig
    files: list[Path]
    """Its input."""
    folder: Path

    @property
    def kind(self) -> str:
        """``dna`` or ``protein``."""
        return self.stage.partition("_")[0]


@dataclass(frozen=True, kw_only=True)
class Stage:
    name: str
    fingerprint: str
    """Hex sha256 of what its files depend on."""
    files: Sequence[Path]
    """What it writes."""
    work: Callable[[], object]
    """Does it; returns a dataclass or dictionary of counts."""
    is_whole: Callable[[StageRecord], bool] = lambda _: True
    """Whether what was recorded is all that there can be."""
    quarantined: dict[int, tuple[str, int]] = field(default_factory=dict)
    """See ``StageRecord``; *work* adds to it."""


@dataclass(kw_only=True)
class StagedRun:
    """A running prediction or training; its stages share it."""

    run_id: str
    """Unique to this start."""
    layout: FolderLayout
    manifest: StagedManifest
    """As it is on disk."""
    already_complete: bool
    """The folder holds the complete result of these settings."""
    computed: list[str] = field(default_factory=list)
    """Stages that this start did."""

    @property
    def fingerprint(self) -> str:
        """Identity of input and settings."""
        return fingerprint([self.manifest.settings, self.manifest.inputs])

    def is_done(self, stage: Stage) -> bool:
        """Whether *stage* was recorded for its settings with all of its files, which are as they were recorded."""
        record = self.manifest.stages.get(stage.name)
        if record is None or record.fingerprint != stage.fingerprint or not stage.is_whole(record):
            return False
        needed = {self._relative(path) for path in stage.files}
        return needed <= record.files.keys() and all_intact(self.layout.output_dir, record.files)

    def do(self, stage: Stage) -> None:
        """Do *stage* and record it, unless it is done."""
        if self.is_done(stage):
            return
        began_s = time.monotonic()
        counts = stage.work()
        seconds = time.monotonic() - began_s
        as_dict = dict(counts) if isinstance(counts, dict) else asdict(counts)  # type: ignore[call-overload]
        more: dict[str, Any] = {"quarantined": stage.quarantined} if stage.quarantined else {}
        self.record(stage.name, stage.fingerprint, stage.files, as_dict, seconds=seconds, **more)

    def record(
        self,
        stage: str,
        stage_fingerprint: str,
        files: Sequence[Path],
        counts: dict[str, int],
        *,
        seconds: float,
        was_done: bool = False,
        **more: Any,
    ) -> None:
        """Note that a stage is done; *was_done*: by an earlier start. *more*: other fields of its record."""
        self.manifest.stages[stage] = StageRecord(
            fingerprint=stage_fingerprint,
            seconds=round(seconds, 3),
            files={self._relative(path): durable.sha256_of(path) for path in files},
            counts=counts,
            **more,
        )
        if not was_done:
            self.computed.append(stage)
        self.manifest.write(self.layout.manifest)

    def record_embedding(
        self, stage: str, result: RunResult, counts: dict[str, int], *, seconds: float, notes: Sequence[str] = ()
    ) -> None:
        """Note how an embedding run ended; of one that was complete before, seconds and notes of then are kept."""
        before = None if result.ranks else self.manifest.stages.get(stage)
        if before is not None:
            seconds, notes = before.seconds, before.notes
        if result.ranks:
            self.manifest.devices = [rank.device for rank in result.ranks]
        known: dict[str, Any] = {"notes": list(notes), "processors": result.processors}
        self.record(stage, self.fingerprint, [], counts, seconds=seconds, was_done=before is not None, **known)

    def _relative(self, path: Path) -> str:
        return path.relative_to(self.layout.output_dir).as_posix()
