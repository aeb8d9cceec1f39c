"""
What is done to a part of the contigs, and the process that does it for those that its parent hands out.

It imports little, so that a process starts soon. Legend: as in ``letters``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from virnucpro import durable
from virnucpro.calls.contig_scores import refine_scores, score_by_letters
from virnucpro.calls.score_files import map_scores
from virnucpro.calls.viral_regions import LONG_CONTIG_NT
from virnucpro.data.frames import chunks_per_contig
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.store.locks.worker_lock import hold_worker_lock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from virnucpro.arrays import IntArray
    from virnucpro.models.contigs.contig_model import ContigModel, LettersModel
    from virnucpro.pipeline.work.worker_process import ReportPipe
    from virnucpro.run_layout import PredictionLayout

WORKER_NT, SEARCH_WORKER_NT = 1_000_000, 250_000
"""Nucleotides worth another process, to score and, where none has scored, to search: it takes as long to start."""
ANSWER_POLL_S = 1.0
"""Seconds between two signs of a process that waits for a part."""


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
    """What is said of the contigs that are done."""
    searches: ClassVar[bool] = False

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
    searches: ClassVar[bool] = True

    @property
    def worker_nt(self) -> int:
        return SEARCH_WORKER_NT

    def path_of(self, part: range) -> Path:
        # both ends: another start may have parted the search in another way
        return self.layout.letter_parts / f"{self.fingerprint[:16]}.refined.{part.start}-{part.stop}.f32"

    def scores_of(self, part: range, lengths_nt: IntArray) -> int:
        del lengths_nt
        return len(part)

    def score(self, index: SequenceIndex, part: range, model: ContigModel) -> bytes:
        scores = map_scores(self.layout.letter_scores, "scores", len(index))[part.start : part.stop]
        return refine_scores(index, part, model, scores).tobytes()


def letters_worker(rank: int, world_size: int, results_queue: ReportPipe, job: LettersJob) -> None:
    """Score and search those parts that the parent hands out."""
    del world_size
    search = SearchJob(**vars(job))
    hold_worker_lock(job.layout.output_dir, rank)
    index, model = job.open_index(), job.model.load()
    for part, is_searched in _handed_out(results_queue):
        results_queue.put({"kind": "step"})
        score_part(search if is_searched else job, index, model, part)
    results_queue.put({"rank": rank, "status": "complete"})


def _handed_out(reports: ReportPipe) -> Iterator[tuple[range, bool]]:
    while True:
        reports.put({"kind": "wants"})
        while (answer := reports.receive(ANSWER_POLL_S)) is None:
            reports.put({"kind": "step"})
        if not answer["contigs"]:
            return
        yield range(*answer["contigs"]), answer["searches"]


def score_part(job: LettersJob, index: SequenceIndex, model: ContigModel, part: range) -> None:
    """Write the scores of a part, unless its file is there."""
    path = job.path_of(part)
    if not path.exists():
        durable.write_bytes(path, job.score(index, part, model), seal=True)
