"""
Work on contigs as executors have it: units that workers compute, in processes, or here where there is little to do.

The kinds of one ``ContigRun`` follow each other in the same processes: as soon as all units of one are durable, its
files are joined, and the units of the next are assigned.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from virnucpro.errors import ExitCode, OutputError, StoppedError, WorkersFailedError
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.failures import FailureClass, exit_code_of
from virnucpro.pipeline.hardware.device_claim import free_memory_bytes, usable_cores
from virnucpro.pipeline.prediction.contig_work import ContigUnits
from virnucpro.pipeline.prediction.contig_worker import ContigWorker
from virnucpro.pipeline.work.recovery import Recovery
from virnucpro.pipeline.work.worker_process import ReportPipe
from virnucpro.telemetry.snapshot import CONTIGS, NT, WorkFacts
from virnucpro.this_host import host_name

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from virnucpro.config import RunLimits
    from virnucpro.data.sequence_index import SequenceIndex
    from virnucpro.pipeline.devices import Device
    from virnucpro.pipeline.executor import Executor
    from virnucpro.pipeline.prediction.contig_work import ContigWork
    from virnucpro.pipeline.run.stages import Stages
    from virnucpro.pipeline.work.units import Why
    from virnucpro.run_layout import PredictionLayout
    from virnucpro.telemetry.ranks import Rank
    from virnucpro.telemetry.work_telemetry import WorkTelemetry

CONTIG_WORKER = "virnucpro.pipeline.prediction.contig_worker:contig_worker"
WORKER_BYTES = 600_000_000
"""Memory of a process: 350 to 500 MB were measured (``benchmarks/end_to_end.py``)."""
HERE = 2
"""Times the nucleotides that are worth another process, below which none is started."""
PAUSE_S = 0.05
"""Seconds between two questions of a worker in this process that has to wait."""


@dataclass(kw_only=True)
class ContigRun:
    """Work on contigs that is ready to start, with the face that executors know of a ``PreparedRun``."""

    run_id: str
    works: tuple[ContigWork, ...]
    task: str
    """Name of a worker's task under Prefect."""
    workers: int | None
    """Number of processes; None for one a core, as far as memory allows."""
    log_level: str
    counts: dict[str, int] = field(default_factory=dict)
    """What the joined kinds have counted."""
    quarantined: dict[int, Why] = field(default_factory=dict)
    """Number of each contig that is not computed -> why."""
    devices: tuple[Device, ...] = field(init=False)
    is_small: bool = field(init=False)
    """Whether it is computed in this process."""
    worker_fn: str = CONTIG_WORKER
    _joined: int = 0
    _divided_for: int = field(init=False)
    """Workers that the units are made for."""

    def __post_init__(self) -> None:
        first = self.works[0]
        total_nt = int(first.work_nt(first.open_index()).sum())
        most = self.workers or min(usable_cores(), free_memory_bytes() // WORKER_BYTES)
        self._divided_for = max(1, min(most, total_nt // first.worker_nt))
        self.is_small = total_nt < HERE * first.worker_nt
        self.devices = (CPU,) * (1 if self.is_small else max(1, min(self._divided_for, len(self.units))))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the open index: another host opens its own."""
        return {name: value for name, value in vars(self).items() if name != "units"}

    @cached_property
    def units(self) -> ContigUnits:
        return self.open_units()

    def open_units(self) -> ContigUnits:
        return ContigUnits(self.works, self._divided_for)

    def open_index(self) -> SequenceIndex:
        return self.works[0].open_index()

    @property
    def layout(self) -> PredictionLayout:
        return self.works[0].layout

    @property
    def output_dir(self) -> Path:
        return self.layout.output_dir

    @property
    def world_size(self) -> int:
        return len(self.devices)

    @property
    def worker_args(self) -> tuple[Any, ...]:
        """What ``contig_worker`` gets after the pipe."""
        return (self.works, self._divided_for, self.log_level)

    def facts(self) -> WorkFacts:
        """Return what telemetry shows of the work."""
        block_nt, block_contigs = self._sizes(range(len(self.units)))
        return WorkFacts(
            run_id=self.run_id,
            model=self.works[0].name,
            precision="float64",
            token_budget=0,
            devices=tuple((device.label, device.token) for device in self.devices),
            host=host_name(),
            layout=self.layout,
            block_tokens=block_nt,
            block_rows=block_contigs,
            rows_of=np.ones_like,
            records=int(block_contigs.sum()),
            copies=0,
            skipped=0,
            counts=CONTIGS,
            measure=NT,
            is_small=self.is_small,
        )

    def recovery(self, limits: RunLimits, telemetry: WorkTelemetry) -> Recovery:
        """Return what decides about failures of this start, and tells *telemetry*."""
        recovery = Recovery(
            telemetry.ranks,
            num_blocks=len(self.units),
            limits=limits,
            run_id=self.run_id,
            observer=telemetry,
            more=lambda: len(self.more(recovery.quarantined(), telemetry)),
        )
        return recovery

    def compute_here(self, recovery: Recovery, stop: threading.Event) -> None:
        """Compute all units in this process; an error of one is raised."""
        (rank,) = recovery.ranks
        with recovery.turn(rank.rank, stop):
            (assignment,) = recovery.worker_args(rank.rank, ())
            rank.begin_attempt()
            rank.state = "stopped"
            try:
                ContigWorker(self.units, _OwnPipe(rank, recovery), assignment, stop).do()
                rank.state = "complete"
            finally:
                rank.end_attempt()
        recovery.another_attempt(rank)

    def finish(self, outcomes: Sequence[Rank], quarantined: Mapping[int, Why], stop: threading.Event) -> None:
        """
        Join what was found by the kinds that are not joined yet.

        Args:
            outcomes: Of the workers.
            quarantined: Number of each contig that is not computed -> why.
            stop: Whether the work was to end.

        Raises:
            StoppedError: *stop* was set.
            OutputError: A file cannot be written.
            WorkersFailedError: Something is missing that is not quarantined.
        """
        if stop.is_set():
            raise StoppedError
        self.quarantined |= quarantined
        while self._joined < len(self.works):
            if missing := self._missing():
                self._raise(missing, [outcome for outcome in outcomes if outcome.failure])
            self._join()

    def more(self, quarantined: Mapping[int, Why], telemetry: WorkTelemetry) -> range:
        """Join the kind that is done, and return the numbers of the next one's units; none where that goes wrong."""
        self.quarantined |= quarantined
        try:
            if self._joined == len(self.works) - 1 or self._missing():
                return range(0)
            self._join()
            added = self.units.add_next()
            telemetry.add(*self._sizes(added, again=True))
        except Exception:  # noqa: BLE001  ``finish`` tries again, and raises it
            return range(0)
        return added

    def _join(self) -> None:
        self.counts |= self.works[self._joined].join(self.units)
        self._joined += 1

    def _missing(self) -> list[int]:
        """Return the numbers of the contigs that the next kind to be joined lacks, without those in quarantine."""
        self.units.add_to(self._joined)
        missing = self.units.missing(self.works[self._joined])
        return [number for number in missing if number not in self.quarantined]

    def _raise(self, missing: Sequence[int], failed: Sequence[Rank]) -> None:
        classes = {FailureClass(outcome.failure or FailureClass.DIED) for outcome in failed}
        reasons = {outcome.rank: outcome.reason or "" for outcome in failed}
        if FailureClass.CANNOT_WRITE in classes:
            raise OutputError(self.layout.contig_parts, next(iter(reasons.values())))
        raise WorkersFailedError(
            reasons,
            world_size=self.world_size,
            missing_sequences=len(missing),
            total_sequences=int(np.count_nonzero(self.units.work_nt(self.works[self._joined]))),
            partial_path=None,
            exit_code=exit_code_of(classes.pop()) if len(classes) == 1 else ExitCode.INTERNAL,
            is_listed=False,
        )

    def _sizes(self, numbers: range, *, again: bool = False) -> tuple[Any, Any]:
        """Return nucleotides and contigs of some units, int64 each; no contigs where they were counted before."""
        units = [self.units[number] for number in numbers]
        block_nt = np.array([self.units.nt(*unit) for unit in units], np.int64)
        block_contigs = np.array([0 if again else self.units.count(*unit) for unit in units], np.int64)
        return block_nt, block_contigs


def compute_contigs(
    works: Sequence[ContigWork],
    *,
    task: str,
    join: str,
    run_id: str,
    executor: Executor,
    workers: int | None,
    log_level: str,
    limits: RunLimits,
    stages: Stages,
    stop: threading.Event,
) -> ContigRun:
    """
    Have work on contigs computed, and join what was found; each of *works* may need what the one before has found.

    Args:
        works: Kinds.
        task: Name of a worker's task under Prefect.
        join: Name of the stage that joins.
        run_id: Of this start.
        executor: Computes the ranks.
        workers: Number of processes; None for one a core, as far as memory allows.
        log_level: Of the workers.
        limits: Attempts and time limits.
        stages: Does the join, and shows the work.
        stop: Set it to end the work at the next unit.

    Raises:
        StoppedError, OutputError, WorkersFailedError: See ``ContigRun.finish``.
    """
    run = ContigRun(run_id=run_id, works=tuple(works), task=task, workers=workers, log_level=log_level)
    quarantined: Mapping[int, Why] = {}
    if len(run.units):
        facts = run.facts()
        is_here = executor.is_here or run.is_small
        telemetry = stages.telemetry.begin_work(facts if is_here else replace(facts, host=""))
        try:
            executor.compute(run, limits, telemetry, stop)
        finally:
            telemetry.over()
        quarantined = executor.reasons().quarantined()
    stages.do(join, lambda: run.finish(executor.outcomes(), quarantined, stop))
    return run


class _OwnPipe(ReportPipe):
    """The pipe of a worker that computes in this process, which stands at both ends."""

    def __init__(self, rank: Rank, recovery: Recovery) -> None:
        self._rank, self._recovery = rank, recovery
        self._given: deque[dict[str, Any]] = deque()

    def put(self, message: dict[str, Any]) -> None:
        self._rank.apply(message)
        self._recovery.on_message(self._rank.rank, message)

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        if not self._given:
            self._given.extend(self._recovery.next_blocks(self._rank.rank))
        if not self._given:
            time.sleep(min(timeout_s, PAUSE_S))
            return None
        return self._given.popleft()
