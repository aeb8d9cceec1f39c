"""
Which rank computes which block.

Every rank begins with its stride, and takes from other ranks once that is used up. A block is unstarted, assigned to a
running process, or done. Only the parent assigns blocks, so each has one process at a time; what a process had when it
ended is unstarted again, and the process that gets it next looks for it on disk first.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from virnucpro.pipeline.work.assignment import AssignedUnit
from virnucpro.telemetry.ranks import ITEMS_IN_A_MESSAGE, runs_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from virnucpro.telemetry.ranks import Rank

MOST_AT_ONCE = 8
"""Blocks assigned at once."""
UNSTARTED_PER_ASSIGNED = 32
"""Unstarted blocks of a rank for each that is assigned at once: few near the end, so that ranks finish together."""
TAIL = 2
"""Unstarted blocks a rank from which on no process gets one before it has finished the one before."""


class BlockPool:
    """Every block of a plan; not safe from several threads. *ranks*: the records, for throughput and starts."""

    is_on_cluster = False

    def __init__(self, num_blocks: int, ranks: Sequence[Rank]) -> None:
        self._num_blocks = num_blocks
        self._ranks = {rank.rank: rank for rank in ranks}
        self._unstarted = {rank: deque(range(rank, num_blocks, len(ranks))) for rank in self._ranks}
        """Done ones may be among them."""
        self._free: deque[int] = deque()
        """Of ranks that were lost."""
        self._given: dict[int, set[int]] = {rank: set() for rank in self._ranks}
        self._checking: dict[int, set[int]] = {rank: set() for rank in self._ranks}
        """Blocks whose files a process looks for."""
        self._is_done = bytearray(num_blocks)
        self._is_checked = bytearray(num_blocks)
        self._moved: dict[int, int] = {}
        """Block -> the rank that has it, where that is not the one of its stride."""
        self._running: set[int] = set()
        """Ranks that have a process."""
        self._ended: set[int] = set()
        """Ranks that are complete or lost."""

    @property
    def is_done(self) -> bool:
        """Whether every block is done, or is not to be computed in this start of the run."""
        return self._is_done.count(0) == 0

    @property
    def live(self) -> set[int]:
        """Ranks that are neither complete nor lost."""
        return self._ranks.keys() - self._ended

    def rank_of(self, block: int) -> int:
        """Return the rank that has or had *block* last."""
        return self._moved.get(block, block % len(self._ranks))

    def blocks_of(self, rank: int) -> Sequence[int]:
        """Return the blocks that *rank* has, done ones included."""
        stride = range(rank, self._num_blocks, len(self._ranks))
        if not self._moved:
            return stride
        others = [block for block, owner in self._moved.items() if owner == rank and block not in stride]
        return sorted([*(block for block in stride if self.rank_of(block) == rank), *others])

    def add(self, number: int) -> None:
        """Add *number* blocks after the existing ones; their files are looked for first."""
        first, self._num_blocks = self._num_blocks, self._num_blocks + number
        self._is_done.extend(bytes(number))
        self._is_checked.extend(bytes(number))
        self._free.extend(range(first, self._num_blocks))

    def begin(self, rank: int) -> Sequence[int]:
        """Note that a process of *rank* is about to start, and return the blocks that it checks first."""
        blocks = self.blocks_of(rank)
        self._running.add(rank)
        self._ended.discard(rank)
        self._checking[rank] = {block for block in blocks if not self._is_done[block]}
        return blocks

    def checked(self, rank: int) -> None:
        """Note that *rank* has looked for the files of what it was asked to check; what it found is done."""
        for block in self._checking[rank]:
            self._is_checked[block] = True
        self._checking[rank] = set()

    def done(self, rank: int, blocks: Iterable[int]) -> None:
        """Mark *blocks* as durable, or as having nothing to compute, as far as *rank* was asked."""
        for block in blocks:
            if block in self._given[rank] or block in self._checking[rank]:
                self._is_done[block] = True
                self._given[rank].discard(block)

    def requeue(self, rank: int) -> None:
        """Note that the process of *rank* has ended, and another one is to follow."""
        self._unstarted[rank].extendleft(sorted(self._taken(rank), reverse=True))

    def lose(self, rank: int) -> None:
        """Note that *rank* is lost: what it had is free at once."""
        self._free.extend(sorted({*self._taken(rank), *self._unstarted[rank]}))
        self._unstarted[rank].clear()
        self._ended.add(rank)

    def close(self, rank: int) -> None:
        """Note that *rank* has ended, and that what it had is not to be computed in this start of the run."""
        for block in {*self._taken(rank), *self._unstarted[rank]}:
            self._is_done[block] = True
        self._unstarted[rank].clear()
        self._ended.add(rank)

    def reopen(self, blocks: Iterable[int]) -> None:
        """Mark *blocks* as to be computed after all; earlier messages about blocks in progress no longer count."""
        for block in set(blocks):
            self._is_done[block] = self._is_checked[block] = False
            for held in (*self._checking.values(), *self._given.values()):
                held.discard(block)
            for queue in (*self._unstarted.values(), self._free):
                if block in queue:
                    queue.remove(block)
            self._free.append(block)

    def next_for(
        self,
        rank: int,
        suspects: Mapping[int, int],
        for_it: Sequence[int],
        *,
        idle: bool,
        may_take: bool,
        most: int = MOST_AT_ONCE,
    ) -> AssignedUnit | None:
        """
        Return what the process of *rank* does next; None: it has to wait, or to ask again once it is idle.

        Args:
            suspects: Block that may have ended a process -> deaths: assigned alone, to a process that has nothing else.
            for_it: Suspects that this rank may try, in this order.
            idle: Whether everything that the process has computed is durable.
            may_take: Whether it may have blocks of other ranks.
        """
        if not idle and self._is_tail():
            return None
        if blocks := self._pop(self._unstarted[rank], suspects, most):
            return self._give(rank, blocks)
        sources = self._sources(rank)
        for source, from_end in sources if may_take else ():
            if blocks := self._pop(source, suspects, most, from_end=from_end):
                return self._give(rank, blocks)
        if not idle:
            return None
        if may_take and (unchecked := self._unchecked(rank)):
            self._checking[rank] = set(unchecked)
            return AssignedUnit(blocks=unchecked, to_check=True)
        for block in for_it:
            for source in (self._unstarted[rank], *(source for source, _ in sources)):
                if block in source and self._is_checked[block] and not self._is_done[block]:
                    source.remove(block)
                    return self._give(rank, [block], {block: suspects[block]})
        return AssignedUnit(is_end=True) if self.is_done else None

    def _unchecked(self, rank: int) -> list[int]:
        """Return unchecked blocks of ranks without a process; their files are looked for first."""
        not_running = self._ranks.keys() - self._running - {rank}
        for source in (self._free, *(self._unstarted[other] for other in sorted(not_running))):
            found = sorted(block for block in source if not self._is_done[block] and not self._is_checked[block])
            if found:
                runs = islice(runs_of(found), ITEMS_IN_A_MESSAGE)
                return [block for first, last, step in runs for block in range(first, last + 1, step)]
        return []

    def _sources(self, rank: int) -> list[tuple[deque[int], bool]]:
        """Return where *rank* may take blocks, and whether from the end: the lost ranks' first, then who is behind."""
        usual = [seconds for record in self._ranks.values() if (seconds := record.seconds_per_batch)]
        typical = sum(usual) / len(usual) if usual else 1.0

        def seconds_left(other: int) -> float:
            return len(self._unstarted[other]) * (self._ranks[other].seconds_per_batch or typical)

        others = (other for other in self._ranks if other != rank and self._unstarted[other])
        behind = sorted(others, key=seconds_left, reverse=True)
        return [(self._free, False), *((self._unstarted[other], True) for other in behind)]

    def _is_tail(self) -> bool:
        num_live = len(self.live)
        unstarted = len(self._free) + sum(map(len, self._unstarted.values()))
        return num_live > 1 and unstarted <= TAIL * num_live

    def _pop(self, source: deque[int], suspects: Collection[int], most: int, *, from_end: bool = False) -> list[int]:
        """Take a few blocks that are checked and not suspect from *source*."""
        wanted = max(1, min(most, len(source) // UNSTARTED_PER_ASSIGNED))
        found: list[int] = []
        put_back: list[int] = []
        while source and len(found) < wanted:
            block = source.pop() if from_end else source.popleft()
            if self._is_done[block]:
                continue
            (found if self._is_checked[block] and block not in suspects else put_back).append(block)
        (source.extend if from_end else source.extendleft)(reversed(put_back))
        return sorted(found)

    def _give(self, rank: int, blocks: list[int], suspects: Mapping[int, int] | None = None) -> AssignedUnit:
        self._given[rank].update(blocks)
        for checking in self._checking.values():
            checking.difference_update(blocks)
        for block in blocks:
            if self.rank_of(block) != rank:
                self._moved[block] = rank
        return AssignedUnit(blocks=blocks, is_fresh=True, suspects=suspects or {})

    def _taken(self, rank: int) -> set[int]:
        """Return what was assigned to the ended process of *rank* and is not finished; its files are to be checked."""
        given, self._given[rank] = self._given[rank], set()
        self._checking[rank] = set()
        self._running.discard(rank)
        for block in given:
            self._is_checked[block] = False
        return given
