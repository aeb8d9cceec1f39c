"""
What the workers cost: processor time and memory of each rank's process, with the processes that it started.

Linux tells a process's children directly, so that a look costs the same however many processes the host has.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass(frozen=True)
class ProcessSample:
    """One rank's processes at one moment."""

    cpu_s: float
    """Processor seconds, user and system, of all processes that the rank has had, each as it was last seen."""
    resident_bytes: int
    """Resident memory of those that run; what they share counts once for each."""


@dataclass
class _Rank:
    process: psutil.Process
    cpu_s: float = 0.0
    """Of this process and its descendants."""
    earlier_s: float = 0.0
    """Of the processes before."""


class ProcessMonitor:
    """Adds up processor time over the processes that a rank has one after the other, so that it never falls."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}

    def sample(self, pids: Mapping[int, int]) -> dict[int, ProcessSample]:
        """
        Return how it is now, by rank.

        Args:
            pids: Rank -> its process, which must be one of ours that was not waited for yet, so that its number is
                nobody else's. A rank whose process cannot be read is left out.
        """
        samples = {}
        for number, pid in pids.items():
            with suppress(psutil.Error):
                samples[number] = self._sample(number, pid)
        return samples

    def _sample(self, number: int, pid: int) -> ProcessSample:
        rank = self._ranks.get(number)
        if rank is None or rank.process.pid != pid:
            earlier_s = rank.earlier_s + rank.cpu_s if rank is not None else 0.0
            rank = self._ranks[number] = _Rank(psutil.Process(pid), earlier_s=earlier_s)
        cpu_s, resident_bytes = _usage(rank.process)
        for child in _descendants(pid):
            with suppress(psutil.Error):  # it has just ended, and its seconds are its parent's next time
                child_s, child_bytes = _usage(psutil.Process(child))
                cpu_s, resident_bytes = cpu_s + child_s, resident_bytes + child_bytes
        rank.cpu_s = max(rank.cpu_s, cpu_s)
        return ProcessSample(rank.earlier_s + rank.cpu_s, resident_bytes)


def _usage(process: psutil.Process) -> tuple[float, int]:
    """Return processor seconds, those of children that were waited for included, and bytes of resident memory."""
    with process.oneshot():
        times, memory = process.cpu_times(), process.memory_info()
    return times.user + times.system + times.children_user + times.children_system, memory.rss


def _descendants(pid: int) -> Iterator[int]:
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has just ended
            for child in map(int, path.read_text().split()):
                yield child
                yield from _descendants(child)
