"""
Who computes what, agreed on in a shared folder: units of neighbouring blocks, each claimed by one owner at a time.

The bytes of a result follow from the plan, whoever computes which block, and a block that two have computed counts
once. So claims only have to be good, not perfect: each unit is done at least once, and normally exactly once.

- A claim is a file, linked to its name from a private one, which succeeds for one taker only, on NFS too.
- A unit is marked done once its blocks are durable. The mark is a hint for whoever looks for work; the parts on disk
  stay the truth.
- An owner shows that it lives by its lease (``virnucpro.store.lease``). The claims of one whose lease has lapsed are
  taken over, by whoever has nothing else to do: the old claim is renamed to a private name, which again succeeds for
  one taker only, and a new one made.

Units shrink towards the end of the plan, so that fast and slow devices finish together. This module knows files and
numbers: no model, no framework, no orchestrator.
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
from virnucpro.store.lease import LEASE_S, RENEWALS_IN_A_LEASE, LapseWatch
from virnucpro.store.manifest import read_object
from virnucpro.this_host import host_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path
    from threading import Event

    IntArray = np.ndarray[Any, np.dtype[np.int64]]

log = structlog.get_logger(__name__)

PIECES_OF_A_SHARE = 8
"""A unit holds this part of what each device would get of the rest of the work."""
MOST_UNITS_OF_A_SHARE = 128
"""No unit is smaller than this part of what each device would get of the whole work, except the last."""
LOOK_INTERVAL_S = 1.0
"""Seconds between two looks of somebody who waits whether everything is done, at the least."""
UNITS_LOOKED_AT_A_SECOND = 5000
"""Units of a run for which somebody who waits looks a second later: each look lists them all, and near the end of a run
on a thousand devices hundreds wait."""


def new_owner() -> str:
    """Return the name of an owner, which is never another's."""
    return f"{host_name()}.{os.getpid()}.{secrets.token_hex(4)}"


@dataclass(frozen=True)
class UnitSource:
    """Where a worker claims its units, and in whose name; picklable."""

    folder: Path
    """The units of this start of the run."""
    owner: str
    """As ``new_owner`` gives it; the same for every process of one rank on one host."""


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """The units of one start of a run."""

    run_id: str
    """Of that start."""
    plan_fingerprint: str
    """Of the batch plan that the blocks are numbered by."""
    num_devices: int
    """Devices that the units were made for."""
    lease_s: float
    """Seconds after which an owner that gives no sign of life has lost its claims."""
    units: list[list[list[int]]]
    """The blocks of each unit, as runs of [first, end)."""

    def __len__(self) -> int:
        return len(self.units)

    def blocks(self, unit: int) -> list[int]:
        """Return the numbers of a unit's blocks, ascending."""
        return [block for first, end in self.units[unit] for block in range(first, end)]


def cut_units(tokens: IntArray, *, devices: int) -> list[range]:
    """
    Cut the blocks that are to be computed into units.

    Args:
        tokens: int64 (n,): tokens of each block to do, in order.
        devices: How many will compute.

    Returns:
        Consecutive ranges of places in *tokens* that cover each once, none empty; smaller ones towards the end.
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
    Cut *blocks* into units and write them where owners claim them.

    Args:
        folder: Of this start of the run; made here.
        run_id: Of this start.
        plan_fingerprint: Of the batch plan.
        blocks: Numbers of the blocks to do, ascending.
        tokens: int64 (num_blocks of the plan,): tokens of each block of the plan.
        devices: How many will compute.
        lease_s: Seconds that an owner's lease lasts.

    Raises:
        OutputError: The folder cannot be written.
    """
    numbers = np.asarray(blocks, dtype=np.int64)
    units = [_runs(numbers[unit.start : unit.stop]) for unit in cut_units(tokens[numbers], devices=devices)]
    plan = UnitPlan(run_id=run_id, plan_fingerprint=plan_fingerprint, num_devices=devices, lease_s=lease_s, units=units)
    layout = UnitsLayout(folder)
    try:
        for inner in (layout.claims_dir, layout.done_dir, layout.owners_dir, layout.said_dir, layout.readings_dir):
            durable.make_folder(inner)
    except OSError as error:
        raise OutputError(folder, error.strerror or str(error)) from error
    durable.write_bytes(layout.plan, json.dumps(vars(plan)).encode())
    return plan


def read_units(folder: Path) -> UnitPlan:
    """
    Return the units of a start of a run.

    Raises:
        ResultError: There are none, or they cannot be read.
    """
    path = UnitsLayout(folder).plan
    try:
        return UnitPlan(**read_object(path))
    except TypeError as error:
        raise ResultError(path, "is not a list of units of this version") from error


