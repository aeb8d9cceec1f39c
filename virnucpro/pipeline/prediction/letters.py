"""
Scores of all contigs by their letters, computed by one process a core.

A contig's scores depend on it alone, not on its part. The scores of a part are a sealed file: a start after a kill
computes the other parts. Processes get one part at a time, the largest first; the part of a lost process is handed out
again. Contigs that a model with known proteins is not sure of are then searched in these, in larger parts, as each
reads all proteins once, but in a few for each process.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from virnucpro import durable
from virnucpro.calls.contig_scores import refine_scores, score_by_letters
from virnucpro.calls.score_files import map_scores
from virnucpro.calls.viral_regions import LONG_CONTIG_NT
from virnucpro.config import RunLimits
from virnucpro.data.frames import chunks_per_contig
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.errors import ExitCode, OutputError, ResultError, StoppedError, WorkersFailedError
from virnucpro.models.contigs.contig_model import load_contig_model
from virnucpro.models.contigs.protein_search import PASS_NT
from virnucpro.models.contigs.similarity import SEARCHED_NT, is_unsure
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.failures import FailureClass, exit_code_of
from virnucpro.pipeline.gpu_coordinator import CountedAttempts, GPUProcessCoordinator
from virnucpro.pipeline.hardware.device_claim import usable_cores
from virnucpro.store.locks.worker_lock import hold_worker_lock, taking_part
from virnucpro.telemetry.ranks import Rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from virnucpro.arrays import IntArray
    from virnucpro.models.contigs.contig_model import ContigModel
    from virnucpro.pipeline.hosts.result_passes import ItemMap
    from virnucpro.pipeline.prediction.settings import LettersModel
    from virnucpro.pipeline.work.worker_process import ReportPipe
    from virnucpro.run_layout import PredictionLayout

PART_NT, MOST_PARTS = 250_000, 1 << 10
"""Nucleotides of a part, as far as contigs are not longer; of large inputs more, for at most so many parts."""
SEARCH_PART_NT = PASS_NT
"""Most of a part that is searched, of the nucleotides that are; the least is ``PART_NT``."""
SEARCH_PARTS_OF_A_PROCESS = 4
"""That many, between the two."""
PART_CONTIGS = 1 << 12
"""Most contigs of a part."""
LEAST_PROGRESS_S = 5.0
"""Seconds between two lines on progress, at least."""
WORKER_NT, SEARCH_WORKER_NT = 1_000_000, 250_000
"""Nucleotides worth another process, to score and to search: fewer are done before it has started."""
ANSWER_POLL_S = 1.0
"""Seconds between two signs of a process that waits for a part."""
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
    work: ClassVar[str] = "scored"
    """What is said of the nucleotides that are done."""

    @property
    def worker_nt(self) -> int:
        """Nucleotides worth another process."""
        return WORKER_NT

    def open_index(self) -> SequenceIndex:
        return SequenceIndex.open(self.layout.contig_index)

    def path_of(self, part: range) -> Path:
        """Return the file of a part's scores."""
        return self.layout.letter_parts / f"{self.fingerprint[:16]}.{part.start}.f32"

    def scores_of(self, part: range, lengths_nt: IntArray) -> int:
        """Return the number of scores of a part: of its contigs, of *lengths_nt*, and of windows along long ones."""
        long_nt = lengths_nt[lengths_nt >= LONG_CONTIG_NT]
        return len(part) + int(chunks_per_contig(long_nt, self.chunk_nt, self.min_nt).sum())

    def score(self, index: SequenceIndex, part: range, model: ContigModel) -> bytes:
        """Return the scores of a part, float32."""
        return b"".join(score_by_letters(index, part, model, chunk_nt=self.chunk_nt, min_nt=self.min_nt))


class SearchJob(LettersJob):
    """Refines the scores of contigs that their letters are not sure of."""

    work: ClassVar[str] = "compared with known proteins"

    @property
    def worker_nt(self) -> int:
        return SEARCH_WORKER_NT

    def path_of(self, part: range) -> Path:
        return self.layout.letter_parts / f"{self.fingerprint[:16]}.refined.{part.start}.f32"

    def scores_of(self, part: range, lengths_nt: IntArray) -> int:
        del lengths_nt
        return len(part)

    def score(self, index: SequenceIndex, part: range, model: ContigModel) -> bytes:
        scores = map_scores(self.layout.letter_scores, "scores", len(index))[part.start : part.stop]
        return refine_scores(index, part, model, scores).tobytes()


