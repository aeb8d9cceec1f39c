"""
Distribution of work through a shared folder: units of neighbouring blocks, each claimed by one owner at a time.

The bytes of a result follow from the plan, and a block computed twice counts once. So claims may be imperfect: each
unit is done at least once, normally exactly once.

- A claim is a file linked to its name from a private one, which succeeds once, on NFS too.
- A unit is marked done once its blocks are durable; the mark is a hint, the parts on disk decide.
- An owner renews a lease (``store.locks.lease``). Claims of an expired owner are taken over by an idle one: the old
  claim is renamed to a private name, which again succeeds once, and a new one is made.

Units shrink towards the end of the plan, so that fast and slow devices finish together. No model, framework or
orchestrator is known here.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog

from virnucpro import durable
from virnucpro.errors import OutputError, ResultError
from virnucpro.run_layout import UnitsLayout
from virnucpro.store.locks.lease import LEASE_S, RENEWALS_IN_A_LEASE, ExpiryWatch
from virnucpro.store.manifest import read_object
from virnucpro.this_host import host_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path
    from threading import Event

    IntArray = np.ndarray[Any, np.dtype[np.int64]]

log = structlog.get_logger(__name__)

PIECES_OF_A_SHARE = 8
"""A unit is this part of a device's share of the remaining work."""
MOST_UNITS_OF_A_SHARE = 128
"""Except for the last, no unit is smaller than this part of a device's share of all work."""
LOOK_INTERVAL_S = 1.0
"""Least seconds between two looks of a waiting owner."""
UNITS_LOOKED_AT_A_SECOND = 5000
"""A waiting owner adds a second for so many units: each look lists all, and at the end of a run on a thousand devices
hundreds wait."""


def new_owner() -> str:
    """Return a unique name for an owner."""
    return f"{host_name()}.{os.getpid()}.{secrets.token_hex(4)}"


@dataclass(frozen=True)
class UnitSource:
    """Where a worker claims units, and as which owner; picklable."""

    folder: Path
    """Units of this start of the run."""
    owner: str
    """From ``new_owner``; the same for all processes of a rank on one host."""


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """The units of one start of a run."""

    run_id: str
    plan_fingerprint: str
    num_devices: int
    lease_s: float
    """Seconds without a heartbeat after which an owner loses its claims."""
    units: list[list[list[int]]]
    """Blocks of each unit, as runs of [first, end)."""

    def __len__(self) -> int:
        return len(self.units)

    def blocks(self, unit: int) -> list[int]:
        """Return a unit's blocks, ascending."""
        return [block for first, end in self.units[unit] for block in range(first, end)]


