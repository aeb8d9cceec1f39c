"""The files with scores of contigs and of windows along the long ones: from composition, or from the classifier."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import orjson

from virnucpro.arrays import mapped
from virnucpro.calls.evidence import COLUMNS as EVIDENCE_COLUMNS
from virnucpro.calls.evidence import NO_EVIDENCE, read_evidence
from virnucpro.calls.viral_regions import LONG_CONTIG_NT
from virnucpro.data.frames import chunks_per_contig
from virnucpro.errors import ResultError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from virnucpro.arrays import BoolArray, ByteArray, FloatArray
    from virnucpro.calls.contig_scores import ScoreFiles
    from virnucpro.calls.evidence import Evidence
    from virnucpro.calls.frame_order import ContigBatch, FrameOrder


class ScoresOfBatch(NamedTuple):
    contigs: FloatArray
    """float32 (contigs,): NaN without a score, or where only the frames give one."""
    windows: FloatArray
    """float32 (chunks of its long contigs,): likewise."""
    evidence: list[Evidence]
    """Of each contig."""


class ScoreReader:
    """
    Scores of all contigs, batch by batch.

    *own*: by the classifier's contig model. *composition*: of the contigs that are not embedded; None where all are, or
    *own* has them. *evidence*: files of evidence and topologies of all contigs, and a reader of genome records' names.
    """

    def __init__(
        self,
        order: FrameOrder,
        own: ScoreFiles | None,
        composition: ScoreFiles | None,
        evidence: tuple[Path, Path, Callable[[], Sequence[str]]] | None = None,
    ) -> None:
        lengths = order.index.lengths
        long_contigs = lengths[: np.count_nonzero(lengths[:] >= LONG_CONTIG_NT)]  # the longest come first
        num_windows = int(chunks_per_contig(long_contigs, order.chunk_nt, order.min_nt).sum())
        sizes = (("scores", len(order.index)), ("windows", num_windows))
        self._own, self._composition = (
            None if files is None else [map_scores(path, *size) for path, size in zip(files, sizes, strict=True)]
            for files in (own, composition)
        )
        self._evidence = None
        if evidence is not None:
            rows, topologies, self._read_records = evidence
            self._records: Sequence[str] | None = None
            number = len(order.index)
            self._evidence = (
                map_scores(rows, "scores", number, len(EVIDENCE_COLUMNS)),
                map_topologies(topologies, number),
            )
        self._is_embedded = order.is_embedded
        self._next_contig = self._next_window = 0

    def of(self, batch: ContigBatch) -> ScoresOfBatch:
        is_long = batch.lengths_nt >= LONG_CONTIG_NT
        chunks_of_long = batch.chunks_per_contig[is_long]
        contigs = slice(self._next_contig, self._next_contig + len(batch.contig_ids))
        windows = slice(self._next_window, self._next_window + int(chunks_of_long.sum()))
        self._next_contig, self._next_window = contigs.stop, windows.stop
        is_embedded = np.repeat(batch.is_embedded[is_long], chunks_of_long)
        evidence = [NO_EVIDENCE] * len(batch.contig_ids)
        if self._evidence is not None:
            rows, topologies = self._evidence
            if self._records is None:
                self._records = self._read_records()
            evidence = read_evidence(rows[contigs], topologies[contigs], self._records)
        scores = self._joined(0, contigs, batch.is_embedded), self._joined(1, windows, is_embedded)
        return ScoresOfBatch(*scores, evidence)

    def of_all_contigs(self) -> FloatArray:
        """Return the scores of all contigs, float32 (contigs,)."""
        return self._joined(0, slice(0, len(self._is_embedded)), self._is_embedded)

    def _joined(self, kind: int, some: slice, is_embedded: BoolArray) -> FloatArray:
        """Return scores of contigs (0) or windows (1)."""
        found = np.full(some.stop - some.start, np.nan, dtype=np.float32)
        if self._own is not None:
            found = np.array(self._own[kind][some])
        return found if self._composition is None else np.where(is_embedded, found, self._composition[kind][some])


def map_scores(path: Path, what: str, *shape: int) -> FloatArray:
    """Map float32 of *shape*; *what* its rows are of."""
    found, expected = path.stat().st_size, 4 * math.prod(shape)
    if found != expected:
        raise ResultError(path, f"has {found} bytes, {shape[0]} {what} take {expected}")
    return mapped(path, np.float32, *shape) if expected else np.empty(shape, dtype=np.float32)


def map_topologies(path: Path, number: int) -> ByteArray:
    if (found := path.stat().st_size) != number:
        raise ResultError(path, f"has {found} bytes, {number} contigs take as many")
    return mapped(path, np.uint8, number) if number else np.empty(0, dtype=np.uint8)


def decimals_of(scores: FloatArray) -> list[float | None]:
    """Return the number that each float32 prints as, the shortest that reads back as the same; None for NaN."""
    found: list[float | None] = orjson.loads(
        orjson.dumps(np.ascontiguousarray(scores), option=orjson.OPT_SERIALIZE_NUMPY)
    )
    return found
