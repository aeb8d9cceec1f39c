"""Deaths of processes as evidence against blocks and sequences, and what they make of the rank that brings it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from virnucpro.pipeline.failures import FailureClass
    from virnucpro.telemetry.ranks import Rank


@dataclass(frozen=True)
class Quarantine:
    """Why a sequence is not computed any more."""

    block: int
    failure: FailureClass
    attempts: int


@dataclass
class Evidence:
    """Deaths that count against blocks and sequences."""

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
    """What the run makes of a rank."""

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
