"""
Scores of all contigs by their letters, computed by one process a core.

The contigs are parted by the input alone, so scores do not depend on the number of processes. The scores of a part are
a sealed file: a start after a kill computes the other parts. A process begins with every n-th part, then takes what the
others have not finished, so that a lost process costs time only.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from virnucpro import durable
from virnucpro.calls.contig_scores import score_by_letters
from virnucpro.config import RunLimits
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.errors import ResultError, StoppedError, WorkersFailedError
from virnucpro.models.contigs.contig_model import load_contig_model
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.gpu_coordinator import GPUProcessCoordinator
from virnucpro.pipeline.hardware.device_claim import usable_cores
from virnucpro.store.locks.worker_lock import hold_worker_lock, taking_part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from virnucpro.arrays import IntArray
    from virnucpro.pipeline.hosts.result_passes import ItemMap
    from virnucpro.pipeline.prediction.settings import LettersModel
    from virnucpro.pipeline.work.worker_process import ReportPipe
    from virnucpro.run_layout import PredictionLayout

PART_NT, MOST_PARTS = 250_000, 1 << 10
"""Nucleotides of a part, as far as contigs are not longer; of large inputs more, for at most so many parts."""
PART_CONTIGS = 1 << 12
"""Most contigs of a part."""
WORKER_NT = 1_000_000
"""Nucleotides worth another process: fewer are scored before it has started."""
WORKER = "virnucpro.pipeline.prediction.letters:letters_worker"


@dataclass(frozen=True, kw_only=True)
class LettersJob:
    """What a process needs to know; small and picklable."""

    layout: PredictionLayout
    model: LettersModel
    chunk_nt: int
    min_nt: int
    fingerprint: str
    """Of input and settings; names the parts' files."""

    def open_index(self) -> SequenceIndex:
        return SequenceIndex.open(self.layout.contig_index)

    def path_of(self, part: range) -> Path:
        """Return the file of a part's scores."""
        return self.layout.letter_parts / f"{self.fingerprint[:16]}.{part.start}.f32"


def score_letters(
    job: LettersJob,
    *,
    workers: int | None = None,
    limits: RunLimits | None = None,
    elsewhere: ItemMap | None = None,
    stop: threading.Event | None = None,
) -> dict[str, int]:
    """
    Write the scores of all contigs, and of the windows along the long ones; return the number of contigs with a score.

    Args:
        workers: Number of processes; by default one a core, as far as the input is worth it.
        elsewhere: Has the parts computed on other hosts.
        stop: Set it to end the processes.

    Raises:
        StoppedError: *stop* was set.
        WorkersFailedError: No process got to the end.
    """
    stop = stop or threading.Event()
    layout = job.layout
    index = job.open_index()
    lengths = index.lengths[index.in_input_order()]
    parts = parts_of(lengths)
    durable.make_folder(layout.letter_parts)
    missing = [part for part in parts if not _is_there(job, part)]
    worth_nt = sum(int(lengths[part.start : part.stop].sum()) for part in missing)
    num_workers = min(workers or usable_cores(), max(1, worth_nt // WORKER_NT))
    if elsewhere is not None:
        elsewhere(partial(_score_for, job), missing)
    elif num_workers > 1:
        _score_in_processes(job, missing, num_workers, limits or RunLimits(), stop)
    else:
        _score(job, index, missing, lambda: _refuse_to_go_on(stop))
    scored = 0
    with durable.replacing(layout.letter_scores) as of_contigs, durable.replacing(layout.letter_windows) as of_windows:
        for part in parts:
            durable.check_seal(job.path_of(part))
            data = job.path_of(part).read_bytes()[: -durable.SEAL_BYTES]
            of_part = np.frombuffer(data[: 4 * len(part)], np.float32)
            scored += int(np.count_nonzero(~np.isnan(of_part)))
            of_contigs.write(of_part.tobytes())
            of_windows.write(data[4 * len(part) :])
    durable.remove_tree(layout.letter_parts)
    return {"contigs": len(index), "scored": scored}


def parts_of(lengths_nt: IntArray) -> list[range]:
    """Return the contigs of each part, by their number in the input; *lengths_nt* of all contigs, in that order."""
    ends_nt = np.cumsum(lengths_nt)
    part_nt = max(PART_NT, int(ends_nt[-1]) // MOST_PARTS) if len(ends_nt) else PART_NT
    parts, first = [], 0
    while first < len(ends_nt):
        before_nt = int(ends_nt[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends_nt, before_nt + part_nt, side="right")))
        parts.append(range(first, min(last, first + PART_CONTIGS)))
        first = parts[-1].stop
    return parts


def letters_worker(
    rank: int, world_size: int, results_queue: ReportPipe, job: LettersJob, parts: Sequence[range]
) -> None:
    """Score every *world_size*-th of *parts*, then those of the others that are still missing, from the end."""
    hold_worker_lock(job.layout.output_dir, rank)
    own = parts[rank::world_size]
    others = [part for number, part in enumerate(parts) if number % world_size != rank]
    _score(job, job.open_index(), [*own, *reversed(others)], lambda: results_queue.put({"kind": "step"}))
    results_queue.put({"rank": rank, "status": "complete"})


def _score(job: LettersJob, index: SequenceIndex, parts: Iterable[range], before_each: Callable[[], None]) -> None:
    """Score those of *parts* that have no file."""
    model = load_contig_model(job.model.folder, job.model.card)
    for part in parts:
        before_each()
        path = job.path_of(part)
        if not path.exists():
            scores = score_by_letters(index, part, model, chunk_nt=job.chunk_nt, min_nt=job.min_nt)
            durable.write_bytes(path, b"".join(scores), seal=True)


def _score_for(job: LettersJob, part: range) -> None:
    with taking_part(job.layout.output_dir):
        _score(job, job.open_index(), [part], lambda: None)


def _score_in_processes(
    job: LettersJob, parts: Sequence[range], num_workers: int, limits: RunLimits, stop: threading.Event
) -> None:
    devices = [CPU] * num_workers
    with GPUProcessCoordinator(num_workers, job.layout.output_dir, devices=devices, limits=limits, stop=stop) as ranks:
        ranks.spawn_workers(WORKER, (job, parts))
        ranks.wait_for_completion()
        reasons = {rank: outcome.reason or "" for rank, outcome in ranks.outcomes.items() if outcome.failure}
    _refuse_to_go_on(stop)
    missing = [part for part in parts if not job.path_of(part).exists()]
    if missing:
        raise WorkersFailedError(
            reasons,
            world_size=num_workers,
            missing_sequences=sum(map(len, missing)),
            total_sequences=sum(map(len, parts)),
            partial_path=None,
        )


def _refuse_to_go_on(stop: threading.Event) -> None:
    if stop.is_set():
        raise StoppedError


def _is_there(job: LettersJob, part: range) -> bool:
    """Whether the part's file is whole; a damaged one is removed."""
    path = job.path_of(part)
    try:
        durable.check_seal(path)
    except FileNotFoundError:
        return False
    except ResultError:
        durable.remove(path)
        return False
    return True
