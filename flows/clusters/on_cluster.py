"""Work on a cluster, blocks or contigs: the engine computes units of it; the driver records and exports their state."""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

from prefect.logging import get_run_logger

from flows.clusters.engine import Engine, UnitWorkers
from flows.run.telemetry import log_level
from virnucpro.config import RunLimits
from virnucpro.errors import ClusterLostError, printable
from virnucpro.pipeline.executor import Executor
from virnucpro.pipeline.failures import FailureClass
from virnucpro.pipeline.hosts.result_passes import ResultPasses
from virnucpro.pipeline.hosts.unit_worker import probe_device_here
from virnucpro.pipeline.plan.budget_probe import DeviceProbe
from virnucpro.pipeline.run.run_completion import Reasons
from virnucpro.pipeline.run.run_preparation import PreparedRun
from virnucpro.pipeline.work.units import UnitBook, UnitRecord
from virnucpro.pipeline.work.work import Units, Work
from virnucpro.store.results.forms import FORMS
from virnucpro.telemetry.log_lines import log_sentence
from virnucpro.telemetry.ranks import Rank, durable_messages
from virnucpro.telemetry.work_telemetry import WorkTelemetry

PROBE_S = 900.0
"""Seconds that GPUs have to be probed after the first; their hosts may have to fetch the weights."""
LOOK_S = 0.5
"""Seconds to wait for a unit to end before the cluster is looked at again."""
NOTICE_LOOKS = 20
"""Looks without a worker after which the wait is logged."""


class OnCluster(Executor):
    """A task a unit, on whatever slots the cluster has at the time."""

    is_here = False

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reasons: Reasons | None = None
        self._ranks: dict[int, Rank] = {}
        self._problem: Exception | None = None
        """Why the first host was refused."""

    def probe(self, run_id: str) -> Callable[..., list[DeviceProbe]]:
        def probe(*args: Any) -> list[DeviceProbe]:
            here = partial(probe_device_here, *args, run_id=run_id)
            return [one for of_slot in self._engine.ask_slots(here, patience_s=PROBE_S) for one in of_slot]

        return probe

    def compute(self, work: Work, limits: RunLimits, telemetry: WorkTelemetry, stop: threading.Event) -> None:
        """
        Compute the remaining work, here where it is little; an interrupt stops workers at their next batch.

        Raises:
            HostCheckError: No host sees the input, the folder and the weights of the run.
            ClusterLostError: The cluster's scheduler is lost.
        """
        if work.is_small:
            self._reasons = recovery = work.recovery(limits, telemetry)
            work.compute_here(recovery, stop)
            return
        units = work.open_units()
        self._reasons = book = UnitBook([], units.sizes)
        self._add(book, units, range(len(units.sizes)), telemetry)
        telemetry.rank(0).apply({"kind": "found"})
        if not self._has_more(book, work, units, telemetry):
            return
        with self._engine.unit_workers(work, limits) as workers:
            try:
                self._compute(book, work, units, workers, telemetry)
            except BaseException as error:
                if not isinstance(error, ClusterLostError):
                    get_run_logger().warning("stopping: workers end at their next batch boundary")
                    with suppress(Exception):  # Ctrl-C ends a cluster on this machine as well
                        workers.stop()
                raise
        self._apply_messages(workers, telemetry)

    def _add(self, book: UnitBook, units: Units, numbers: Sequence[int], telemetry: WorkTelemetry) -> None:
        """Have those of some units computed that are not durable."""
        durable = units.durable(numbers)
        for message in durable_messages(durable, short={}):
            telemetry.on_message(0, message)
        left = [number for number in numbers if number not in durable]
        get_run_logger().info("%s of %s blocks are to be computed", f"{len(left):,}", f"{len(numbers):,}")
        book.add(left, units.sizes)

    def _has_more(self, book: UnitBook, work: Work, units: Units, telemetry: WorkTelemetry) -> bool:
        """Whether something is left to compute, also of what follows once all else is done."""
        while book.is_done and (more := work.more(book.quarantined(), telemetry)):
            self._add(book, units, more, telemetry)
        return not book.is_done

    def outcomes(self) -> list[Rank]:
        return [self._ranks[number] for number in sorted(self._ranks)]

    def reasons(self) -> Reasons:
        assert self._reasons is not None
        return self._reasons

    def result_passes(self, run: PreparedRun) -> AbstractContextManager[ResultPasses | None]:
        """See ``Executor.result_passes``: files of a sharded result are items of the engine."""
        return nullcontext(ResultPasses(run, self._engine.map) if FORMS[run.result_form].has_many_files else None)

    def _compute(
        self, book: UnitBook, work: Work, units: Units, workers: UnitWorkers, telemetry: WorkTelemetry
    ) -> None:
        looks_without = 0
        while self._has_more(book, work, units, telemetry):
            with self._engine.asking():
                while workers.has_room() and (unit := book.next(max(1, self._engine.slots))) is not None:
                    workers.submit(unit)
                ended = workers.look(LOOK_S)
                are_refused = workers.are_refused()
            for unit, record in ended:
                if isinstance(record, Exception):
                    reason = printable(next(iter(str(record).splitlines()), "") or type(record).__name__)
                    get_run_logger().warning("a unit of %s blocks was lost: %s", len(unit.blocks), reason)
                    book.lost(unit)
                else:
                    book.take(unit, record)
                    self._take(book, record)
            has_messages = self._apply_messages(workers, telemetry)
            if are_refused:
                self._refuse(book)
            looks_without = -1 if looks_without < 0 or has_messages or ended else looks_without + 1
            if looks_without == NOTICE_LOOKS:
                get_run_logger().warning(
                    "waiting for a slot of the cluster: no worker of this run computes yet (other runs have all slots, "
                    "or hosts are still getting ready)"
                )

    def _take(self, book: UnitBook, record: UnitRecord) -> None:
        rank = self._ranks[record.rank.rank] = record.rank
        if record.error is not None:
            self._problem = self._problem or record.error
            rank.state, rank.failure, rank.reason = "failed", FailureClass.CONFIGURATION.value, str(record.error)
            get_run_logger().warning("worker %s does not take part: %s", rank.rank, rank.reason)
        elif record.is_lost:
            get_run_logger().warning("worker %s is lost: %s", rank.rank, printable(rank.reason or ""))
            failure = FailureClass(rank.failure or FailureClass.DIED)
            if failure.concerns_all_ranks and failure is not FailureClass.STOPPED:  # its host has stopped it, not we
                book.close((rank.failure or FailureClass.DIED.value, rank.attempts))

    def _refuse(self, book: UnitBook) -> None:
        """Give up the remaining units, as no worker of the cluster can compute them."""
        if self._problem is not None:
            raise self._problem
        lost = [rank for rank in self._ranks.values() if rank.failure is not None]
        book.close((lost[0].failure or "", lost[0].attempts) if lost else (FailureClass.DIED.value, 0))

    def _apply_messages(self, workers: UnitWorkers, telemetry: WorkTelemetry) -> bool:
        """Apply the messages of workers, and log their lines; return whether there were any."""
        entries = workers.messages()
        for entry in entries:
            telemetry.apply_entry(entry)
            message = entry.get("message", {})
            if message.get("kind") == "log":
                host = telemetry.rank(int(entry["rank"])).host
                sentence = log_sentence(message)
                get_run_logger().log(log_level(message["level"]), "host %s, rank %s: %s", host, entry["rank"], sentence)
        return bool(entries)
