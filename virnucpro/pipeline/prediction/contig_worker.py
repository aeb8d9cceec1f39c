"""
The worker of contigs: it computes the units that its parent assigns, in a process of its own, or in the parent's.

Everything it needs is in its arguments, and what it has reported is on disk. Where a unit has ended processes, it is
divided: parts that were begun and not finished come last, and are divided again, until a contig is alone.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import structlog

from virnucpro import durable
from virnucpro.errors import StoppedError
from virnucpro.pipeline.prediction.contig_work import ContigUnits, divided
from virnucpro.pipeline.work.assignment import AssignedBlocks
from virnucpro.pipeline.work.own_process import begin_logging, failure_reported, stop_on_sigterm
from virnucpro.store.locks.worker_lock import hold_worker_lock, take_part
from virnucpro.telemetry.ranks import durable_messages

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    from virnucpro.models.contigs.protein_search import OnShare
    from virnucpro.pipeline.prediction.contig_work import ContigWork
    from virnucpro.pipeline.work.assignment import AssignedUnit, Assignment
    from virnucpro.pipeline.work.worker_process import ReportPipe

log = structlog.get_logger(__name__)
SHARE_S = 0.3
"""Seconds between two messages about the share of a unit that is computed."""


def contig_worker(
    rank: int,
    world_size: int,  # noqa: ARG001
    results_queue: ReportPipe,
    works: Sequence[ContigWork],
    divided_for: int,
    log_level: str,
    assignment: Assignment,
) -> None:
    """
    Compute units of *works*, of which each may need what the one before has found.

    Args:
        rank, world_size, results_queue: As for ``gpu_worker``.
        works: Kinds, whose units are made for *divided_for* workers.
        log_level: What of its own log is kept.
        assignment: What is known of earlier failures.

    Raises:
        SystemExit: The work failed; its code tells the class of the failure, the report tells the reason.
    """
    layout = works[0].layout
    begin_logging(rank, layout.log_dir, results_queue, level=log_level, assignment=assignment)
    with failure_reported(rank, results_queue):
        if assignment.is_on_cluster:
            take_part(layout.output_dir)
        else:
            hold_worker_lock(layout.output_dir, rank)
        units = ContigUnits(works, divided_for)
        log.info("worker.started", units=len(units), pid=os.getpid())
        ContigWorker(units, results_queue, assignment, stop_on_sigterm()).do()
        log.info("worker.finished")
    results_queue.put({"rank": rank, "status": "complete"})


class ContigWorker:
    """Computes the units that *parent* assigns, until there are none."""

    def __init__(self, units: ContigUnits, parent: ReportPipe, assignment: Assignment, stop: threading.Event) -> None:
        self._units, self._parent, self._stop = units, parent, stop
        self._assigned = AssignedBlocks(assignment, parent, stop, self._step)
        self._loaded: dict[Callable[..., Any], Any] = {}
        """Kinds that load alike share it."""
        self._resumed = 0

    def do(self) -> None:
        """Raises StoppedError: *stop* was set."""
        while (unit := self._assigned.wait()) is not None:
            for number in unit.blocks:
                self._raise_if_stopped()
                if unit.to_check:
                    self._look_for(number)
                else:
                    self._compute(number, unit)
            if unit.to_check:
                self._parent.put({"kind": "found"})
                self._parent.put({"kind": "resumed", "sequences": self._resumed})
        if not self._assigned.all_done():
            raise StoppedError(signal.SIGTERM)

    def _raise_if_stopped(self) -> None:
        if self._stop.is_set():
            raise StoppedError(signal.SIGTERM)

    def _look_for(self, number: int) -> None:
        """Report a unit that is durable."""
        work, contigs = self._units[number]
        if work.is_durable(contigs, self._units.lengths_nt):
            self._resumed += self._units.count(work, contigs)
            self._report(number)

    def _compute(self, number: int, unit: AssignedUnit) -> None:
        work, contigs = self._units[number]
        if not unit.computes_singly(number) and not unit.quarantined.intersection(contigs):
            written = self._compute_part(number, contigs)
            self._report(number, written_bytes=written)
            return
        log.info("unit.divided", work=work.name, contigs=[contigs.start, contigs.stop])
        self._compute_parts(number, contigs, unit.quarantined)
        missing = len(work.missing(contigs, self._units.work_nt(work), work.names()))
        self._report(number, missing=missing)

    def _compute_parts(self, number: int, contigs: range, quarantined: Collection[int]) -> None:
        """Compute the parts of some contigs that are not there, those that were begun before last."""
        units, begun = self._units, []
        work = units[number][0]
        for part in divided(contigs, work.parts):
            if not units.count(work, part) or units.only(work, part) in quarantined:
                continue
            if _mark(work, part).exists():
                begun.append(part)
            elif not work.is_durable(part, units.lengths_nt):
                self._raise_if_stopped()
                durable.write_bytes(_mark(work, part), b"")
                self._compute_part(number, part)
        for part in begun:
            if not work.is_durable(part, units.lengths_nt):
                self._raise_if_stopped()
                if units.only(work, part) is None:
                    self._compute_parts(number, part, quarantined)
                else:
                    self._compute_part(number, part)

    def _compute_part(self, number: int, contigs: range) -> int:
        """Compute some contigs of a unit, which are suspect if this process ends before it is done."""
        units = self._units
        work = units[number][0]
        load = type(work).load
        if load not in self._loaded:
            started_s = time.monotonic()
            self._loaded[load] = work.load()
            self._parent.put({"kind": "model_loaded", "seconds": round(time.monotonic() - started_s, 3)})
        count, work_nt, only = units.count(work, contigs), units.nt(work, contigs), units.only(work, contigs)
        start: dict[str, Any] = {"kind": "start", "block": number, "sequences": count, "tokens": work_nt}
        self._parent.put(start if only is None else {**start, "position": only})
        started_s = time.monotonic()
        written = work.write(units.index, contigs, self._loaded[load], self._share_of(number, work_nt))
        done = {"kind": "progress", "block": number, "rows": count, "batch_tokens": work_nt, "planned_tokens": work_nt}
        self._parent.put({**done, "seconds": time.monotonic() - started_s, "packing": 1.0, "oom_splits": 0})
        return written

    def _share_of(self, number: int, work_nt: int) -> OnShare:
        """Return what reports how much of a unit is computed, some times a second."""
        last_s = time.monotonic()

        def on_share(share: float) -> None:
            nonlocal last_s
            if time.monotonic() - last_s >= SHARE_S:
                last_s = time.monotonic()
                self._parent.put({"kind": "share", "block": number, "tokens": int(share * work_nt)})

        return on_share

    def _report(self, number: int, *, missing: int = 0, written_bytes: int = 0) -> None:
        """Report a unit as durable, but for so many of its contigs."""
        work, contigs = self._units[number]
        whole = [] if missing else [number]
        short = {number: self._units.count(work, contigs) - missing} if missing else {}
        for message in durable_messages(whole, short=short, written_bytes=written_bytes):
            self._parent.put(message)
        self._assigned.mark_durable([number])

    def _step(self) -> None:
        self._parent.put({"kind": "step"})


def _mark(work: ContigWork, contigs: range) -> Path:
    """Return the file which says that some contigs were begun."""
    path = work.path_of(contigs)
    return path.with_name(f"{path.name}.begun")