def score_letters(
    job: LettersJob,
    *,
    workers: int | None = None,
    limits: RunLimits | None = None,
    elsewhere: ItemMap | None = None,
    say: Callable[[str], None] = lambda _: None,
    stop: threading.Event | None = None,
) -> dict[str, int]:
    """
    Write the scores of all contigs, and of the windows along the long ones; return how many were scored and searched.

    Args:
        workers: Number of processes; by default one a core, as far as the input is worth it.
        elsewhere: Has the parts computed on other hosts.
        say: Gets a line after every tenth that took some seconds.
        stop: Set it to end the processes.

    Raises:
        StoppedError: *stop* was set.
        OutputError: A part cannot be written.
        WorkersFailedError: No process got to the end.
    """
    stop = stop or threading.Event()
    layout = job.layout
    index = job.open_index()
    lengths = index.lengths[index.in_input_order()]
    load = cache(partial(load_contig_model, job.model.folder, job.model.card))
    compute = partial(_compute, load=load, workers=workers, limits=limits, elsewhere=elsewhere, say=say, stop=stop)
    parts = parts_of(lengths, PART_NT)
    compute(job, {part: lengths[part.start : part.stop] for part in parts})
    scored = 0
    with durable.replacing(layout.letter_scores) as of_contigs, durable.replacing(layout.letter_windows) as of_windows:
        for part in parts:
            data = _read_part(job, part)
            of_part = np.frombuffer(data[: 4 * len(part)], np.float32)
            scored += int(np.count_nonzero(~np.isnan(of_part)))
            of_contigs.write(of_part.tobytes())
            of_windows.write(data[4 * len(part) :])
    is_searched = is_unsure(map_scores(layout.letter_scores, "scores", len(index))) & job.model.searches_proteins
    if is_searched.any():
        search = SearchJob(**vars(job))
        unsure_nt = np.where(is_searched, np.minimum(lengths, SEARCHED_NT), 0)
        parts = parts_of(unsure_nt, _search_part_nt(int(unsure_nt.sum()), workers if elsewhere is None else 1))
        compute(search, {part: unsure_nt[part.start : part.stop] for part in parts})
        with durable.replacing(layout.letter_scores) as of_contigs:
            for part in parts:
                of_contigs.write(_read_part(search, part))
    durable.remove_tree(layout.letter_parts)
    return {"contigs": len(index), "scored": scored, "searched": int(np.count_nonzero(is_searched))}


def _read_part(job: LettersJob, part: range) -> bytes:
    durable.check_seal(job.path_of(part))
    return job.path_of(part).read_bytes()[: -durable.SEAL_BYTES]


def _compute(
    job: LettersJob,
    lengths_of: Mapping[range, IntArray],
    *,
    load: Callable[[], ContigModel],
    workers: int | None,
    limits: RunLimits | None,
    elsewhere: ItemMap | None,
    say: Callable[[str], None],
    stop: threading.Event,
) -> None:
    """Have the scores of those parts computed that have no file; *lengths_of* their contigs, in nt, is the work."""
    part_nt = {part: int(nt.sum()) for part, nt in lengths_of.items() if not _is_there(job, part, nt)}
    missing = sorted(part_nt, key=part_nt.__getitem__, reverse=True)
    progress = _Progress(part_nt, job.work, say)
    num_workers = min(_worth(sum(part_nt.values()), job.worker_nt, workers), max(1, len(missing)))
    if elsewhere is not None:
        elsewhere(partial(_score_for, job), missing)
    elif num_workers > 1:
        _score_in_processes(job, missing, num_workers, limits or RunLimits(), progress, stop)
    else:
        _score(job, load(), progress.through(missing), lambda: _refuse_to_go_on(stop))


