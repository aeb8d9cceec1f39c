"""Processor time and memory of each rank's process with its children, read from /proc at a cost that does not grow."""

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
    """One rank's process and its children at one moment."""

    cpu_s: float
    """Processor seconds, user and system, since the start; without those of children that were not waited for."""
    resident_bytes: int
    """Resident memory; shared pages count once for each process."""


def sample_processes(pids: Mapping[int, int]) -> dict[int, ProcessSample]:
    """Return a sample for each rank whose process still runs; *pids* maps rank to process."""
    samples = {}
    for rank, pid in pids.items():
        with suppress(psutil.Error):
            samples[rank] = _sample(psutil.Process(pid))
    return samples


def _sample(process: psutil.Process) -> ProcessSample:
    cpu_s, resident_bytes = _usage(process)
    for child in _descendants(process.pid):
        with suppress(psutil.Error):  # it has just ended; its parent has its seconds the next time
            child_s, child_bytes = _usage(psutil.Process(child))
            cpu_s, resident_bytes = cpu_s + child_s, resident_bytes + child_bytes
    return ProcessSample(cpu_s, resident_bytes)


def _usage(process: psutil.Process) -> tuple[float, int]:
    """Return processor seconds, those of children waited for included, and bytes of resident memory."""
    with process.oneshot():
        times, memory = process.cpu_times(), process.memory_info()
    return times.user + times.system + times.children_user + times.children_system, memory.rss


def _descendants(pid: int) -> Iterator[int]:
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has just ended
            for child in map(int, path.read_text().split()):
                yield child
                yield from _descendants(child)
