"""
Scores of all contigs by their letters, computed by one process a core.

A contig's scores depend on it alone, not on its part. The scores of a part are a sealed file: a start after a kill
computes the other parts. Processes get one part at a time, the largest first; the part of a lost process is handed out
again. Contigs that a model with known proteins is not sure of are then searched in these by the same processes, in
larger parts. ``genes`` has genes found in parts by the same means.
"""

from __future__ import annotations

import threading
from functools import cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from virnucpro import durable
from virnucpro.calls.score_files import map_scores
from virnucpro.config import RunLimits
from virnucpro.errors import ResultError
from virnucpro.models.contigs.protein_search import PASS_NT
from virnucpro.models.contigs.similarity import SEARCHED_NT, is_unsure
from virnucpro.pipeline.hardware.device_claim import free_memory_bytes, usable_cores
from virnucpro.pipeline.prediction.letters_job import SearchJob, compute_part
from virnucpro.pipeline.prediction.letters_processes import compute_in_processes, refuse_to_go_on
from virnucpro.store.locks.worker_lock import taking_part

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from virnucpro.arrays import IntArray
    from virnucpro.pipeline.hosts.result_passes import ItemMap
    from virnucpro.pipeline.prediction.letters_job import LettersJob, PartJob

PART_NT, MOST_PARTS = 250_000, 1 << 10
"""Nucleotides of a part, as far as contigs are not longer; of large inputs more, for at most so many parts."""
SEARCH_PART_NT = PASS_NT
"""Most of a part that is searched, of the nucleotides that are."""
WORKER_BYTES = 600_000_000
"""Memory of a process: 350 to 500 MB were measured (``benchmarks/end_to_end.py``)."""
PART_CONTIGS = 1 << 12
"""Most contigs of a part."""


def score_letters(
    job: LettersJob,
    *,
    workers: int | None = None,
    limits: RunLimits | None = None,
    elsewhere: ItemMap | None = None,
    advance: Callable[[int, int, str], None] = lambda *_: None,
    stop: threading.Event | None = None,
) -> dict[str, int]:
    """
    Write the scores of all contigs, and of the windows along the long ones; return how many were scored and searched.

    Args:
        workers: Number of processes; by default one a core, as far as memory allows and the input is worth it.
        elsewhere: Has the parts computed on other hosts.
        advance: Gets how many contigs of how many are done, and what is done to them, after every part.
        stop: Set it to end the processes.

    Raises:
        StoppedError: *stop* was set.
        OutputError: A part cannot be written.
        WorkersFailedError: No process got to the end.
    """
    index = job.open_index()
    lengths = index.lengths[index.in_input_order()]
    parts = parts_of(lengths, PART_NT)
    counts = {"contigs": len(index), "scored": 0, "searched": 0}

    @cache  # processes that have scored everything ask for it, and so does what comes after them
    def search() -> Work | None:
        counts["scored"] = _join_parts(job, parts)
        scores = map_scores(job.layout.letter_scores, "scores", len(index))
        is_searched = is_unsure(scores) & job.model.searches_proteins
        counts["searched"] = int(np.count_nonzero(is_searched))
        if not counts["searched"]:
            return None
        searched_nt = np.where(is_searched, np.minimum(lengths, SEARCHED_NT), 0)
        refining = SearchJob(**vars(job))
        num_workers = _worth(int(searched_nt.sum()), refining.worker_nt, workers if elsewhere is None else 1)
        return Work(refining, searched_nt, search_parts(searched_nt, num_workers), advance)

    compute = partial(compute_parts, workers=workers, limits=limits, elsewhere=elsewhere, stop=stop)
    load = cache(job.load)
    compute(Work(job, lengths, parts, advance), load, then=search)
    if (found := search()) is not None:
        compute(found, load)
        with durable.replacing(job.layout.letter_scores) as of_contigs:
            for part in found.parts:
                of_contigs.write(read_part(found.job, part))
    durable.remove_tree(job.layout.letter_parts)
    return counts


def _join_parts(job: LettersJob, parts: Sequence[range]) -> int:
    """Write the letters' scores of all contigs and windows into two files; return how many contigs have one."""
    scored, layout = 0, job.layout
    with durable.replacing(layout.letter_scores) as of_contigs, durable.replacing(layout.letter_windows) as of_windows:
        for part in parts:
            data = read_part(job, part)
            of_part = np.frombuffer(data[: 4 * len(part)], np.float32)
            scored += int(np.count_nonzero(~np.isnan(of_part)))
            of_contigs.write(of_part.tobytes())
            of_windows.write(data[4 * len(part) :])
    return scored


def read_part(job: PartJob, part: range) -> bytes:
    durable.check_seal(job.path_of(part))
    return job.path_of(part).read_bytes()[: -durable.SEAL_BYTES]


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
    """
    job, missing, stop = work.job, work.missing(), stop or threading.Event()
    num_workers = min(_worth(sum(map(work.nt_of, missing)), job.worker_nt, workers), max(1, len(missing)))
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


def _worth(work_nt: int, worker_nt: int, workers: int | None) -> int:
    """Return the number of processes that so much work is worth; of cores not more than memory allows."""
    most = workers or min(usable_cores(), free_memory_bytes() // WORKER_BYTES)
    return max(1, min(most, work_nt // worker_nt))


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


def search_parts(searched_nt: IntArray, num_workers: int) -> list[range]:
    """
    Return the contigs of each part that is searched, by their number in the input.

    *searched_nt* count of all contigs, in that order. Parts are as large as each other, and as many for each process:
    all proteins are read for each.
    """
    ends_nt = np.cumsum(searched_nt)
    total_nt = int(ends_nt[-1])
    number = num_workers * -(-total_nt // (num_workers * SEARCH_PART_NT))
    limits = np.searchsorted(ends_nt, total_nt * np.arange(1, number) // number, side="right")
    return [range(*part) for part in pairwise(np.unique([0, *limits.tolist(), len(ends_nt)]).tolist())]


class Work:
    """
    The parts of a job, and how much of them is done.

    Args:
        job: What is done to each.
        lengths_nt: Of all contigs, as far as they are work.
        parts: Of the contigs.
        advance: As ``score_letters`` has it.
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
