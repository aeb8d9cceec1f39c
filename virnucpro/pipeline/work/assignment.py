"""The blocks assigned to a process, and how it asks its parent for more: a few a request, before they are needed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from virnucpro.telemetry.ranks import done_messages, runs_of, whole_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from threading import Event

    from virnucpro.pipeline.work.worker_process import ReportPipe

SINGLY, NEVER_WHOLE = 2, 3
"""Deaths of a block from which on its sequences are computed one by one, and from which on it is not computed whole."""
POSITIONS_IN_A_MESSAGE = 300
"""Index positions in one message: at up to 12 characters each, they fit 4096 bytes."""
ANSWER_POLL_S = 0.2
"""Seconds between looks at the stop event while an answer is awaited."""


@dataclass(frozen=True, kw_only=True)
class AssignedUnit:
    """Blocks that a process is given at once, and what is known of failures in them."""

    blocks: Sequence[int] = ()
    """Ascending."""
    is_fresh: bool = False
    """Whether their files were looked for before; otherwise some may be durable."""
    to_check: bool = False
    """Whether to look for their files only: unfinished blocks are assigned afterwards."""
    is_end: bool = False
    """Whether everything is done."""
    suspects: Mapping[int, int] = field(default_factory=dict)
    """Block -> deaths of processes that computed it."""
    lone_suspects: frozenset[int] = frozenset()
    """Index positions of sequences that ended a process alone."""
    quarantined: frozenset[int] = frozenset()
    """Of the sequences of these blocks that are not computed; what was quarantined before may be open again."""

    def computes_singly(self, block: int) -> bool:
        """Whether the sequences of *block* are computed one by one first."""
        return self.suspects.get(block, 0) >= SINGLY

    def may_be_whole(self, block: int) -> bool:
        """Whether *block* is computed whole after its sequences."""
        return self.suspects.get(block, 0) < NEVER_WHOLE

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages that assign it to a process, each short enough for the pipe."""
        if self.is_end:
            return [{"answer": "end"}]
        quarantined, most = sorted(self.quarantined), POSITIONS_IN_A_MESSAGE
        answer: dict[str, Any] = {
            "answer": "check" if self.to_check else "compute",
            "runs": list(runs_of(list(self.blocks))),
        }
        if self.suspects:
            answer["suspects"] = [list(item) for item in self.suspects.items()]
            answer["lone_suspects"] = sorted(self.lone_suspects)[:most]
        return [*({"quarantined": quarantined[at : at + most]} for at in range(0, len(quarantined), most)), answer]


@dataclass(frozen=True, kw_only=True)
class Assignment:
    first: AssignedUnit
    """Its blocks; where blocks are assigned, those whose files it checks first."""
    asks_parent: bool = False
    """Whether it asks its parent for the blocks that it computes."""
    is_on_cluster: bool = False
    """Whether the run's driver is another process than its parent: then it holds no lock, and seals no shard."""
    run_id: str = ""
    """Of the run, for the log."""
    attempt: int = 1
    task: str = ""
    """The orchestrator's name of what started it, for the log."""
    after_failure: bool = False
    """Whether a process failed before: then each block is made durable at once."""


class AssignedBlocks:
    """The blocks of one process, and how it asks for more; *on_wait* is called repeatedly while there are none."""

    def __init__(
        self, assignment: Assignment, reports: ReportPipe, stop: Event, on_wait: Callable[[], None] = lambda: None
    ) -> None:
        self._first: AssignedUnit | None = assignment.first
        self._asks_parent = assignment.asks_parent
        self._reports = reports
        self._stop = stop
        self._on_wait = on_wait
        self._has_asked, self._is_over = False, not assignment.asks_parent
        self._own: set[int] = set() if assignment.asks_parent else set(assignment.first.blocks)

    def wait(self) -> AssignedUnit | None:
        """Return blocks as soon as there are some, or None once everything is done; the caller has nothing left."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        if self._has_asked and (unit := self._answer()) is not None:
            return unit
        while not self._is_over and not self._stop.is_set():
            self._ask(idle=True)
            if (unit := self._answer()) is not None:
                return unit
        return None

    def iter_now(self) -> Iterator[AssignedUnit]:
        """Yield blocks while the parent has some at once; the next are requested before these are computed."""
        while not self._is_over:
            self._ask(idle=False)
            if (unit := self._answer()) is None:
                return
            yield unit

    def all_done(self) -> bool:
        """Whether the parent has nothing left to assign."""
        return self._is_over

    def mark_durable(self, blocks: Iterable[int]) -> None:
        """Mark blocks as durable, or as having nothing to compute."""
        if self._asks_parent:
            done = list(blocks)
            self._own.update(done)
            for message in done_messages(done):
                self._reports.put(message)

    def own_blocks(self) -> Sequence[int]:
        """Return the blocks that this process has marked, or that it got at its start."""
        return sorted(self._own)

    def _ask(self, *, idle: bool) -> None:
        if not self._has_asked:
            self._has_asked = True
            self._reports.put({"kind": "wants", "idle": idle})

    def _answer(self) -> AssignedUnit | None:
        """Return the parent's answer to the open request; None for nothing."""
        quarantined: set[int] = set()
        while (answer := self._received()) is not None:
            quarantined.update(answer.get("quarantined", ()))
            if "answer" in answer:
                self._has_asked = False
                return self._unit(answer, frozenset(quarantined))
        return None

    def _received(self) -> dict[str, Any] | None:
        while not self._stop.is_set():
            if (answer := self._reports.receive(ANSWER_POLL_S)) is not None:
                return answer
            self._on_wait()
        return None

    def _unit(self, answer: dict[str, Any], quarantined: frozenset[int]) -> AssignedUnit | None:
        kind = answer["answer"]
        if kind in {"nothing", "end"}:
            self._is_over = kind == "end"
            return None
        suspects = {int(block): int(deaths) for block, deaths in answer.get("suspects", ())}
        if kind == "compute" and not suspects:
            self._ask(idle=False)
        return AssignedUnit(
            blocks=whole_blocks(answer).tolist(),
            is_fresh=kind == "compute",
            to_check=kind == "check",
            suspects=suspects,
            lone_suspects=frozenset(answer.get("lone_suspects", ())),
            quarantined=quarantined,
        )
