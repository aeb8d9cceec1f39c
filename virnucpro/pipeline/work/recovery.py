"""
What a run does about failures while it computes: the parent's one list of suspects, and who gets which block.

A worker announces what it is about to compute. When its process dies or hangs, the parent knows what was in flight and
narrows it down, one step for each death:

1. the blocks in flight are computed again, each whole and on its own, after everything that is not suspect;
2. a block that was in flight again is computed sequence by sequence, and whole only once each of them has succeeded;
3. a sequence that was in flight alone twice is quarantined: it gets no row but a line in ``failed_sequences.tsv``;
   a block that fails only as a whole keeps the rows of its sequences computed one by one.

A poisoned sequence thus costs at most four more starts of a process, whatever the size of its block. What is learned
holds for this start of the run: the next one tries everything again.

Blocks are handed out (``block_pool``): those of a rank that is lost for good go to the others at once, and a process
ends only when every block of the run is done, so that there is always one to take them. A device that does nothing but
fail proves nothing: its evidence against sequences is dropped, and they go to the others as well.

Everything here is numbers of ranks, blocks and positions: no index, plan or model, and no framework.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from virnucpro.pipeline.failures import FailureClass, OomKills
from virnucpro.pipeline.work.block_pool import SINGLY, Assignment, BlockPool
from virnucpro.settings import MAX_STARTS
from virnucpro.telemetry.ranks import claimed_messages, runs_of, whole_blocks
from virnucpro.telemetry.snapshot import ProcessEnd

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from virnucpro.config import RunLimits
    from virnucpro.pipeline.work.block_pool import Grant
    from virnucpro.telemetry.ranks import Rank

log = structlog.get_logger(__name__)

_LONE_DEATHS = 2
"""Deaths of a sequence alone after which it is quarantined."""
_POSITIONS_IN_A_MESSAGE = 300
"""Index positions in one message: at up to 12 characters each, they fit 4096 bytes."""


@dataclass(frozen=True)
class Quarantine:
    """Why a sequence is not computed any more."""

    block: int
    failure: FailureClass
    attempts: int


@dataclass
class Evidence:
    """Deaths of processes that count against blocks and sequences."""

    blocks: Counter[int] = field(default_factory=Counter)
    """Block -> deaths while it was in flight."""
    lone: Counter[int] = field(default_factory=Counter)
    """Index position -> deaths while it was computed alone."""
    quarantined: dict[int, Quarantine] = field(default_factory=dict)
    """By index position."""

    def add(self, other: Evidence) -> None:
        self.blocks += other.blocks
        self.lone += other.lone
        self.quarantined |= other.quarantined

    def remove(self, other: Evidence) -> None:
        self.blocks -= other.blocks
        self.lone -= other.lone
        for position in other.quarantined:
            self.quarantined.pop(position, None)


@dataclass
class Standing:
    """What the run makes of a rank, by the evidence that it brings."""

    record: Rank
    unproved: Evidence = field(default_factory=Evidence)
    """Of its processes since the last one that computed something."""
    fruitless: int = 0
    """Failed processes since the last one that computed something, that one included."""
    has_proved: bool = False
    """Whether an ended process of it computed something."""
    was_doubted: bool = False
    """Whether its evidence was dropped for having proved nothing."""

    @property
    def is_proven(self) -> bool:
        return self.has_proved or self.record.attempt.has_rows

    @property
    def is_doubtful(self) -> bool:
        return bool(self.unproved.quarantined) and not self.is_proven

    @property
    def is_trusted(self) -> bool:
        return self.is_proven or not (self.was_doubted or self.is_doubtful)


class RankObserver(Protocol):
    """Follows ranks; called from their threads, with messages that were applied to the rank's record before."""

    def assigned(self, rank: int, blocks: Sequence[int], /) -> None:
        """Take in what the next process of *rank* begins with."""

    def on_message(self, rank: int, message: dict[str, Any], /) -> None:
        """Take in a message of a worker."""

    def ended(self, rank: int, end: ProcessEnd, /) -> None:
        """Take in how a process of *rank* ended."""


class _Unobserved:
    assigned = on_message = ended = staticmethod(lambda *_: None)


