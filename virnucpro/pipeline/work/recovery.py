"""
What a run does about failures while it computes: the parent's one list of suspects, and who gets which block.

A worker announces what it is about to compute. When its process dies or hangs, the parent knows what was in flight and
narrows it down, one step for each death:

1. the blocks in flight are computed again, each whole and on its own, after everything that is not suspect;
2. a block that was in flight again is computed sequence by sequence, and whole only once each of them has succeeded;
3. a sequence that was in flight alone twice is quarantined: it gets no row but a line in ``failed_sequences.tsv``;
   a block that fails only as a whole keeps the rows of its sequences computed one by one.

A process that follows a failed one begins with a block's sequences one by one: several sequences that end processes
then do not look like a device that is gone.

A poisoned sequence thus costs at most four more starts of a process, whatever the size of its block. What is learned
holds for this start of the run: the next one tries everything again.

A death proves nothing against a sequence until its device has computed something afterwards, or another one died on it
too. So the next try of a suspect belongs to a healthy rank that has not died on it. What the deaths of a rank that is
lost counted for is dropped. A rank that computed nothing after two deaths that no other shares, or one that its device
reported, is lost, also where nothing is left to do.

Everything here is numbers of ranks, blocks and positions: no index, plan or model, and no framework.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from virnucpro.pipeline.failures import FailureClass
from virnucpro.pipeline.work.assignment import SINGLY, AssignedUnit, Assignment
from virnucpro.pipeline.work.block_pool import MOST_AT_ONCE, BlockPool
from virnucpro.pipeline.work.rank_runner import RetryPolicy
from virnucpro.settings import MAX_STARTS
from virnucpro.telemetry.ranks import claimed_messages, whole_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from virnucpro.config import RunLimits
    from virnucpro.pipeline.failures import OomKills
    from virnucpro.telemetry.ranks import Rank

log = structlog.get_logger(__name__)

_LONE_DEATHS = 2
"""Deaths of a sequence alone after which it is quarantined."""


@dataclass(frozen=True)
class Quarantine:
    block: int
    failure: FailureClass
    attempts: int


@dataclass
class Death:
    """A process that ended while it computed."""

    rank: int
    failure: FailureClass
    whole: frozenset[int]
    """Blocks that were in flight."""
    alone: dict[int, int]
    """Index position -> block, of sequences that were in flight by themselves."""
    is_proved: bool = False
    """Whether its rank has computed something since."""

    @property
    def blocks(self) -> set[int]:
        return {*self.whole, *self.alone.values()}


class RankObserver(Protocol):
    """Follows ranks; called from their threads, with messages that were applied to the rank's record before."""

    def assigned(self, rank: int, blocks: Sequence[int], /) -> None:
        """Called with the blocks that the next process of *rank* begins with."""

    def on_message(self, rank: int, message: dict[str, Any], /) -> None: ...

    def ended(self, rank: int, starts_again: bool, quarantined: Mapping[int, str], /) -> None:
        """
        Called when a process of *rank* has ended, as its record says.

        Args:
            starts_again: Whether another process follows.
            quarantined: Index position of each sequence that is not computed any more -> failure class.
        """


class _Unobserved:
    assigned = on_message = ended = staticmethod(lambda *_: None)


