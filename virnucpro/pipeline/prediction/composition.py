"""
Composition scores of contigs, and what homology to known proteins makes of them.

A contig's scores depend on it alone, not on its unit. Contigs that composition does not show to be cellular are then
searched in the model's proteins, in larger units: all proteins are read for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from virnucpro import durable
from virnucpro.calls.contig_scores import judge_by_homology, score_by_composition
from virnucpro.calls.evidence import COLUMNS, without_hits
from virnucpro.calls.score_files import map_scores
from virnucpro.calls.viral_regions import LONG_CONTIG_NT
from virnucpro.data.frames import chunks_per_contig
from virnucpro.errors import ResultError
from virnucpro.models.contigs.homology import SEARCHED_NT, is_searched
from virnucpro.models.contigs.protein_search import PASS_NT
from virnucpro.pipeline.prediction.contig_work import ContigWork

if TYPE_CHECKING:
    from virnucpro.arrays import FloatArray, IntArray
    from virnucpro.data.sequence_index import SequenceIndex
    from virnucpro.models.contigs.contig_model import CompositionModel, ContigModel
    from virnucpro.models.contigs.protein_search import OnShare
    from virnucpro.pipeline.prediction.contig_work import ContigUnits


@dataclass(frozen=True, kw_only=True)
class Composition(ContigWork):
    """Scores contigs, and windows along long ones, by composition: float32."""

    model: CompositionModel
    chunk_nt: int
    min_nt: int
    worker_nt: int = 1_000_000
    unit_nt: int = 250_000
    name: ClassVar[str] = "composition"

    def load(self) -> ContigModel:
        return self.model.load()

    def num_bytes(self, lengths_nt: IntArray) -> int:
        """Return the size of the scores of contigs, of those of windows, and of the contigs' topologies."""
        return 5 * len(lengths_nt) + 4 * self.num_windows(lengths_nt)

    def num_windows(self, lengths_nt: IntArray) -> int:
        long_nt = lengths_nt[lengths_nt >= LONG_CONTIG_NT]
        return int(chunks_per_contig(long_nt, self.chunk_nt, self.min_nt).sum())

    def compute(self, index: SequenceIndex, contigs: range, loaded: ContigModel, on_share: OnShare) -> bytes:
        del on_share
        return b"".join(score_by_composition(index, contigs, loaded, chunk_nt=self.chunk_nt, min_nt=self.min_nt))

    def without_result(self, lengths_nt: IntArray) -> bytes:
        number = len(lengths_nt)
        return np.full(number + self.num_windows(lengths_nt), np.nan, np.float32).tobytes() + bytes(number)

    def join(self, units: ContigUnits) -> dict[str, int]:
        """Write scores and topologies of all contigs, and scores of windows, into a file each."""
        scored, layout = 0, self.layout
        with (
            durable.replacing(layout.composition_scores) as of_contigs,
            durable.replacing(layout.composition_windows) as of_windows,
            durable.replacing(layout.topologies) as topologies,
        ):
            for contigs, data in units.found(self):
                scores = np.frombuffer(data[: 4 * len(contigs)], np.float32)
                scored += int(np.count_nonzero(~np.isnan(scores)))
                of_contigs.write(scores.tobytes())
                of_windows.write(data[4 * len(contigs) : len(data) - len(contigs)])
                topologies.write(data[len(data) - len(contigs) :])
        return {"contigs": len(units.index), "scored": scored}

    def validate(self, lengths_nt: IntArray) -> None:
        """Raise ResultError where the files hold anything but a probability, or none, of each contig and window."""
        for path, number in (
            (self.layout.composition_scores, len(lengths_nt)),
            (self.layout.composition_windows, self.num_windows(lengths_nt)),
        ):
            scores = map_scores(path, "scores", number)
            if not np.all((scores >= 0) & (scores <= 1) | np.isnan(scores)):
                raise ResultError(path, "holds numbers that are no probabilities")

    def scores(self, index: SequenceIndex) -> FloatArray:
        """Return the joined scores of all contigs, float32 (contigs,) in input order."""
        return map_scores(self.layout.composition_scores, "scores", len(index))


@dataclass(frozen=True, kw_only=True)
class Homology(Composition):
    """Judges contigs by homology to known proteins, once their composition scores are joined: ``evidence``."""

    worker_nt: int = 250_000
    unit_nt: int = PASS_NT
    name: ClassVar[str] = "homology"
    parts: ClassVar[int] = 4  # all proteins are read for each

    def work_nt(self, index: SequenceIndex) -> IntArray:
        """Return the nucleotides that are searched."""
        is_work = is_searched(self.scores(index)) & self.model.searches_proteins
        return np.where(is_work, np.minimum(super().work_nt(index), SEARCHED_NT), 0)

    def units(self, work_nt: IntArray, num_workers: int) -> list[range]:
        """Return units as large as each other, and as many for each process that they are worth."""
        ends_nt = np.cumsum(work_nt)
        total_nt = int(ends_nt[-1]) if len(ends_nt) else 0
        if not total_nt:
            return []
        num_workers = max(1, min(num_workers, total_nt // self.worker_nt))
        number = num_workers * -(-total_nt // (num_workers * self.unit_nt))
        limits = np.searchsorted(ends_nt, total_nt * np.arange(1, number) // number, side="right")
        return [range(*one) for one in pairwise(np.unique([0, *limits.tolist(), len(ends_nt)]).tolist())]

    def num_bytes(self, lengths_nt: IntArray) -> int:
        return 4 * len(COLUMNS) * len(lengths_nt)

    def compute(self, index: SequenceIndex, contigs: range, loaded: ContigModel, on_share: OnShare) -> bytes:
        scores = self.scores(index)[contigs.start : contigs.stop]
        return judge_by_homology(index, contigs, loaded, scores, on_share).tobytes()

    def without_result(self, lengths_nt: IntArray) -> bytes:
        return without_hits(np.full(len(lengths_nt), np.nan, np.float32)).tobytes()

    def join(self, units: ContigUnits) -> dict[str, int]:
        """Write the evidence of all contigs, and the scores that it gives."""
        scores, done = self.scores(units.index), 0
        with (
            durable.replacing(self.layout.evidence) as of_contigs,
            durable.replacing(self.layout.composition_scores) as judged,
        ):
            for contigs, data in chain(units.found(self), [(range(len(scores), len(scores)), b"")]):
                unsearched = without_hits(scores[done : contigs.start])
                rows = np.concatenate([unsearched, np.frombuffer(data, np.float32).reshape(-1, len(COLUMNS))])
                of_contigs.write(rows.tobytes())
                judged.write(rows[:, 0].tobytes())
                done = contigs.stop
        return {"searched": int(np.count_nonzero(units.work_nt(self)))}
