"""
A run over several device tasks, from the driver's side: write the units, follow their messages, collect outcomes.

The driver holds the folder's lock and renews a lease, without which device tasks stop. It starts nothing: the caller
submits ``run_device_task`` once for each device to an orchestrator, and hands back the outcomes.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import structlog

from virnucpro.errors import OutputError
from virnucpro.pipeline.blocks.finished_blocks import find_finished_blocks
from virnucpro.pipeline.devices import CPU, Device
from virnucpro.pipeline.failures import FailureClass
from virnucpro.pipeline.hardware.device_claim import DeviceClaim
from virnucpro.pipeline.work.unit_claims import numbers_in, write_units
from virnucpro.pipeline.work.worker_messages import MessageReader
from virnucpro.store.locks.lease import LEASE_S, ExpiryWatch, Lease, read_lease
from virnucpro.telemetry.ranks import Rank, durable_messages
from virnucpro.telemetry.snapshot import ProcessEnd
from virnucpro.this_host import host_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virnucpro.pipeline.hosts.device_task import DeviceOutcome
    from virnucpro.pipeline.run.run_preparation import PreparedRun
    from virnucpro.pipeline.work.unit_claims import UnitPlan
    from virnucpro.telemetry.embedding_telemetry import EmbeddingTelemetry

log = structlog.get_logger(__name__)

FOLLOW_INTERVAL_S = 1.0
"""Seconds between two reads of the hosts' messages."""


def device_tasks(num_tasks: int, device_type: str) -> DeviceClaim:
    """
    Return placeholders for devices of other hosts, one for each device task, named by number.

    Args:
        device_type: ``cpu`` or ``cuda``.
    """
    return DeviceClaim.of([CPU if device_type == "cpu" else Device(f"task-{task}") for task in range(num_tasks)])


@dataclass(frozen=True, kw_only=True)
class Excuses:
    """Reasons for missing sequences, from all device tasks."""

    quarantined: dict[int, tuple[str, int]]
    """Index position -> (failure class, attempts)."""
    otherwise: tuple[str, int]
    """Likewise for all others: of the first failed task."""

    def why_missing(self, position: int, _block: int, _outcomes: Sequence[Rank]) -> tuple[str, int]:
        """Return failure class and attempts of a missing sequence."""
        return self.quarantined.get(position, self.otherwise)


class HostRun:
    """
    Context manager around the embedding of one start of a run; the caller holds the folder's lock.

    It writes the unfinished units, forwards messages of all hosts to telemetry, and at the end stops the remaining
    device tasks.

    Args:
        run: Prepared; its ``world_size`` is the number of device tasks.
        telemetry: Gets the messages of the workers; None discards them.
        lease_s: Seconds without a heartbeat after which a host's work is given to others.
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
        self._owners = ExpiryWatch(lease_s)
        self._refused_s: float | None = None
        """Since when the folder cannot be read."""
        self._words = None if telemetry is None else MessageReader(self._layout.messages_dir, telemetry)
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
        """Stop every device task at its next batch boundary."""
        with suppress(OSError):  # else they stop when our lease expires
            self._lease.update(stopping=True)

    def num_done(self) -> int:
        """
        Return the number of finished units.

        Raises:
            OSError: The folder cannot be read.
        """
        return len(numbers_in(self._layout.done_dir, refresh=True))

    def is_done(self) -> bool:
        """Whether every unit is done; a folder that cannot be read is retried for the length of a lease."""
        assert self.units is not None, "call within the context"
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
        """Return the ranks with a live lease."""
        with suppress(OSError):
            alive = [path for path in self._layout.owners_dir.iterdir() if not self._owners.has_expired(path)]
            return {rank for path in alive if isinstance(rank := read_lease(path).get("rank"), int)}
        return set()

    def take(self, outcome: DeviceOutcome) -> None:
        """Add the outcome of a device task; several of one rank add up."""
        rank = outcome.rank.rank
        self._outcomes[rank] = _joined(self._outcomes[rank], outcome.rank)
        self._excused |= outcome.quarantined

    def take_lost(
        self, rank: int, reason: str, *, failure: FailureClass = FailureClass.DIED, starts_again: bool = False
    ) -> None:
        """
        Record a device task that ended without an outcome.

        Args:
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
        """Record a device task that was cancelled before it began."""
        before = self._outcomes[rank]
        unused = Rank(rank=rank, device=before.device, host=before.host, state="stopped")
        self._outcomes[rank] = _joined(before, unused)

    @property
    def outcomes(self) -> list[Rank]:
        """The outcome of each rank, as far as known."""
        return list(self._outcomes)

    def excuses(self) -> Excuses:
        failed = [outcome for outcome in self._outcomes if outcome.failure is not None]
        otherwise = (failed[0].failure or "unknown", failed[0].attempts) if failed else ("unknown", 0)
        return Excuses(quarantined=dict(self._excused), otherwise=otherwise)

    def _say_found(self, blocks: set[int]) -> None:
        """Report rows of earlier starts to telemetry."""
        assert self._telemetry is not None
        for message in durable_messages(blocks, short={}):
            self._telemetry.on_message(0, message)

    def _follow(self) -> None:
        while not self._ending.wait(FOLLOW_INTERVAL_S):
            if self._words is not None:
                self._words.read_on()


def _joined(before: Rank, after: Rank) -> Rank:
    """Return the outcome of two tasks of a rank: end of the later one, sums of both."""
    summed: dict[str, Any] = {
        name: getattr(before, name) + getattr(after, name)
        for name in ("failures", "pids", "attempts", "sequences", "sequences_cached", "tokens", "seconds", "compute_s")
    }
    return Rank(**{**vars(after), **summed})