class Recovery(RetryPolicy):
    """
    Decides what each process computes, and whether a rank is restarted; safe from any thread.

    Args:
        limits: How many fruitless processes in a row a rank may have.
        oom_kills: The kernel's count; by default the count of our own control group.
        pool: Assigns the blocks; by default all of the plan, each rank's stride first.
        more: Called each time that everything is done; returns how many blocks follow, which need what was done.
    """

    def __init__(
        self,
        ranks: Sequence[Rank],
        *,
        num_blocks: int,
        limits: RunLimits,
        oom_kills: OomKills | None = None,
        run_id: str = "",
        observer: RankObserver | None = None,
        pool: BlockPool | None = None,
        more: Callable[[], int] = lambda: 0,
    ) -> None:
        super().__init__(ranks, limits, oom_kills)
        self._observer = _Unobserved() if observer is None else observer
        self.run_id = run_id
        self._pool = BlockPool(num_blocks, ranks) if pool is None else pool
        self._more = more
        self._records = {rank.rank: rank for rank in ranks}
        self._deaths: list[Death] = []
        self._excluded: dict[int, Quarantine] = {}
        """What was quarantined when a worker or this class last learned of it."""
        self._known: dict[int, Quarantine] = {}
        """By index position, of sequences that were quarantined elsewhere."""
        self._changed = threading.Condition()
        self._running = 0
        self._most_running = len(ranks)

    def worker_args(self, rank: int, args: tuple[Any, ...], *, task: str = "") -> tuple[Any, ...]:
        """Return *args* and the assignment of the process that *rank* has its turn for."""
        with self._changed:
            record = self._records[rank]
            record.has_started = record.is_running = True
            self._reopen_released()
            blocks = self._pool.begin(rank)
            self._observer.assigned(rank, blocks)
            assignment = Assignment(
                first=AssignedUnit(blocks=blocks, to_check=True, quarantined=frozenset(self._quarantined())),
                asks_parent=True,
                is_on_cluster=self._pool.is_on_cluster,
                run_id=self.run_id,
                attempt=record.attempts + 1,
                task=task,
                after_failure=record.fruitless > 0,
            )
            return (*args, assignment)

    @contextmanager
    def turn(self, rank: int, stop: threading.Event) -> Iterator[None]:
        """Wait until *rank* may start a process (fewer run at a time once memory ran out), and note that it does."""
        record = self._records[rank]
        with self._changed:
            while self._running >= self._most_running and not stop.is_set():
                record.is_waiting = True
                self._changed.wait(0.2)
            record.is_waiting = False
            self._running += 1
        try:
            yield
        except BaseException:
            with self._changed:
                record.is_running = False
                self._pool.lose(rank)
            raise
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def on_message(self, rank: int, message: dict[str, Any]) -> None:
        """Update the blocks from a message that was applied to its rank before, and hand it on."""
        with self._changed:
            self._note_rows(rank)
            if message.get("kind") == "done":
                self._pool.done(rank, whole_blocks(message).tolist())
                self._changed.notify_all()
            elif message.get("kind") == "resumed":
                self._pool.checked(rank)
        self._observer.on_message(rank, message)

    def next_blocks(self, rank: int) -> list[dict[str, Any]]:
        with self._changed:
            idle = self._records[rank].attempt.wants == "idle"
            unit = self._next_unit(rank, idle=idle)
            if unit is None:
                return [] if idle else [{"answer": "nothing"}]
            return self._with_failures(rank, unit).messages()

    def another_attempt(self, rank: Rank) -> bool:
        with self._changed:
            starts_again = self._learn(rank)
            quarantined = {position: why.failure.value for position, why in self._quarantined().items()}
        self._observer.ended(rank.rank, starts_again, quarantined)
        return starts_again

    def quarantined(self) -> dict[int, tuple[str, int]]:
        """Return index position -> (failure class, processes that tried), of the sequences that are not computed."""
        with self._changed:
            return {position: (why.failure.value, why.attempts) for position, why in self._quarantined().items()}

    def why_missing(self, position: int, block: int, outcomes: Sequence[Rank]) -> tuple[str, int]:
        """Return the reason why a sequence has no row, and how many processes tried."""
        with self._changed:
            if (found := self._quarantined().get(position)) is not None:
                return found.failure.value, found.attempts
            outcome = outcomes[self._pool.rank_of(block)]
            return outcome.failure or "unknown", outcome.attempts

    # --- assigning; the lock is held ---

    def _next_unit(self, rank: int, *, idle: bool) -> AssignedUnit | None:
        suspects, healthy = self._suspects(), self._healthy()
        for_it = [block for block in sorted(suspects, key=suspects.__getitem__) if rank in self._next_to_try(block)]
        may_take = rank in healthy or not healthy
        if self._is_doubted(rank) and not idle:
            return None
        if idle and self._pool.is_done:
            self._pool.add(self._more())
        most = 1 if self._is_doubted(rank) else MOST_AT_ONCE
        return self._pool.next_for(rank, suspects, for_it, idle=idle, may_take=may_take, most=most)

    def _is_doubted(self, rank: int) -> bool:
        """Whether a rank has failed, and computed nothing since: it begins with the sequences of a block one by one."""
        return self._records[rank].fruitless > 0

    def _healthy(self) -> set[int]:
        """Return the ranks with a process that has computed something since their last failure, if any."""
        return {rank for rank, record in self._records.items() if record.is_running and not record.fruitless}

    def _at_hand(self) -> set[int]:
        """Return the ranks that have a process, or will have one without another's end."""
        found = {rank: self._records[rank] for rank in self._pool.live}
        return {rank for rank, record in found.items() if record.has_started and not record.is_waiting}

    def _next_to_try(self, block: int) -> set[int]:
        """Return the ranks that may try a suspect: healthy ones that have not died on it, others, or else any."""
        on_it = [death for death in self._deaths if block in death.blocks]
        on_it = [death for death in on_it if block in death.alone.values()] or on_it
        untried = self._at_hand() - {death.rank for death in on_it}
        return untried & self._healthy() or untried or set(self._records)

    def _with_failures(self, rank: int, unit: AssignedUnit) -> AssignedUnit:
        """Return *unit* with what is known of failures in its blocks, which *rank* now has, unless it checks them."""
        blocks = set(unit.blocks)
        for message in () if unit.to_check else claimed_messages(blocks):
            self._observer.on_message(rank, message)
        excluded = {position: why for position, why in self._quarantined().items() if why.block in blocks}
        self._excluded |= excluded  # should what counts against one be dropped, its block is computed again
        suspects = unit.suspects
        if self._is_doubted(rank) and not unit.to_check:
            known = self._suspects()
            suspects = {block: max(known.get(block, 0), SINGLY) for block in unit.blocks}
        # those of a device that may be gone would come last, where what really ends processes is to be
        credible = [death for death in self._deaths if death.is_proved or death.rank == rank]
        lone = {position for death in credible for position, block in death.alone.items() if block in blocks}
        return replace(unit, suspects=suspects, lone_suspects=frozenset(lone), quarantined=frozenset(excluded))

    # --- what deaths tell; the lock is held ---

    def _suspects(self) -> dict[int, int]:
        """Return block -> deaths; 1 where only a sequence of it was in flight, alone."""
        alone = {block: 1 for death in self._deaths for block in death.alone.values()}
        return alone | Counter(block for death in self._deaths for block in death.whole)

    def _quarantined(self) -> dict[int, Quarantine]:
        """Return index position -> why, of every sequence that is not computed."""
        found = {
            position: Quarantine(block, FailureClass(failure), attempts=1)
            for rank in self.ranks
            for position, (block, failure) in (rank.failed_sequences | rank.attempt.unproved_failures).items()
        }
        for position in {position for death in self._deaths for position in death.alone}:
            deaths = self._lone_deaths(position)
            others = self._at_hand() - {death.rank for death in deaths}
            if len(deaths) >= _LONE_DEATHS and (not others or any(death.is_proved for death in deaths)):
                block = deaths[-1].alone[position]
                attempts = len(deaths) + sum(block in death.whole for death in self._deaths)
                found[position] = Quarantine(block, deaths[-1].failure, attempts)
        return found | self._known

    def _reopen_released(self) -> None:
        """Have the blocks of sequences computed after all that are quarantined no more."""
        before, self._excluded = self._excluded, self._quarantined()
        self._pool.reopen(before[position].block for position in before.keys() - self._excluded.keys())

    def _lone_deaths(self, position: int) -> list[Death]:
        return [death for death in self._deaths if position in death.alone]

    def _note_rows(self, rank: int) -> None:
        """Count the deaths of a rank that computes again: its device works."""
        record = self._records[rank]
        if record.fruitless and record.attempt.has_rows:
            record.fruitless = 0
            for death in self._deaths:
                death.is_proved |= death.rank == rank

    def _learn(self, rank: Rank) -> bool:
        self._note_rows(rank.rank)
        rank.is_running = False
        if rank.state == "complete":
            self._pool.close(rank.rank)
            own = [death for death in self._deaths if death.rank == rank.rank and not death.is_proved]
            unexplained = [death for death in own if self._is_unexplained(death)]
            # a process that was ended from outside is no evidence against the device
            if len(unexplained) > 1 or any(death.failure is FailureClass.DEVICE_ERROR for death in unexplained):
                rank.state, rank.failure = "failed", unexplained[-1].failure.value
                rank.reason = "it computed nothing after its last failure"
            return False
        if rank.state != "failed":
            return False
        failure = FailureClass(rank.failure or FailureClass.DIED)
        narrowed_down = self._count_death(rank, failure)
        rank.fruitless += not (narrowed_down and rank.fruitless) or bool(self._healthy())
        if failure is FailureClass.OOM_KILL:
            self._most_running = max(1, min(self._most_running, self._running + 1) - 1)
        starts_again = failure.is_worth_a_retry and rank.fruitless < self.limits.attempts and rank.attempts < MAX_STARTS
        if starts_again:
            self._pool.requeue(rank.rank)
        else:
            self._lose(rank.rank, failure)
        self._pool.reopen(block for block, _ in rank.attempt.revoked_failures.values())
        self._reopen_released()
        return starts_again

    def _count_death(self, rank: Rank, failure: FailureClass) -> bool:
        """Count a death against everything that was in flight; whether that narrowed a fault down."""
        if self._pool.is_done:
            return False  # it did not compute
        in_flight = rank.attempt.in_flight if failure.may_be_the_batch else {}
        whole = frozenset(block for block, position in in_flight.items() if position is None)
        alone = {position: block for block, position in in_flight.items() if position is not None}
        before, apart = self._quarantined().keys(), {block for death in self._deaths for block in death.alone.values()}
        self._deaths.append(Death(rank.rank, failure, whole, alone))
        suspects = self._suspects()
        is_first_alone = rank.sequences > 0 and not apart.issuperset(alone.values())
        is_narrower = is_first_alone or any(suspects[block] >= SINGLY for block in whole)
        return is_narrower or self._quarantined().keys() != before

    def _lose(self, rank: int, failure: FailureClass) -> None:
        """Drop unproved deaths of the lost rank, and free its blocks, unless the remaining ranks would fail alike."""
        if failure.concerns_all_ranks:
            self._pool.close(rank)
            return
        self._deaths = [death for death in self._deaths if death.rank != rank or death.is_proved]
        self._pool.lose(rank)
        if by := sorted(self._pool.live):
            log.warning("ranks.lost", lost=[rank], by=by)

    def _is_unexplained(self, death: Death) -> bool:
        """Whether neither a proved death nor a sequence that two ranks died on explains *death*."""
        if any(other.is_proved and other.blocks & death.blocks for other in self._deaths):
            return False
        deaths = [self._lone_deaths(position) for position in self._quarantined()]
        return not any(
            len({other.rank for other in on_it}) > 1 and any(other.blocks & death.blocks for other in on_it)
            for on_it in deaths
        )
