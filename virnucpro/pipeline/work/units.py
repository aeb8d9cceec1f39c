"""
Units: the blocks of a run that tasks of a cluster compute one by one, and the driver's record of them.

The book knows blocks, not engines. A unit that comes back unfinished, or is lost with its host, is assigned again:
what was durable by then is found on disk by the worker that computes it next.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from virnucpro.pipeline.failures import FailureClass

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virnucpro.arrays import IntArray
    from virnucpro.telemetry.ranks import Rank

UNITS_OF_A_SHARE = 8
"""A unit is this part of a device's share of the remaining work."""
MOST_UNITS_OF_A_SHARE = 128
"""Except for the last, no unit is smaller than this part of a device's share of all work."""
MOST_LOSSES = 12
"""Times that a unit may be lost with its worker. From the second time on it is halved, so that a sequence that takes
down whole hosts costs its block, and nodes that live for a minute get units that fit."""

Why = tuple[str, int]
"""Failure class, and the processes that tried."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Blocks that are computed together, and what is known of failures in them; small and picklable."""

    blocks: Sequence[int]
    """Ascending."""
    suspects: dict[int, int] = field(default_factory=dict)
    """Block -> deaths of processes that computed it."""
    quarantined: dict[int, tuple[int, Why]] = field(default_factory=dict)
    """Index position -> block and reason, of sequences that are not computed."""
    losses: int = 0
    """Times that it came back unfinished."""


@dataclass(frozen=True, kw_only=True)
class UnitRecord:
    """How a unit went; small and picklable."""

    rank: Rank
    """The worker, over all its units so far."""
    rows: int
    """Rows computed for this unit; copies and those that were durable before not counted."""
    tokens: int
    seconds: float
    left: Sequence[int] = ()
    """Blocks that could not be computed here."""
    suspects: dict[int, int] = field(default_factory=dict)
    """Of those."""
    quarantined: dict[int, tuple[int, Why]] = field(default_factory=dict)
    """Sequences of the unit that are not computed any more."""
    is_lost: bool = False
    """The worker has used up its attempts, or its host is refused: it computes nothing more."""
    is_proved: bool = True
    """Whether the worker has computed anything, also since it failed on what is quarantined."""
    error: Exception | None = None
    """Why the host is refused."""


class UnitBook:
    """The blocks of a run that are to be computed; for one thread. *tokens*: int64, of each block of the plan."""

    def __init__(self, blocks: Sequence[int], tokens: IntArray) -> None:
        self._blocks, self._through = np.empty(0, np.int64), np.empty(0, np.int64)
        self.add(blocks, tokens)
        self._begun = 0
        """Blocks that were cut into units."""
        self._again: deque[Unit] = deque()
        self._out = 0
        self._quarantined: dict[int, Why] = {}
        """Index position -> reason."""
        self.given_up: dict[int, Why] = {}
        """Block -> reason."""

    def add(self, blocks: Sequence[int], tokens: IntArray) -> None:
        """Add blocks; *tokens*: int64, of each block of the plan so far."""
        before = self._through[-1] if len(self._through) else 0
        through = before + np.cumsum(tokens[np.asarray(blocks, np.int64)])
        self._blocks, self._through = (
            np.append(self._blocks, blocks).astype(np.int64),
            np.append(self._through, through),
        )

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to assign, and nothing is assigned."""
        return not self._out and not self.has_more

    @property
    def has_more(self) -> bool:
        return bool(self._again) or self._begun < len(self._blocks)

    def next(self, devices: int) -> Unit | None:
        """Return the next unit for one of *devices*, smaller towards the end; None where all blocks are assigned."""
        if not self.has_more:
            return None
        self._out += 1
        if self._again:
            return self._again.popleft()
        total = int(self._through[-1])
        before = int(self._through[self._begun - 1]) if self._begun else 0
        wanted = max((total - before) // (devices * UNITS_OF_A_SHARE), total // (devices * MOST_UNITS_OF_A_SHARE))
        end = max(self._begun + 1, int(np.searchsorted(self._through, before + wanted, side="right")))
        blocks, self._begun = self._blocks[self._begun : end].tolist(), end
        return Unit(blocks=blocks)

    def take(self, unit: Unit, record: UnitRecord) -> None:
        """Record how a unit went."""
        self._out -= 1
        if record.error is not None:
            self._again.append(unit)  # no worker has tried
            return
        if not record.is_proved and record.quarantined and not unit.losses:
            self._again.append(Unit(blocks=unit.blocks, losses=1))  # by another worker, perhaps
            return
        self._quarantined |= {position: why for position, (_, why) in record.quarantined.items()}
        if record.left:
            why = record.rank.failure or FailureClass.DIED.value, record.rank.attempts
            known = unit.quarantined | record.quarantined
            self._requeue(record.left, unit.losses + 1, why, record.suspects, known)

    def lost(self, unit: Unit) -> None:
        """Record that a unit was lost with its worker or host."""
        self._out -= 1
        losses = unit.losses + 1
        self._requeue(unit.blocks, losses, (FailureClass.DIED.value, losses), unit.suspects, unit.quarantined)

    def quarantined(self) -> dict[int, Why]:
        """Return index position -> reason, of the sequences that are not computed."""
        return self._quarantined

    def why_missing(self, position: int, block: int, _outcomes: Sequence[Rank]) -> Why:
        """Return failure class and attempts of a missing sequence."""
        return self._quarantined.get(position) or self.given_up.get(block, ("unknown", 0))

    def close(self, why: Why) -> None:
        """Give up what is not assigned: the remaining workers would fail alike."""
        rest = [*self._blocks[self._begun :].tolist(), *(block for unit in self._again for block in unit.blocks)]
        self.given_up |= dict.fromkeys(rest, why)
        self._begun = len(self._blocks)
        self._again.clear()

    def _requeue(
        self,
        blocks: Sequence[int],
        losses: int,
        why: Why,
        suspects: dict[int, int],
        quarantined: dict[int, tuple[int, Why]],
    ) -> None:
        if losses > MOST_LOSSES:
            self.given_up |= dict.fromkeys(blocks, why)
            return
        middle = len(blocks) // 2 if losses > 1 else 0
        for part in (blocks[:middle], blocks[middle:]):
            if part:
                among = set(part)
                self._again.append(
                    Unit(
                        blocks=list(part),
                        suspects={block: deaths for block, deaths in suspects.items() if block in among},
                        quarantined={p: found for p, found in quarantined.items() if found[0] in among},
                        losses=losses,
                    )
                )