class Recovery:
    """
    Decides what each process computes, and whether a rank is tried again; safe from any thread.

    Args:
        ranks: The records of the ranks that run here.
        num_blocks: Of the plan.
        limits: How many fruitless processes in a row a rank may have.
        oom_kills: The kernel's count; by default that of our own control group.
        pool: Hands out the blocks; by default all of the plan, each rank's stride first.
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
    ) -> None:
        self.ranks = ranks
        self.limits = limits
        self.oom_kills = OomKills() if oom_kills is None else oom_kills
        self._observer = _Unobserved() if observer is None else observer
        self._run_id = run_id
        self._pool = BlockPool(num_blocks, ranks) if pool is None else pool
        self._standings = {rank.rank: Standing(rank) for rank in ranks}
        self._evidence = Evidence()
        self._block_of: dict[int, int] = {}
        """Of every position that was ever computed alone when its process ended."""
        self._changed = threading.Condition()
        self._running = 0
        self._most_running = len(ranks)

    def worker_args(self, rank: int, args: tuple[Any, ...], *, task: str = "") -> tuple[Any, ...]:
        """Return the arguments of the process that *rank* has its turn for: *args* and its assignment."""
        with self._changed:
            standing, blocks = self._standings[rank], self._pool.begin(rank)
            self._observer.assigned(rank, blocks)
            assignment = Assignment(
                blocks=blocks,
                is_handed_out=True,
                is_on_cluster=self._pool.is_on_cluster,
                suspects=self._suspects(),
                lone_suspects=frozenset(self._evidence.lone),
                quarantined=frozenset(self._quarantined()),
                run_id=self._run_id,
                attempt=standing.record.attempts + 1,
                task=task,
                after_failure=standing.fruitless > 0,
            )
            return (*args, assignment)

    @contextmanager
    def turn(self, rank: int, stop: threading.Event) -> Iterator[None]:
        """Wait until *rank* may start a process (fewer run at a time once memory ran out), and note that it does."""
        with self._changed:
            while self._running >= self._most_running and not stop.is_set():
                self._pool.waiting.add(rank)
                self._changed.wait(0.2)
            self._pool.waiting.discard(rank)
            self._running += 1
        try:
            yield
        except BaseException:
            with self._changed:
                self._pool.lose(rank)
            raise
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def on_message(self, rank: int, message: dict[str, Any]) -> None:
        """Update the blocks from a message that was applied to its rank before, and hand it on."""
        with self._changed:
            if message.get("kind") == "done":
                self._pool.done(rank, whole_blocks(message).tolist())
                self._changed.notify_all()
            elif message.get("kind") == "resumed":
                self._pool.checked(rank)
        self._observer.on_message(rank, message)

    def next_blocks(self, rank: int) -> list[dict[str, Any]]:
        """Return the answer to the process of *rank*, which has asked for blocks; none while it has to wait."""
        with self._changed:
            idle = self._standings[rank].record.attempt.wants == "idle"
            grant = self._grant(rank, idle=idle)
            if grant is None:
                return [] if idle else [{"answer": "nothing"}]
            return self._answer(rank, grant)

    def another_attempt(self, rank: Rank) -> bool:
        """Learn from a process that has ended; whether another one is to be started for its rank."""
        with self._changed:
            starts_again = self._learn(rank)
            quarantined = {position: why.failure.value for position, why in self._quarantined().items()}
        end = ProcessEnd(
            state=rank.state,
            failure=rank.failure or "",
            reason=rank.reason or "",
            exit_code=rank.exit_code,
            starts_again=starts_again,
            quarantined=quarantined,
        )
        self._observer.ended(rank.rank, end)
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

    # --- handing out; the lock is held ---

    def _grant(self, rank: int, *, idle: bool) -> Grant | None:
        standings = self._standings
        suspects = self._suspects()
        by_deaths = sorted(suspects, key=suspects.__getitem__)
        is_trusted = standings[rank].is_trusted
        others_trusted = any(standings[other].is_trusted for other in self._pool.live - {rank})
        next_grant = partial(self._pool.next_for, rank, by_deaths, idle=idle, may_take=is_trusted or not others_trusted)
        grant = next_grant()
        if idle and is_trusted and (grant is None or grant.is_end) and self._drop_doubtful_evidence(rank):
            grant = next_grant()
        return grant

    def _drop_doubtful_evidence(self, rank: int) -> bool:
        """Free what ranks other than *rank* have quarantined without ever computing anything; whether there was any."""
        blocks: set[int] = set()
        for other, standing in self._standings.items():
            if other != rank and standing.is_doubtful and self._pool.is_idle(other):
                blocks.update(item.block for item in standing.unproved.quarantined.values())
                self._evidence.remove(standing.unproved)
                standing.unproved = Evidence()
                standing.was_doubted = True
        self._pool.reopen(blocks)
        return bool(blocks)

    def _answer(self, rank: int, grant: Grant) -> list[dict[str, Any]]:
        if grant.is_end:
            return [{"answer": "end"}]
        blocks = set(grant.blocks)
        for message in () if grant.to_check else claimed_messages(blocks):
            self._observer.on_message(rank, message)
        quarantined = sorted(position for position, why in self._quarantined().items() if why.block in blocks)
        answers: list[dict[str, Any]] = [
            {"quarantined": quarantined[at : at + _POSITIONS_IN_A_MESSAGE]}
            for at in range(0, len(quarantined), _POSITIONS_IN_A_MESSAGE)
        ]
        answer: dict[str, Any] = {
            "answer": "check" if grant.to_check else "compute",
            "runs": list(runs_of(list(grant.blocks))),
        }
        if grant.is_suspect:
            answer["suspects"] = [[block, self._suspects()[block]] for block in grant.blocks]
            lone = [position for position in self._evidence.lone if self._block_of[position] in blocks]
            answer["lone_suspects"] = lone[:_POSITIONS_IN_A_MESSAGE]
        return [*answers, answer]

    # --- what deaths tell; the lock is held ---

    def _suspects(self) -> dict[int, int]:
        """Return block -> deaths; 1 where only a sequence of it was in flight, alone."""
        return {self._block_of[position]: 1 for position in self._evidence.lone} | dict(self._evidence.blocks)

    def _quarantined(self) -> dict[int, Quarantine]:
        """Return index position -> why, of every sequence that is not computed."""
        failed = {
            position: Quarantine(block, FailureClass(failure), attempts=1)
            for rank in self.ranks
            for position, (block, failure) in (rank.failed_sequences | rank.attempt.unproved_failures).items()
        }
        return failed | self._evidence.quarantined

    def _learn(self, rank: Rank) -> bool:
        standing = self._standings[rank.rank]
        if rank.attempt.has_rows:  # the device computes, so its evidence counts
            standing.has_proved, standing.unproved = True, Evidence()
        if rank.state == "complete":
            self._pool.close(rank.rank)
        if rank.state != "failed":
            return False
        failure = FailureClass(rank.failure or FailureClass.DIED)
        found = self._evidence_of_death(rank, failure) if failure.may_be_the_batch else Evidence()
        narrowed_down = bool(found.quarantined) or any(self._evidence.blocks[block] >= SINGLY for block in found.blocks)
        if rank.attempt.has_rows:
            standing.fruitless = 1
        else:
            standing.unproved.add(found)
            standing.fruitless += not narrowed_down
        if failure is FailureClass.OOM_KILL:
            self._most_running = max(1, min(self._most_running, self._running + 1) - 1)
        starts_again = (
            failure.is_worth_a_retry and standing.fruitless < self.limits.attempts and rank.attempts < MAX_STARTS
        )
        if starts_again:
            self._pool.take_back(rank.rank)
        else:
            self._lose(standing, failure)
        self._pool.reopen(block for block, _ in rank.attempt.revoked_failures.values())
        return starts_again

    def _lose(self, standing: Standing, failure: FailureClass) -> None:
        """Drop what the lost rank could not prove, and free its blocks, unless the others would fail as it did."""
        rank = standing.record.rank
        self._evidence.remove(standing.unproved)
        if failure.concerns_all_ranks:
            self._pool.close(rank)
            return
        self._pool.lose(rank)
        self._pool.reopen(item.block for item in standing.unproved.quarantined.values())
        standing.unproved = Evidence()
        if by := sorted(self._pool.live):
            log.warning("ranks.lost", lost=[rank], by=by)

    def _evidence_of_death(self, rank: Rank, failure: FailureClass) -> Evidence:
        """Count a death against everything that was in flight; return what was added."""
        found = Evidence()
        for block, position in rank.attempt.in_flight.items():
            if position is None:
                found.blocks[block] += 1
            else:
                self._block_of[position] = block
                found.lone[position] += 1
                deaths = self._evidence.lone[position] + 1
                if deaths >= _LONE_DEATHS:
                    found.quarantined[position] = Quarantine(block, failure, self._evidence.blocks[block] + deaths)
        self._evidence.add(found)
        return found
