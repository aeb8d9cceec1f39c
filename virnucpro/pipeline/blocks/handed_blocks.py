"""
The blocks of a worker whose parent hands them out: each request gets a few, asked for before they are needed.

A worker that was given its blocks once has them in ``FixedBlocks``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from virnucpro.telemetry.ranks import done_messages, whole_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from threading import Event

    from virnucpro.pipeline.work.block_pool import Assignment
    from virnucpro.pipeline.work.worker_process import ReportPipe

ANSWER_POLL_S = 0.2
"""Seconds between looks at the stop event while an answer is awaited."""


@dataclass(frozen=True)
class HandedUnit:
    """Some blocks, and what is known of failures in them."""

    blocks: Sequence[int]
    """Ascending."""
    is_fresh: bool
    """Whether their files were looked for before; otherwise some may be durable."""
    to_check: bool = False
    """Whether to look for their files only: what is not done is handed out afterwards."""
    suspects: tuple[tuple[int, int], ...] = ()
    """Block and the deaths of processes that computed it."""
    lone_suspects: frozenset[int] = frozenset()
    quarantined: frozenset[int] = frozenset()
    """Of the sequences of these blocks; what was quarantined before may be open again."""


class HandedBlocks:
    """
    What one process is given, and how it asks for more.

    Args:
        assignment: Names the blocks whose files are looked for first.
        on_wait: Called again and again while there is nothing to do.
    """

    def __init__(
        self, assignment: Assignment, reports: ReportPipe, stop: Event, on_wait: Callable[[], None] = lambda: None
    ) -> None:
        self._first: Assignment | None = assignment
        self._reports = reports
        self._stop = stop
        self._on_wait = on_wait
        self._has_asked = self._is_over = False
        self._own: set[int] = set()

    def wait(self, _stop: Event, _on_wait: Callable[[], None] = lambda: None) -> HandedUnit | None:
        """Return blocks as soon as there are some, or None once everything is done; the caller has nothing left."""
        if self._first is not None:
            own, self._first = self._first, None
            return HandedUnit(own.blocks, is_fresh=False, to_check=True, quarantined=own.quarantined)
        if self._has_asked and (unit := self._answer()) is not None:
            return unit
        while not self._is_over and not self._stop.is_set():
            self._ask(idle=True)
            if (unit := self._answer()) is not None:
                return unit
        return None

    def iter_now(self) -> Iterator[HandedUnit]:
        """Yield blocks as long as the parent has some at once; the next are asked for before these are computed."""
        while not self._is_over:
            self._ask(idle=False)
            if (unit := self._answer()) is None:
                return
            yield unit

    def all_done(self) -> bool:
        """Whether the parent has nothing left to hand out."""
        return self._is_over

    def mark_durable(self, blocks: Iterable[int]) -> None:
        """Mark blocks as durable, or as having nothing to compute."""
        done = list(blocks)
        self._own.update(done)
        for message in done_messages(done):
            self._reports.put(message)

    def own_blocks(self) -> Sequence[int]:
        """Return the blocks that this process has marked."""
        return sorted(self._own)

    def _ask(self, *, idle: bool) -> None:
        if not self._has_asked:
            self._has_asked = True
            self._reports.put({"kind": "wants", "idle": idle})

    def _answer(self) -> HandedUnit | None:
        """Return what the parent gives for the request that is open; None for nothing."""
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

    def _unit(self, answer: dict[str, Any], quarantined: frozenset[int]) -> HandedUnit | None:
        kind = answer["answer"]
        if kind in {"nothing", "end"}:
            self._is_over = kind == "end"
            return None
        suspects = tuple((int(block), int(deaths)) for block, deaths in answer.get("suspects", ()))
        if kind == "compute" and not suspects:
            self._ask(idle=False)
        return HandedUnit(
            whole_blocks(answer).tolist(),
            is_fresh=kind == "compute",
            to_check=kind == "check",
            suspects=suspects,
            lone_suspects=frozenset(answer.get("lone_suspects", ())),
            quarantined=quarantined,
        )


class FixedBlocks:
    """The blocks of a worker whose parent hands out none."""

    def __init__(self, blocks: Sequence[int]) -> None:
        self._blocks = blocks
        self._is_given = False

    def wait(self, _stop: Event, _on_wait: Callable[[], None] = lambda: None) -> HandedUnit | None:
        """Return the blocks on the first call."""
        if self._is_given:
            return None
        self._is_given = True
        return HandedUnit(self._blocks, is_fresh=False)

    def iter_now(self) -> Iterator[HandedUnit]:
        return iter(())

    def all_done(self) -> bool:
        return True

    def mark_durable(self, blocks: Iterable[int]) -> None:
        pass

    def own_blocks(self) -> Sequence[int]:
        return self._blocks
