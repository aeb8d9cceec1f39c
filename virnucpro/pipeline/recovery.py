"""
What a run does about failures while it goes on: the parent's book of suspects, and whose work goes to whom.

A worker says what it is about to compute before it does. When its process dies or hangs, the parent knows what was in
flight and narrows it down, one step for each death:

1. the blocks in flight are computed again, each whole and on its own, after everything that is not suspected;
2. a block that was in flight again is computed sequence by sequence, and whole only once each of them has succeeded;
3. a sequence that was in flight alone twice is quarantined: it gets no row but a line in ``failed_sequences.tsv``;
   a block that fails only as a whole keeps the rows of its sequences computed apart.

A poisoned sequence thus costs four more starts of a process at the most, whatever the size of its block. What is
learned holds for this start of the run: the next one tries everything again.

The work of a rank that is lost for good goes to those that have finished theirs. A device that does nothing but fail
proves nothing: what was blamed on sequences there is forgotten, and they go to the others as well.

Everything here is numbers of ranks, blocks and positions: no index, plan or model, and no framework.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from virnucpro.pipeline.failures import FailureClass, OomKills
from virnucpro.settings import MAX_STARTS
from virnucpro.telemetry.embedding_facts import ProcessEnd

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from virnucpro.config import RunLimits
    from virnucpro.pipeline.unit_claims import UnitSource
    from virnucpro.telemetry.ranks import Rank

_APART, _NEVER_WHOLE = 2, 3
"""Deaths of a block from which on its sequences are computed apart, and from which on it is not computed whole."""
_LONE_DEATHS = 2
"""Deaths of a sequence alone after which it is quarantined."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What one process is asked to do."""

    blocks: Sequence[int] = ()
    """Its blocks, where they are known."""
    units: UnitSource | None = None
    """Where it claims its blocks, where other hosts share the work."""
    suspects: dict[int, int] = field(default_factory=dict)
    """Block -> times that a process ended while it was computed. Other ranks' blocks may be among them."""
    lone_suspects: frozenset[int] = frozenset()
    """Index positions of sequences that ended a process alone."""
    quarantined: frozenset[int] = frozenset()
    """Index positions of sequences that are not computed."""
    run_id: str = ""
    """Of the run, for the log."""
    attempt: int = 1
    """Which process of the rank this is, for the log."""
    task: str = ""
    """The orchestrator's name of what started it, for the log."""
    after_failure: bool = False
    """Whether a process failed before: then blocks are computed one at a time, and each is made durable at once."""

    def is_apart(self, block: int) -> bool:
        """Whether the sequences of *block* are computed one by one first."""
        return self.suspects.get(block, 0) >= _APART

    def may_be_whole(self, block: int) -> bool:
        """Whether *block* is computed whole after its sequences."""
        return self.suspects.get(block, 0) < _NEVER_WHOLE


@dataclass(frozen=True)
class _Excuse:
    """Why a sequence is not computed any more."""

    block: int
    failure: FailureClass
    attempts: int


@dataclass
class _Blame:
    """What a rank has brought up against blocks and sequences."""

    blocks: Counter[int] = field(default_factory=Counter)
    """Block -> deaths while it was in flight."""
    lone: Counter[int] = field(default_factory=Counter)
    """Index position -> deaths while it was computed alone."""
    quarantined: dict[int, _Excuse] = field(default_factory=dict)
    """By index position."""

    def add(self, other: _Blame) -> None:
        self.blocks += other.blocks
        self.lone += other.lone
        self.quarantined |= other.quarantined

    def remove(self, other: _Blame) -> None:
        self.blocks -= other.blocks
        self.lone -= other.lone
        for position in other.quarantined:
            self.quarantined.pop(position, None)


@dataclass
class _Rank:
    """What is known of one rank's work in this wave."""

    record: Rank
    blocks: Sequence[int]
    unproved: _Blame = field(default_factory=_Blame)
    """Of its processes since the last one that got something done."""
    fruitless: int = 0
    """Failed processes since the last one that got something done, that one included."""
    starts: int = 0