@dataclass(frozen=True)
class ClaimedUnit:
    """A unit that is ours to compute."""

    number: int
    """Of the unit."""
    blocks: Sequence[int]
    """Its blocks, ascending."""
    is_fresh: bool
    """Whether nobody has claimed it before: else some of its blocks may be durable already."""


class UnitClaims:
    """
    The claims of one owner; safe from any thread. The owner's lease is somebody else's business.

    Args:
        source: Where, and in whose name.

    Raises:
        ResultError: The units cannot be read.
    """

    def __init__(self, source: UnitSource) -> None:
        self.owner = source.owner
        self.plan = read_units(source.folder)
        self._layout = UnitsLayout(source.folder)
        self._lock = threading.RLock()
        self._undone: dict[int, set[int]] = {}
        """Our units -> their blocks that are not durable."""
        self._given: set[int] = set()
        """Units that were handed out in this process."""
        self._done: set[int] = set()
        self._chooser = random.Random(source.owner)  # noqa: S311  nobody is to be kept from guessing
        self._watch = LapseWatch(self.plan.lease_s)
        self._looked_s: float | None = None
        self._left_by_earlier = sorted(self._claimed_units() - numbers_in(self._layout.done_dir))

    def take(self) -> ClaimedUnit | None:
        """
        Claim the next unit that can be had now; None where there is none, which says nothing about later.

        First come those that an earlier process of ours left, then those that nobody has, then those whose owner is
        gone.

        Raises:
            OutputError: The folder cannot be written.
        """
        with self._lock, _refused(self._layout.folder):
            while self._left_by_earlier:
                unit = self._left_by_earlier.pop(0)
                if unit not in self._given:
                    return self._hand_out(unit, is_fresh=False)
            claimed = numbers_in(self._layout.claims_dir, afresh=True)  # and with them what is done
            gone = claimed | self._done | self._given
            free = [unit for unit in range(len(self.plan)) if unit not in gone]
            for unit in self._in_own_order(free):
                if self._claim(unit):
                    return self._hand_out(unit, is_fresh=True)
            return self._take_over(claimed)

    def iter_now(self) -> Iterator[ClaimedUnit]:
        """Yield units as long as there are some to be had, each claimed when it is asked for."""
        while (unit := self.take()) is not None:
            yield unit

    def wait(self, stop: Event, on_wait: Callable[[], None] = lambda: None) -> ClaimedUnit | None:
        """
        Return a unit as soon as one can be had, or None once all units are done or *stop* is set.

        Whoever calls has nothing left to do: of its own units none may be under way.

        Args:
            stop: Ends the waiting.
            on_wait: Called about once a second, less often in a run of many units.

        Raises:
            OutputError: The folder cannot be written.
        """
        while not stop.is_set() and not self.all_done():
            if (unit := self.take()) is not None:
                return unit
            on_wait()
            interval_s = max(LOOK_INTERVAL_S, len(self.plan) / UNITS_LOOKED_AT_A_SECOND)
            stop.wait(min(interval_s, self.plan.lease_s / RENEWALS_IN_A_LEASE))
        return None

    def all_done(self) -> bool:
        """
        Whether every unit is done.

        Raises:
            OutputError: The folder is gone.
        """
        with self._lock, _refused(self._layout.folder):
            if len(self._done) < len(self.plan):
                self._done |= numbers_in(self._layout.done_dir, afresh=True)
            return len(self._done) >= len(self.plan)

    def settle(self, blocks: Iterable[int]) -> None:
        """
        Note that blocks of ours are durable, or need not be; a unit of which that is said of all is marked done.

        Raises:
            OutputError: The folder cannot be written.
        """
        with self._lock, _refused(self._layout.folder):
            settled = set(blocks)
            for unit in list(self._undone):
                self._undone[unit] -= settled
                if not self._undone[unit]:
                    del self._undone[unit]
                    self._done.add(unit)
                    self._put(self._layout.done_dir, unit)

    def own_blocks(self) -> list[int]:
        """Return the blocks of every unit that this owner has claimed, in whatever process, ascending."""
        with self._lock:
            return sorted(block for unit in self._given | self._claimed_units() for block in self.plan.blocks(unit))

    def release(self) -> None:
        """
        Give up the units that are not done, so that others need not wait for our lease to lapse.

        Raises:
            OutputError: The folder cannot be written.
        """
        with self._lock, _refused(self._layout.folder):
            for unit in self._claimed_units() - numbers_in(self._layout.done_dir):
                self._remove_claim(unit, self.owner)
            self._undone.clear()

    def _in_own_order(self, free: list[int]) -> list[int]:
        """
        Return free units in the order in which we try them: the next few, one a device, as only we shuffle them.

        Else a thousand owners that begin together would all try the first one, 999 of them the second, and so on.
        """
        near = free[: self.plan.num_devices]
        self._chooser.shuffle(near)
        return [*near, *free[len(near) :]]

    def _claimed_units(self) -> set[int]:
        """Return the units that have a claim of this owner."""
        return {unit for unit in numbers_in(self._layout.claims_dir) if self._owner_of(unit) == self.owner}

    def _hand_out(self, unit: int, *, is_fresh: bool) -> ClaimedUnit:
        blocks = self.plan.blocks(unit)
        self._given.add(unit)
        self._undone[unit] = set(blocks)
        return ClaimedUnit(unit, blocks, is_fresh)

    def _claim(self, unit: int) -> bool:
        """Whether the unit is ours now; a link that NFS has made but reported as refused is seen as well."""
        return self._put(self._layout.claims_dir, unit) or self._owner_of(unit) == self.owner

    def _take_over(self, claimed: set[int]) -> ClaimedUnit | None:
        """Take a unit that is not done and whose owner is gone; looks as often as leases are renewed."""
        now_s = time.monotonic()
        if self._looked_s is not None and now_s - self._looked_s < self.plan.lease_s / RENEWALS_IN_A_LEASE:
            return None
        self._looked_s = now_s
        self._done |= numbers_in(self._layout.done_dir)
        for unit in sorted(claimed - self._done - self._given):
            owner = self._owner_of(unit)
            if owner is None or not self._watch.has_lapsed(self._layout.owner(owner)):
                continue
            if self._remove_claim(unit, owner) and self._claim(unit):
                log.warning("unit.taken_over", unit=unit, owner=owner)
                self._looked_s = None
                return self._hand_out(unit, is_fresh=False)
        return None

    def _remove_claim(self, unit: int, owner: str) -> bool:
        """Take away the claim of *owner*, unless somebody else has done so; whether it was us."""
        path = self._layout.claims_dir / _name(unit)
        private = self._layout.claims_dir / f".{path.name}.{secrets.token_hex(8)}"
        try:
            path.rename(private)
        except FileNotFoundError:
            return False
        is_theirs = _owner_in(private) == owner
        if not is_theirs:  # somebody else was first, and has claimed it since: put that back
            with suppress(FileExistsError):
                os.link(private, path)
        private.unlink()
        return is_theirs

    def _put(self, folder: Path, unit: int) -> bool:
        """Give *unit* a file with our name in it; whether there was none."""
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
    """
    The blocks of a rank that shares its work with nobody: one unit, which is nobody else's to claim.

    Args:
        blocks: Their numbers.
    """

    def __init__(self, blocks: Sequence[int]) -> None:
        self._blocks = blocks
        self._is_given = False

    def wait(self, _stop: Event, _on_wait: Callable[[], None] = lambda: None) -> ClaimedUnit | None:
        """Return the unit, the first time."""
        if self._is_given:
            return None
        self._is_given = True
        return ClaimedUnit(0, self._blocks, is_fresh=False)

    def iter_now(self) -> Iterator[ClaimedUnit]:
        """Yield nothing: there is no other unit."""
        return iter(())

    def all_done(self) -> bool:
        """Whether nobody else has work of ours."""
        return True

    def settle(self, blocks: Iterable[int]) -> None:
        """Do nothing: nobody waits for it."""

    def own_blocks(self) -> Sequence[int]:
        """Return the blocks."""
        return self._blocks

    def release(self) -> None:
        """Do nothing: nobody waits for it."""


