"""
What is done to a part of the contigs, and the process that does it for those that its parent hands out.

It imports little, so that a process starts soon.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from threadpoolctl import threadpool_limits

from virnucpro import durable
from virnucpro.arrays import mapped
from virnucpro.calls.contig_scores import refine_scores, score_by_composition
from virnucpro.calls.gene_files import gene_lines
from virnucpro.calls.score_files import map_scores
from virnucpro.calls.viral_regions import LONG_CONTIG_NT
from virnucpro.data.frames import chunks_per_contig
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.store.locks.worker_lock import hold_worker_lock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from virnucpro.arrays import IntArray
    from virnucpro.models.contigs.contig_model import CompositionModel, ContigModel
    from virnucpro.pipeline.work.worker_process import ReportPipe
    from virnucpro.run_layout import PredictionLayout

GENE_COUNTS = struct.Struct("<QQ")
"""At the beginning of a part's genes: their number, and the bytes of GFF3."""
ANSWER_POLL_S = 1.0
"""Seconds between two signs of a process that waits for a part."""


@dataclass(frozen=True, kw_only=True)
class PartJob:
    """What a process needs to know of what it does to the contigs; small and picklable."""

    layout: PredictionLayout
    fingerprint: str
    """Of what it does and to what; names the parts' files."""
    name: ClassVar[str]
    """In the names of the parts' files."""
    work: ClassVar[str]
    """What is said of the contigs that are done."""
    worker_nt: ClassVar[int]
    """Nucleotides worth another process: it takes as long to start."""
    searches: ClassVar[bool] = False

    def open_index(self) -> SequenceIndex:
        return SequenceIndex.open(self.layout.contig_index)

    def path_of(self, part: range) -> Path:
        """Return the file of a part."""
        # both ends: another start may have parted the contigs in another way
        return self.layout.contig_parts / f"{self.fingerprint[:16]}.{self.name}.{part.start}-{part.stop}"

    def load(self) -> Any:
        """Load what ``compute`` needs for all parts, beside the index."""

    def bytes_of(self, part: range, lengths_nt: IntArray) -> int | None:
        """Return the size of a part's file, whose contigs have *lengths_nt*; None where it is not known."""
        del part, lengths_nt
        return None

    def compute(self, index: SequenceIndex, part: range, loaded: Any) -> bytes:
        """Return what is in a part's file."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class CompositionJob(PartJob):
    """Scores contigs, and windows along long ones, by composition: float32."""

    model: CompositionModel
    chunk_nt: int
    min_nt: int
    name: ClassVar[str] = "composition"
    work: ClassVar[str] = "scored"
    worker_nt: ClassVar[int] = 1_000_000

    def load(self) -> ContigModel:
        return self.model.load()

    def bytes_of(self, part: range, lengths_nt: IntArray) -> int:
        long_nt = lengths_nt[lengths_nt >= LONG_CONTIG_NT]
        return 4 * (len(part) + int(chunks_per_contig(long_nt, self.chunk_nt, self.min_nt).sum()))

    def compute(self, index: SequenceIndex, part: range, loaded: ContigModel) -> bytes:
        return b"".join(score_by_composition(index, part, loaded, chunk_nt=self.chunk_nt, min_nt=self.min_nt))


class HomologyJob(CompositionJob):
    """Refines ambiguous composition scores by homology to known proteins: float32."""

    name: ClassVar[str] = "homology"
    work: ClassVar[str] = "compared with known proteins"
    worker_nt: ClassVar[int] = 250_000
    searches: ClassVar[bool] = True

    def bytes_of(self, part: range, lengths_nt: IntArray) -> int:
        del lengths_nt
        return 4 * len(part)

    def compute(self, index: SequenceIndex, part: range, loaded: ContigModel) -> bytes:
        scores = map_scores(self.layout.composition_scores, "scores", len(index))[part.start : part.stop]
        return refine_scores(index, part, loaded, scores).tobytes()


class GeneJob(PartJob):
    """Finds the genes of chosen contigs: their ``GENE_COUNTS``, lines of GFF3, and proteins."""

    name: ClassVar[str] = "genes"
    work: ClassVar[str] = "searched for genes"
    worker_nt: ClassVar[int] = 10_000_000

    @property
    def chosen(self) -> Path:
        """A byte for each contig, in input order: whether its genes are wanted."""
        return self.layout.contig_parts / "genes_of.u8"

    def compute(self, index: SequenceIndex, part: range, loaded: None) -> bytes:
        del loaded
        is_chosen = mapped(self.chosen, np.bool_)[part.start : part.stop]
        records = map(index.read, index.in_input_order()[part.start : part.stop][is_chosen].tolist())
        found = gene_lines((record.sequence_id, record.sequence) for record in records)
        return GENE_COUNTS.pack(found.genes, len(found.gff)) + found.gff + found.proteins


def part_worker(rank: int, world_size: int, results_queue: ReportPipe, job: PartJob) -> None:
    """Do the job to those parts that the parent hands out; of scores, search some, too."""
    del world_size
    search = HomologyJob(**vars(job)) if isinstance(job, CompositionJob) else job
    hold_worker_lock(job.layout.output_dir, rank)
    index, loaded = job.open_index(), job.load()
    for part, is_searched in _handed_out(results_queue):
        results_queue.put({"kind": "step"})
        compute_part(search if is_searched else job, index, part, loaded)
    results_queue.put({"rank": rank, "status": "complete"})


def _handed_out(reports: ReportPipe) -> Iterator[tuple[range, bool]]:
    while True:
        reports.put({"kind": "wants"})
        while (answer := reports.receive(ANSWER_POLL_S)) is None:
            reports.put({"kind": "step"})
        if not answer["contigs"]:
            return
        yield range(*answer["contigs"]), answer["searches"]


def compute_part(job: PartJob, index: SequenceIndex, part: range, loaded: Any) -> None:
    """Write the file of a part, unless it is there, with one thread: also in a process that is no worker."""
    path = job.path_of(part)
    if not path.exists():
        with threadpool_limits(1, user_api="blas"):
            data = job.compute(index, part, loaded)
        durable.write_bytes(path, data, seal=True)