class RankObserver(Protocol):
    """Something that is told how ranks go on; called from the threads of the ranks."""

    def assigned(self, rank: int, blocks: Sequence[int] | None) -> None:
        """Take in what the next process of *rank* is asked to do; None where it claims its blocks as it goes."""
        ...

    def on_message(self, rank: int, message: dict[str, Any]) -> None:
        """Take in what a worker said."""
        ...

    def ended(self, rank: int, end: ProcessEnd) -> None:
        """Take in how a process of *rank* ended."""
        ...


class Recovery:
    """
    Decides what each process computes, whether a rank is tried again, and who takes over; safe from any thread.

    Args:
        ranks: The records of the ranks that run here.
        num_blocks: Of the plan.
        limits: How many fruitless processes in a row a rank may have.
        oom_kills: The kernel's count; by default that of our own control group.
        run_id: Handed on to the workers.
        observer: Is told what processes are asked to do, what they say and how they end.
        units: Where processes claim their blocks; then ranks have none of their own, and nobody takes over here.
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
        units: UnitSource | None = None,
    ) -> None:
        self.limits = limits
        self._observer = observer
        self.oom_kills = OomKills() if oom_kills is None else oom_kills
        self._run_id = run_id
        self.ranks = ranks
        self._world_size = world_size = len(ranks)
        self._units = units
        num_shared_out = 0 if units is not None else num_blocks
        self._ranks = {rank.rank: _Rank(rank, range(rank.rank, num_shared_out, world_size)) for rank in ranks}
        self._taken_over: dict[int, int] = {}
        self._blame = _Blame()
        self._block_of: dict[int, int] = {}
        """Of every position that was ever computed alone when its process ended."""
        self._proven: set[int] = set()
        """Ranks whose devices have computed something."""
        self._doubted: set[int] = set()
        """Ranks that have only ever quarantined sequences."""
        self._changed = threading.Condition()
        self._running = 0
        self._most_running = world_size

    def worker_args(self, rank: int, args: tuple[Any, ...], *, task: str = "") -> tuple[Any, ...]:
        """Return the arguments of the process that *rank* has its turn for: *args* and its assignment."""
        with self._changed:
            state = self._ranks[rank]
            if self._observer is not None:
                self._observer.assigned(rank, state.blocks if self._units is None else None)
            of_lone_suspects = {self._block_of[position]: 1 for position in self._blame.lone}
            return (
                *args,
                Assignment(
                    blocks=state.blocks,
                    units=self._units,
                    suspects=of_lone_suspects | dict(self._blame.blocks),
                    lone_suspects=frozenset(self._blame.lone),
                    quarantined=frozenset(self._quarantined()),
                    run_id=self._run_id,
                    attempt=state.record.attempts + 1,
                    task=task,
                    after_failure=state.fruitless > 0,
                ),
            )

    @contextmanager
    def turn(self, rank: int, stop: threading.Event) -> Iterator[None]:
        """Wait until *rank* may start a process (fewer run at a time once memory ran out), and note that it does."""
        with self._changed:
            while self._running >= self._most_running and not stop.is_set():
                self._changed.wait(0.2)
            self._running += 1
            self._ranks[rank].starts += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def on_message(self, rank: int, message: dict[str, Any]) -> None:
        """Hand a message on, which was applied to its rank before."""
        if self._observer is not None:
            self._observer.on_message(rank, message)

    def another_attempt(self, outcome: Rank) -> bool:
        """Learn from a process that has ended; whether another one is to be started for its rank."""
        starts_again = self._learn(outcome)
        if self._observer is not None:
            with self._changed:
                quarantined = {position: failure.value for position, (failure, _) in self._quarantined().items()}
            end = ProcessEnd(
                state=outcome.state,
                failure=outcome.failure or "",
                reason=outcome.reason or "",
                exit_code=outcome.exit_code,
                starts_again=starts_again,
                quarantined=quarantined,
            )
            self._observer.ended(outcome.rank, end)
        return starts_again

    def _learn(self, outcome: Rank) -> bool:
        if outcome.state != "failed":
            with self._changed:
                if outcome.attempt.has_rows:
                    self._prove(outcome.rank)
            return False
        failure = FailureClass(outcome.failure or FailureClass.DIED)
        with self._changed:
            state = self._ranks[outcome.rank]
            blame = self._blame_for_death(state, failure) if failure.may_be_the_batch else _Blame()
            narrowed_down = bool(blame.quarantined) or any(
                self._blame.blocks[block] >= _APART for block in blame.blocks
            )
            if outcome.attempt.has_rows:
                self._prove(outcome.rank)
                state.fruitless = 1
            else:
                state.unproved.add(blame)
                state.fruitless += not narrowed_down
            if failure is FailureClass.OOM_KILL:
                self._most_running = max(1, min(self._most_running, self._running + 1) - 1)
            if failure.is_worth_a_retry and state.fruitless < self.limits.attempts and state.starts < MAX_STARTS:
                return True
            self._blame.remove(state.unproved)
            return False

    def _prove(self, rank: int) -> None:
        """Note that the rank's device computes, so that what it blames is to blame."""
        self._proven.add(rank)
        self._ranks[rank].unproved = _Blame()

    def _blame_for_death(self, state: _Rank, failure: FailureClass) -> _Blame:
        """Count a death against everything that was in flight; return what was added to the blame."""
        blame = _Blame()
        for block, position in state.record.attempt.in_flight.items():
            if position is None:
                blame.blocks[block] += 1
            else:
                self._block_of[position] = block
                blame.lone[position] += 1
                deaths = self._blame.lone[position] + 1
                if deaths >= _LONE_DEATHS:
                    blame.quarantined[position] = _Excuse(block, failure, self._blame.blocks[block] + deaths)
        self._blame.add(blame)
        return blame

    def take_over(self, outcomes: Sequence[Rank]) -> list[int]:
        """
        Give the blocks of the ranks that were lost in the last wave to those that finished.

        Args:
            outcomes: Of every rank, none of which runs.

        Returns:
            The ranks that have work again; none when nothing was lost, nobody is left, or it would be of no use.
        """
        with self._changed:
            lost = {outcome.rank for outcome in outcomes if outcome.state != "complete"}
            survivors = [outcome.rank for outcome in outcomes if outcome.state == "complete"]
            blocks = {block for rank in lost for block in self._ranks[rank].blocks}
            doubtful = [
                rank for rank in survivors if self._ranks[rank].unproved.quarantined and rank not in self._proven
            ]
            self._doubted.update(doubtful)
            takers = [rank for rank in survivors if rank in self._proven] or [
                rank for rank in survivors if rank not in self._doubted
            ]
            for rank in doubtful if takers else ():
                unproved = self._ranks[rank].unproved
                blocks.update(excuse.block for excuse in unproved.quarantined.values())
                self._blame.remove(unproved)
                unproved.quarantined.clear()
            takers = takers or survivors
            classes = {FailureClass(outcome.failure) for outcome in outcomes if outcome.failure is not None}
            for state in self._ranks.values():
                state.blocks, state.fruitless, state.starts = (), 0, 0
            if not takers or any(failure.concerns_all_ranks for failure in classes):
                return []
            for number, rank in enumerate(takers):
                self._ranks[rank].blocks = sorted(blocks)[number :: len(takers)]
                self._taken_over.update(dict.fromkeys(self._ranks[rank].blocks, rank))
            return [rank for rank in takers if self._ranks[rank].blocks]

    def _quarantined(self) -> dict[int, tuple[FailureClass, int]]:
        """Return index position -> failure class and processes that tried, of sequences that are not computed."""
        failed = {
            position: (FailureClass(failure), 1)
            for rank in self.ranks
            for position, (_, failure) in (rank.failed_sequences | rank.attempt.unproved_failures).items()
        }
        return failed | {p: (item.failure, item.attempts) for p, item in self._blame.quarantined.items()}

    def quarantined(self) -> dict[int, tuple[str, int]]:
        """Return index position -> (failure class, processes that tried), of the sequences that are not computed."""
        with self._changed:
            return {position: (failure.value, tries) for position, (failure, tries) in self._quarantined().items()}

    def why_missing(self, position: int, block: int, outcomes: Sequence[Rank]) -> tuple[str, int]:
        """Return the reason why a sequence has no row, and how many processes tried."""
        with self._changed:
            if (found := self._quarantined().get(position)) is not None:
                return found[0].value, found[1]
            outcome = outcomes[self._taken_over.get(block, block % self._world_size)]
            return outcome.failure or "unknown", outcome.attempts