def cut_units(tokens: IntArray, *, devices: int) -> list[range]:
    """
    Divide blocks into consecutive units, smaller towards the end.

    Args:
        tokens: int64 (n,): tokens of each block to do, in order.
        devices: Number of devices that will compute.

    Returns:
        Ranges of positions in *tokens* that cover each once; none is empty.
    """
    if not len(tokens):
        return []
    through = np.cumsum(tokens)
    total = int(through[-1])
    units: list[range] = []
    start = before = 0
    while start < len(tokens):
        wanted = max((total - before) // (devices * PIECES_OF_A_SHARE), total // (devices * MOST_UNITS_OF_A_SHARE))
        end = max(start + 1, int(np.searchsorted(through, before + wanted, side="right")))
        units.append(range(start, end))
        start, before = end, int(through[end - 1])
    return units


def write_units(
    folder: Path,
    *,
    run_id: str,
    plan_fingerprint: str,
    blocks: Sequence[int] | IntArray,
    tokens: IntArray,
    devices: int,
    lease_s: float = LEASE_S,
) -> UnitPlan:
    """
    Divide *blocks* into units and write them for owners to claim.

    Args:
        folder: Of this start of the run; made here.
        blocks: Blocks to do, ascending.
        tokens: int64 (num_blocks of the plan,): tokens of each block of the plan.
        devices: Number of devices that will compute.
    """
    numbers = np.asarray(blocks, dtype=np.int64)
    units = [_runs(numbers[unit.start : unit.stop]) for unit in cut_units(tokens[numbers], devices=devices)]
    plan = UnitPlan(run_id=run_id, plan_fingerprint=plan_fingerprint, num_devices=devices, lease_s=lease_s, units=units)
    layout = UnitsLayout(folder)
    try:
        for inner in (layout.claims_dir, layout.done_dir, layout.owners_dir, layout.messages_dir, layout.readings_dir):
            durable.make_folder(inner)
    except OSError as error:
        raise OutputError(folder, error.strerror or str(error)) from error
    durable.write_bytes(layout.plan, json.dumps(vars(plan)).encode())
    return plan


def read_units(folder: Path) -> UnitPlan:
    """Return the units of a start of a run."""
    path = UnitsLayout(folder).plan
    try:
        return UnitPlan(**read_object(path))
    except TypeError as error:
        raise ResultError(path, "is not a list of units of this version") from error


@dataclass(frozen=True)
class ClaimedUnit:
    """A unit that this owner has claimed."""

    number: int
    blocks: Sequence[int]
    """Ascending."""
    is_fresh: bool
    """Never claimed before; otherwise some of its blocks may be durable already."""


class UnitClaims:
    """The claims of one owner, from any thread; the caller keeps the owner's lease."""

    def __init__(self, source: UnitSource) -> None:
        self.owner = source.owner
        self.plan = read_units(source.folder)
        self._layout = UnitsLayout(source.folder)
        self._lock = threading.RLock()
        self._undone: dict[int, set[int]] = {}
        """Unit of ours -> its blocks that are not durable."""
        self._given: set[int] = set()
        """Units handed out in this process."""
        self._done: set[int] = set()
        self._chooser = random.Random(source.owner)  # noqa: S311  not a secret
        self._watch = ExpiryWatch(self.plan.lease_s)
        self._looked_s: float | None = None
        self._left_by_earlier = sorted(self._claimed_units() - numbers_in(self._layout.done_dir))

    def take(self) -> ClaimedUnit | None:
        """
        Claim the next unit available now, None if there is none at the moment.

        First units left by an earlier process of this owner, then unclaimed ones, then those of expired owners.
        """
        with self._lock, _refused(self._layout.folder):
            while self._left_by_earlier:
                unit = self._left_by_earlier.pop(0)
                if unit not in self._given:
                    return self._hand_out(unit, is_fresh=False)
            claimed = numbers_in(self._layout.claims_dir, refresh=True)  # finished units included
            gone = claimed | self._done | self._given
            free = [unit for unit in range(len(self.plan)) if unit not in gone]
            for unit in self._in_own_order(free):
                if self._claim(unit):
                    return self._hand_out(unit, is_fresh=True)
            return self._take_over(claimed)

    def iter_now(self) -> Iterator[ClaimedUnit]:
        """Yield units while some are available, each claimed on demand."""
        while (unit := self.take()) is not None:
            yield unit

    def wait(self, stop: Event, on_wait: Callable[[], None] = lambda: None) -> ClaimedUnit | None:
        """
        Return the next available unit, or None once all units are done or *stop* is set.

        The caller must have no unit in progress.

        Args:
            on_wait: Called about once a second, less often in a run of many units.
        """
        while not stop.is_set() and not self.all_done():
            if (unit := self.take()) is not None:
                return unit
            on_wait()
            interval_s = max(LOOK_INTERVAL_S, len(self.plan) / UNITS_LOOKED_AT_A_SECOND)
            stop.wait(min(interval_s, self.plan.lease_s / RENEWALS_IN_A_LEASE))
        return None

    def all_done(self) -> bool:
        """Whether every unit is done."""
        with self._lock, _refused(self._layout.folder):
            if len(self._done) < len(self.plan):
                self._done |= numbers_in(self._layout.done_dir, refresh=True)
            return len(self._done) >= len(self.plan)

    def mark_durable(self, blocks: Iterable[int]) -> None:
        """Mark blocks as durable or skipped; a unit is done when all its blocks are."""
        with self._lock, _refused(self._layout.folder):
            durable_blocks = set(blocks)
            for unit in list(self._undone):
                self._undone[unit] -= durable_blocks
                if not self._undone[unit]:
                    del self._undone[unit]
                    self._done.add(unit)
                    self._put(self._layout.done_dir, unit)

    def own_blocks(self) -> list[int]:
        """Return the blocks of all units that this owner has claimed in any process, ascending."""
        with self._lock:
            return sorted(block for unit in self._given | self._claimed_units() for block in self.plan.blocks(unit))

    def release(self) -> None:
        """Release the unfinished units, so that others need not wait for the lease to expire."""
        with self._lock, _refused(self._layout.folder):
            for unit in self._claimed_units() - numbers_in(self._layout.done_dir):
                self._remove_claim(unit, self.owner)
            self._undone.clear()

    def _in_own_order(self, free: list[int]) -> list[int]:
        """
        Return free units in the order to try: the next few, one for each device, shuffled for this owner.

        Otherwise a thousand owners that begin together would all try the first unit, 999 the second, and so on.
        """
        near = free[: self.plan.num_devices]
        self._chooser.shuffle(near)
        return [*near, *free[len(near) :]]

    def _claimed_units(self) -> set[int]:
        """Return the units that this owner has claimed."""
        return {unit for unit in numbers_in(self._layout.claims_dir) if self._owner_of(unit) == self.owner}

    def _hand_out(self, unit: int, *, is_fresh: bool) -> ClaimedUnit:
        blocks = self.plan.blocks(unit)
        self._given.add(unit)
        self._undone[unit] = set(blocks)
        return ClaimedUnit(unit, blocks, is_fresh)

    def _claim(self, unit: int) -> bool:
        """Claim a unit; also detects a link that NFS made but reported as failed."""
        return self._put(self._layout.claims_dir, unit) or self._owner_of(unit) == self.owner

    def _take_over(self, claimed: set[int]) -> ClaimedUnit | None:
        """Take an unfinished unit of an expired owner; looks as often as leases are renewed."""
        now_s = time.monotonic()
        if self._looked_s is not None and now_s - self._looked_s < self.plan.lease_s / RENEWALS_IN_A_LEASE:
            return None
        self._looked_s = now_s
        self._done |= numbers_in(self._layout.done_dir)
        for unit in sorted(claimed - self._done - self._given):
            owner = self._owner_of(unit)
            if owner is None or not self._watch.has_expired(self._layout.owner(owner)):
                continue
            if self._remove_claim(unit, owner) and self._claim(unit):
                log.warning("unit.taken_over", unit=unit, owner=owner)
                self._looked_s = None
                return self._hand_out(unit, is_fresh=False)
        return None

    def _remove_claim(self, unit: int, owner: str) -> bool:
        """Remove the claim of *owner*; return False when another process did."""
        path = self._layout.claims_dir / _name(unit)
        private = self._layout.claims_dir / f".{path.name}.{secrets.token_hex(8)}"
        try:
            path.rename(private)
        except FileNotFoundError:
            return False
        had_owner = _owner_in(private) == owner
        if not had_owner:  # another process has claimed it meanwhile: put that back
            with suppress(FileExistsError):
                os.link(private, path)
        private.unlink()
        return had_owner

    def _put(self, folder: Path, unit: int) -> bool:
        """Make the file of *unit* with this owner's name; return False when it exists."""
        private = folder / f".{_name(unit)}.{secrets.token_hex(8)}"
        private.write_text(json.dumps({"owner": self.owner}))
        try:
            os.link(private, folder / _name(unit))
        except FileExistsError:
            return False
        else:
            return True
        finally:
            private.unlink()

    def _owner_of(self, unit: int) -> str | None:
        return _owner_in(self._layout.claims_dir / _name(unit))


class FixedBlocks:
    """The blocks of a rank that shares no work: one unit, never claimed by others."""

    def __init__(self, blocks: Sequence[int]) -> None:
        self._blocks = blocks
        self._is_given = False

    def wait(self, _stop: Event, _on_wait: Callable[[], None] = lambda: None) -> ClaimedUnit | None:
        """Return the unit on the first call."""
        if self._is_given:
            return None
        self._is_given = True
        return ClaimedUnit(0, self._blocks, is_fresh=False)

    def iter_now(self) -> Iterator[ClaimedUnit]:
        return iter(())

    def all_done(self) -> bool:
        return True

    def mark_durable(self, blocks: Iterable[int]) -> None:
        pass

    def own_blocks(self) -> Sequence[int]:
        return self._blocks

    def release(self) -> None:
        pass


def owners_of_done(folder: Path, units: Iterable[int]) -> dict[int, str]:
    """Return finished unit -> its owner, among *units*."""
    named = ((unit, _owner_in(UnitsLayout(folder).done_dir / _name(unit))) for unit in units)
    return {unit: owner for unit, owner in named if owner is not None}


def all_done(folder: Path) -> bool:
    """
    Whether every unit of a start of a run is done.

    Raises:
        OSError: The folder cannot be read.
    """
    return len(numbers_in(UnitsLayout(folder).done_dir, refresh=True)) >= len(read_units(folder))


def numbers_in(folder: Path, *, refresh: bool = False) -> set[int]:
    """
    Return the units with a file in *folder*, of claims or of done units.

    *refresh* makes sure that recent writes of other hosts are seen: a network file system may cache a folder for up to
    a minute, but asks its server after a change made here.

    Raises:
        OSError: The folder cannot be read, or written.
    """
    if refresh:
        private = folder / f".look.{secrets.token_hex(8)}"
        private.touch()
        private.unlink()
    return {int(path.name) for path in folder.iterdir() if path.name.isdecimal()}


def _name(unit: int) -> str:
    return f"{unit:06d}"


def _owner_in(path: Path) -> str | None:
    """Return the owner named in a file: None without a file, empty when unreadable."""
    try:
        owner = json.loads(path.read_bytes())["owner"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    return owner if isinstance(owner, str) else ""


def _runs(numbers: IntArray) -> list[list[int]]:
    """Return ascending *numbers* as runs of [first, end)."""
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    return [[int(run[0]), int(run[-1]) + 1] for run in np.split(numbers, breaks) if len(run)]


@contextmanager
def _refused(folder: Path) -> Iterator[None]:
    """Turn ``OSError`` into an error that names the folder."""
    try:
        yield
    except OSError as error:
        raise OutputError(folder, error.strerror or str(error)) from error
