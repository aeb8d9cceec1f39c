"""
A run over several device tasks, as its driver sees it: write the units, follow what is said of them, sum it up.

The driver holds the folder's lock and gives a sign of life of its own, without which the device tasks stop. It starts
nothing itself: whoever calls submits ``run_device_task`` to an orchestrator, once a device, and hands back what comes.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import structlog

from virnucpro.errors import OutputError
from virnucpro.pipeline.device_claim import DeviceClaim
from virnucpro.pipeline.devices import CPU, Device
from virnucpro.pipeline.failures import FailureClass
from virnucpro.pipeline.finished_blocks import find_finished_blocks
from virnucpro.pipeline.unit_claims import numbers_in, write_units
from virnucpro.pipeline.worker_messages import MessageReader
from virnucpro.store.lease import LEASE_S, LapseWatch, Lease, words_of
from virnucpro.telemetry.durable_blocks import durable_messages
from virnucpro.telemetry.embedding_facts import ProcessEnd
from virnucpro.telemetry.ranks import Rank
from virnucpro.this_host import host_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virnucpro.pipeline.device_task import DeviceOutcome
    from virnucpro.pipeline.run_preparation import PreparedRun
    from virnucpro.pipeline.unit_claims import UnitPlan
    from virnucpro.telemetry.embedding_telemetry import EmbeddingTelemetry

log = structlog.get_logger(__name__)

FOLLOW_INTERVAL_S = 1.0
"""Seconds between two looks at what the hosts have said."""


def device_tasks(num_tasks: int, device_type: str) -> DeviceClaim:
    """
    Return what a run prepares with whose devices are on other hosts: as many as there will be device tasks.

    Which device each is becomes known on its host only; until then it is called by its number.

    Args:
        num_tasks: Device tasks.
        device_type: ``cpu`` or ``cuda``.
    """
    return DeviceClaim.of([CPU if device_type == "cpu" else Device(f"task-{task}") for task in range(num_tasks)])


@dataclass(frozen=True, kw_only=True)
class Excuses:
    """Why what is missing is missing, from what every device task has told."""

    quarantined: dict[int, tuple[str, int]]
    """Index position -> (failure class, processes that tried)."""
    otherwise: tuple[str, int]
    """Of every other sequence: how the first task that failed did so."""

    def why_missing(self, position: int, _block: int, _outcomes: Sequence[Rank]) -> tuple[str, int]:
        """Return the reason why a sequence has no row, and how many processes tried."""
        return self.quarantined.get(position, self.otherwise)


class HostRun:
    """
    Context manager around the embedding of one start of a run; the caller holds the folder's lock.

    When it begins, the units of what is not finished are written; while it lasts, telemetry hears what the hosts say.
    When it ends, whatever device task is left is told to stop.

    Args:
        run: Prepared; its ``world_size`` is the number of device tasks.
        telemetry: Is told what the workers on all hosts say; None where nobody looks.
        lease_s: Seconds without a sign of life after which a host's work is others'.

    Raises:
        OutputError: The folder cannot be written.
    """

    def __init__(
        self, run: PreparedRun, telemetry: EmbeddingTelemetry | None = None, *, lease_s: float = LEASE_S
    ) -> None:
        self.run = run
        self.units: UnitPlan | None = None
        self._telemetry = telemetry
        self._lease_s = lease_s
        self._layout = run.layout.units(run.run_id)
        self._outcomes = [Rank(rank=rank, device=device.label) for rank, device in enumerate(run.devices)]
        self._excused: dict[int, tuple[str, int]] = {}
        self._owners = LapseWatch(lease_s)
        self._refused_s: float | None = None
        """When the folder refused to be read, and has since."""
        self._words = None if telemetry is None else MessageReader(self._layout.said_dir, telemetry)
        self._ending = threading.Event()
        self._follower = threading.Thread(target=self._follow, name="follow-hosts", daemon=True)
        about = {"host": host_name(), "run_id": run.run_id}
        self._lease = Lease(self._layout.driver, about, lease_s=lease_s, is_kept=True)

    def __enter__(self) -> Self:
        run = self.run
        index = run.open_index()
        plan = run.plan(index)
        found = find_finished_blocks(run.layout, plan)
        if self._telemetry is not None:
            self._say_found(found.blocks)
        self.units = write_units(
            self._layout.folder,
            run_id=run.run_id,
            plan_fingerprint=plan.fingerprint,
            blocks=[block for block in range(len(plan)) if block not in found.blocks],
            tokens=plan.tokens,
            devices=run.world_size,
            lease_s=self._lease_s,
        )
        log.info("units.written", units=len(self.units), blocks_finished=len(found.blocks), tasks=run.world_size)
        self._lease.__enter__()
        self._follower.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._ending.set()
        self._follower.join()
        self._lease.__exit__()
        if self._words is not None:
            self._words.read_on()

    def stop(self) -> None:
        """Tell every device task to stop at its next batch boundary; those that have ended do not mind."""
        with suppress(OSError):  # else they stop because they miss our sign of life
            self._lease.say(stopping=True)

    def num_done(self) -> int:
        """
        Return how many units are done.

        Raises:
            OSError: The folder cannot be read.
        """
        return len(numbers_in(self._layout.done_dir, afresh=True))

    def is_done(self) -> bool:
        """
        Whether every unit is done; device tasks that have not begun are of no use any more.

        A folder that does not answer is asked again: a network file system may be away for a while.

        Raises:
            OutputError: It has not answered for as long as a lease lasts.
        """
        assert self.units is not None, "asked outside of the context"
        try:
            num_done = self.num_done()
        except OSError as error:
            now_s = time.monotonic()
            self._refused_s = self._refused_s or now_s
            if now_s - self._refused_s > self._lease_s:
                raise OutputError(self._layout.done_dir, error.strerror or str(error)) from error
            return False
        self._refused_s = None
        return num_done >= len(self.units)

    def ranks_at_work(self) -> set[int]:
        """Return the ranks whose tasks give signs of life."""
        with suppress(OSError):
            alive = [path for path in self._layout.owners_dir.iterdir() if not self._owners.has_lapsed(path)]
            return {rank for path in alive if isinstance(rank := words_of(path).get("rank"), int)}
        return set()

    def take(self, outcome: DeviceOutcome) -> None:
        """Take in how a device task went. A rank may have several, one after the other: what they did adds up."""
        rank = outcome.rank.rank
        self._outcomes[rank] = _joined(self._outcomes[rank], outcome.rank)
        self._excused |= outcome.quarantined

    def take_lost(
        self, rank: int, reason: str, *, failure: FailureClass = FailureClass.DIED, starts_again: bool = False
    ) -> None:
        """
        Take in that a device task ended without an outcome: its host is gone, or it could not take part.

        Args:
            rank: Of the task.
            reason: One sentence for a person.
            failure: Of which class.
            starts_again: Whether the task is submitted again.
        """
        before = self._outcomes[rank]
        lost = Rank(rank=rank, device=before.device, host=before.host, failure=failure.value, reason=reason)
        lost.failures.append(failure.value)
        self._outcomes[rank] = _joined(before, lost)
        if self._telemetry is not None:
            end = ProcessEnd(
                state="failed",
                failure=failure.value,
                reason=reason,
                exit_code=None,
                starts_again=starts_again,
                quarantined={},
            )
            self._telemetry.ended(rank, end)

    def take_unused(self, rank: int) -> None:
        """Take in that a device task was taken back before it began: there was no room for it in time."""
        before = self._outcomes[rank]
        unused = Rank(rank=rank, device=before.device, host=before.host, state="stopped")
        self._outcomes[rank] = _joined(before, unused)

    @property
    def outcomes(self) -> list[Rank]:
        """How each rank went, as far as is known."""
        return list(self._outcomes)

    def excuses(self) -> Excuses:
        """Return why what is missing is missing."""
        failed = [outcome for outcome in self._outcomes if outcome.failure is not None]
        otherwise = (failed[0].failure or "unknown", failed[0].attempts) if failed else ("unknown", 0)
        return Excuses(quarantined=dict(self._excused), otherwise=otherwise)

    def _say_found(self, blocks: set[int]) -> None:
        """Tell the telemetry of rows of earlier starts, which no worker will be asked about."""
        assert self._telemetry is not None
        for message in durable_messages(blocks, short={}):
            self._telemetry.on_message(0, message)

    def _follow(self) -> None:
        while not self._ending.wait(FOLLOW_INTERVAL_S):
            if self._words is not None:
                self._words.read_on()


def _joined(before: Rank, after: Rank) -> Rank:
    """Return one outcome of two tasks of a rank: how the later one ended, and what both did."""
    summed: dict[str, Any] = {
        name: getattr(before, name) + getattr(after, name)
        for name in ("failures", "pids", "attempts", "sequences", "sequences_cached", "tokens", "seconds", "compute_s")
    }
    return Rank(**{**vars(after), **summed})