def _worth(work_nt: int, worker_nt: int, workers: int | None) -> int:
    """Return the number of processes that so much work is worth."""
    return max(1, min(workers or usable_cores(), work_nt // worker_nt))


def _search_part_nt(searched_nt: int, workers: int | None) -> int:
    """Return the nucleotides of a part that is searched."""
    num_workers = _worth(searched_nt, SEARCH_WORKER_NT, workers)
    few_nt = searched_nt // (SEARCH_PARTS_OF_A_PROCESS * num_workers) if num_workers > 1 else SEARCH_PART_NT
    return min(SEARCH_PART_NT, max(PART_NT, few_nt))


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


class _Progress:
    """Says how much is done, *work*; *part_nt* are the nucleotides of each part."""

    def __init__(self, part_nt: Mapping[range, int], work: str, say: Callable[[str], None]) -> None:
        self._part_nt, self._work, self._say = part_nt, work, say
        self._total_nt, self._done_nt = sum(part_nt.values()), 0
        self._said, self._said_s = 0, time.monotonic()

    def done(self, part: range) -> None:
        self._done_nt += self._part_nt[part]
        tenths, now_s = 10 * self._done_nt // max(self._total_nt, 1), time.monotonic()
        if self._said < tenths < 10 and now_s - self._said_s >= LEAST_PROGRESS_S:
            self._say(f"{tenths}0 % of {self._total_nt / 1e6:,.1f} Mb {self._work}")
            self._said, self._said_s = tenths, now_s

    def through(self, parts: Iterable[range]) -> Iterator[range]:
        """Yield *parts*; each is done when the next is asked for."""
        for part in parts:
            yield part
            self.done(part)


class _PartPolicy(CountedAttempts):
    """Hands out parts one at a time; those of a process that has failed go to the next that asks."""

    def __init__(self, ranks: Sequence[Rank], limits: RunLimits, parts: Sequence[range], progress: _Progress) -> None:
        super().__init__(ranks, limits)
        self._parts, self._progress = parts, progress
        self._left = deque(range(len(parts)))
        self._held: dict[int, int] = {}
        self._changing = threading.Lock()

    def next_blocks(self, rank: int) -> list[dict[str, Any]]:
        """Return the number of the next part; nothing while another process may lose its part; None at the end."""
        with self._changing:
            if (finished := self._held.pop(rank, None)) is not None:
                self._progress.done(self._parts[finished])
            if self._left:
                self._held[rank] = self._left.popleft()
                return [{"part": self._held[rank]}]
            return [] if self._held else [{"part": None}]

    def another_attempt(self, outcome: Rank) -> bool:
        """Take back what a process had, and say whether attempts are left."""
        with self._changing:
            if (lost := self._held.pop(outcome.rank, None)) is not None:
                self._left.append(lost)
        return super().another_attempt(outcome)


def letters_worker(
    rank: int, world_size: int, results_queue: ReportPipe, job: LettersJob, parts: Sequence[range]
) -> None:
    """Score those of *parts* that the parent hands out."""
    del world_size
    hold_worker_lock(job.layout.output_dir, rank)
    model = load_contig_model(job.model.folder, job.model.card)
    _score(job, model, _handed_out(parts, results_queue), lambda: results_queue.put({"kind": "step"}))
    results_queue.put({"rank": rank, "status": "complete"})


def _handed_out(parts: Sequence[range], reports: ReportPipe) -> Iterator[range]:
    while True:
        reports.put({"kind": "wants"})
        while (answer := reports.receive(ANSWER_POLL_S)) is None:
            reports.put({"kind": "step"})
        if answer["part"] is None:
            return
        yield parts[answer["part"]]


def _score(job: LettersJob, model: ContigModel, parts: Iterable[range], before_each: Callable[[], None]) -> None:
    """Score those of *parts* that have no file."""
    index = job.open_index()
    for part in parts:
        before_each()
        path = job.path_of(part)
        if not path.exists():
            durable.write_bytes(path, job.score(index, part, model), seal=True)


def _score_for(job: LettersJob, part: range) -> None:
    with taking_part(job.layout.output_dir):
        _score(job, load_contig_model(job.model.folder, job.model.card), [part], lambda: None)


def _score_in_processes(
    job: LettersJob,
    parts: Sequence[range],
    num_workers: int,
    limits: RunLimits,
    progress: _Progress,
    stop: threading.Event,
) -> None:
    devices = [CPU] * num_workers
    ranks_of = [Rank(rank=rank, device=CPU.label) for rank in range(num_workers)]
    policy = _PartPolicy(ranks_of, limits, parts, progress)
    with GPUProcessCoordinator(
        num_workers, job.layout.output_dir, devices=devices, limits=limits, stop=stop, policy=policy
    ) as ranks:
        ranks.spawn_workers(WORKER, (job, parts))
        ranks.wait_for_completion()
        failed = [outcome for outcome in ranks.outcomes.values() if outcome.failure]
    _refuse_to_go_on(stop)
    missing = [part for part in parts if not job.path_of(part).exists()]
    if missing:
        classes = {FailureClass(outcome.failure or FailureClass.DIED) for outcome in failed}
        reasons = {outcome.rank: outcome.reason or "" for outcome in failed}
        if FailureClass.CANNOT_WRITE in classes:
            raise OutputError(job.layout.letter_parts, next(iter(reasons.values())))
        raise WorkersFailedError(
            reasons,
            world_size=num_workers,
            missing_sequences=sum(map(len, missing)),
            total_sequences=sum(map(len, parts)),
            partial_path=None,
            exit_code=exit_code_of(classes.pop()) if len(classes) == 1 else ExitCode.INTERNAL,
            is_listed=False,
        )


def _refuse_to_go_on(stop: threading.Event) -> None:
    if stop.is_set():
        raise StoppedError


def _is_there(job: LettersJob, part: range, lengths_nt: IntArray) -> bool:
    """Whether the part's file is whole and of its contigs, whose *lengths_nt* are given; any other is removed."""
    path = job.path_of(part)
    try:
        durable.check_seal(path)
        if path.stat().st_size == 4 * job.scores_of(part, lengths_nt) + durable.SEAL_BYTES:
            return True
    except FileNotFoundError:
        return False
    except ResultError:
        pass
    durable.remove(path)
    return False