def owners_of_done(folder: Path, units: Iterable[int]) -> dict[int, str]:
    """Return unit -> the owner that did it, of those *units* that are done."""
    named = ((unit, _owner_in(UnitsLayout(folder).done_dir / _name(unit))) for unit in units)
    return {unit: owner for unit, owner in named if owner is not None}


def all_done(folder: Path) -> bool:
    """
    Whether every unit of a start of a run is done.

    Raises:
        ResultError: The units cannot be read.
        OSError: The folder cannot be read.
    """
    return len(numbers_in(UnitsLayout(folder).done_dir, afresh=True)) >= len(read_units(folder))


def numbers_in(folder: Path, *, afresh: bool = False) -> set[int]:
    """
    Return the units that have a file in *folder*, of claims or of done units.

    Args:
        folder: Which.
        afresh: Make sure to see what others have just written: a network file system may answer from memory for up to
            a minute, but asks its server after a change of our own.

    Raises:
        OSError: It cannot be read, or written.
    """
    if afresh:
        private = folder / f".look.{secrets.token_hex(8)}"
        private.touch()
        private.unlink()
    return {int(path.name) for path in folder.iterdir() if path.name.isdecimal()}


def _name(unit: int) -> str:
    return f"{unit:06d}"


def _owner_in(path: Path) -> str | None:
    """Return whose name is in a file: None where there is no file, an empty one where it cannot be read."""
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
    """Turn what the system refuses into an error that names the folder."""
    try:
        yield
    except OSError as error:
        raise OutputError(folder, error.strerror or str(error)) from error
