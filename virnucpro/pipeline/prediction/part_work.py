"""
Contigs in parts, to each of which a job is done: in this process, by one process a core, or on other hosts.

What is found of a part is a sealed file: a start after a kill computes the other parts. Processes get one part at a
time, the largest first; the part of a lost process is handed out again.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from virnucpro import durable, run_folders
from virnucpro.config import RunLimits
from virnucpro.errors import ResultError
from virnucpro.pipeline.hardware.device_claim import free_memory_bytes, usable_cores
from virnucpro.pipeline.prediction.part_jobs import compute_part
from virnucpro.pipeline.prediction.part_processes import compute_in_processes, refuse_to_go_on
from virnucpro.store.locks.worker_lock import taking_part

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from virnucpro.arrays import IntArray
    from virnucpro.pipeline.hosts.result_passes import ItemMap
    from virnucpro.pipeline.prediction.part_jobs import PartJob

MOST_PARTS = 1 << 10
"""Of large inputs parts are larger, for at most so many."""
PART_CONTIGS = 1 << 12
"""Most contigs of a part."""
WORKER_BYTES = 600_000_000
"""Memory of a process: 350 to 500 MB were measured (``benchmarks/end_to_end.py``)."""


def parts_of(lengths_nt: IntArray, part_nt: int) -> list[range]:
    """
    Return the contigs of each part, by their number in the input.

    *lengths_nt* count of all contigs, in that order; a part is to have *part_nt* of them.
    """
    ends_nt = np.cumsum(lengths_nt)
    part_nt = max(part_nt, int(ends_nt[-1]) // MOST_PARTS) if len(ends_nt) else part_nt
    parts, first = [], 0
    while first < len(ends_nt):
        before_nt = int(ends_nt[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends_nt, before_nt + part_nt, side="right")))
        parts.append(range(first, min(last, first + PART_CONTIGS)))
        first = parts[-1].stop
    return parts


class Work:
    """
    The parts of a job, and how much of them is done.

    Args:
        job: What is done to each.
        lengths_nt: Of all contigs, as far as they are work.
        parts: Of the contigs.
        advance: Gets how many contigs of how many are done, and what is done to them, after every part.
    """

    def __init__(
        self, job: PartJob, lengths_nt: IntArray, parts: Sequence[range], advance: Callable[[int, int, str], None]
    ) -> None:
        self.job, self.parts = job, parts
        self._lengths_nt, self._advance = lengths_nt, advance
        self._contigs = sum(map(self._contigs_of, parts))
        self._done = 0

    def nt_of(self, part: range) -> int:
        return int(self._lengths_nt[part.start : part.stop].sum())

    def _contigs_of(self, part: range) -> int:
        """Return how many contigs of the part are work."""
        return int(np.count_nonzero(self._lengths_nt[part.start : part.stop]))

    def missing(self) -> list[range]:
        """Return the parts without a file, the largest first; files that are not of such a part are removed."""
        missing = [
            part for part in self.parts if not _is_there(self.job, part, self._lengths_nt[part.start : part.stop])
        ]
        self._done = self._contigs - sum(map(self._contigs_of, missing))
        return sorted(missing, key=self.nt_of, reverse=True)

    def done(self, part: range) -> None:
        self._done += self._contigs_of(part)
        self._advance(self._done, self._contigs, self.job.work)


def compute_parts(
    work: Work,
    load: Callable[[], Any],
    *,
    workers: int | None,
    limits: RunLimits | None,
    elsewhere: ItemMap | None,
    stop: threading.Event | None,
    then: Callable[[], Work | None] = lambda: None,
) -> None:
    """
    Have those parts computed that have no file; processes go on with *then* on their own.

    Args:
        load: Of the job; what it returns is kept.
        workers: Number of processes; by default one a core, as far as memory allows and the work is worth it.
        elsewhere: Has the parts computed on other hosts.
        stop: Set it to end the processes.

    Raises:
        StoppedError: *stop* was set.
        OutputError: A part cannot be written.
        WorkersFailedError: No process got to the end.
    """
    job, missing, stop = work.job, work.missing(), stop or threading.Event()
    num_workers = min(processes_for(sum(map(work.nt_of, missing)), job.worker_nt, workers), max(1, len(missing)))
    if elsewhere is not None:
        elsewhere(partial(_compute_for, job), missing)
    elif num_workers > 1:
        compute_in_processes(work, then, num_workers, limits or RunLimits(), stop)
    else:
        index = job.open_index()
        for part in missing:
            refuse_to_go_on(stop)
            compute_part(job, index, part, load())
            work.done(part)


def processes_for(work_nt: int, worker_nt: int, workers: int | None) -> int:
    """Return the number of processes that so much work is worth; of cores not more than memory allows."""
    most = workers or min(usable_cores(), free_memory_bytes() // WORKER_BYTES)
    return max(1, min(most, work_nt // worker_nt))


def read_part(job: PartJob, part: range) -> bytes:
    """Return what was found of a part; ``ResultError`` where its file is not whole."""
    durable.check_seal(job.path_of(part))
    return run_folders.read_bytes(job.path_of(part))[: -durable.SEAL_BYTES]


def _compute_for(job: PartJob, part: range) -> None:
    with taking_part(job.layout.output_dir):
        compute_part(job, job.open_index(), part, job.load())


def _is_there(job: PartJob, part: range, lengths_nt: IntArray) -> bool:
    """Whether the part's file is whole and of its contigs, whose *lengths_nt* are given; any other is removed."""
    path = job.path_of(part)
    try:
        durable.check_seal(path)
        if job.bytes_of(part, lengths_nt) in {None, path.stat().st_size - durable.SEAL_BYTES}:
            return True
    except FileNotFoundError:
        return False
    except ResultError:
        pass
    durable.remove(path)
    return False
