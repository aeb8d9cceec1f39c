"""
Scores of whole contigs, and along long ones, by a classifier's contig model.

Input of the model: sequence features and, where it takes them, the mean DNA and mean protein embedding of the frames
(zeros without any), and the numbers of frames and chunks. Along a contig of at least ``LONG_CONTIG_NT``,
a chunk has the score of a window of itself and its two neighbours.

Low complexity is masked first. A contig is read in segments of the chunks in ``SEGMENT_NT`` nucleotides. Its sequence
features are the mean over its tiles, which lie alike on both strands, weighted by their A, C, G and T. So memory does
not depend on contig length, and a score depends on the contig alone, to the bit the same for either strand. Legend: C
chunks, S sequence features, W columns of embeddings (DNA, then protein).
"""

from __future__ import annotations

import io
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from virnucpro import durable
from virnucpro.calls.evidence import with_hits, without_hits
from virnucpro.calls.frame_order import CONTIGS_AT_ONCE, RowStream, join
from virnucpro.calls.topology import ContigEnds, Topology
from virnucpro.calls.viral_regions import LONG_CONTIG_NT
from virnucpro.data.frames import NucleotideWindow, chunk_bounds, chunks_per_contig, stream_nucleotides
from virnucpro.errors import StoppedError
from virnucpro.models.contigs.homology import SEARCHED_NT, apart, is_searched
from virnucpro.models.contigs.nucleotide_codes import OTHER, masked
from virnucpro.models.contigs.sequence_features import TABLES

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from virnucpro.arrays import BoolArray, ByteArray, DoubleArray, FloatArray, IntArray
    from virnucpro.calls.frame_order import FrameOrder
    from virnucpro.data.sequence_index import SequenceIndex
    from virnucpro.models.contigs.contig_model import ContigModel
    from virnucpro.models.contigs.protein_search import OnShare
    from virnucpro.models.contigs.sequence_features import SequenceFeatures

    ScoreFiles = tuple[Path, Path]
    """Scores of contigs, and of windows along the long ones."""

SEGMENT_NT = 10_000
"""Nucleotides of a segment, rounded up to chunks."""
TILE_NT = 20_000
"""Nucleotides of a tile, at most: the longest contigs in training."""
LEAST_LEFT_NT = 150
"""Nucleotides that a contig, if a third of it or more is masked, needs for a score."""
CHUNKS_AT_ONCE = 512
"""Chunks with embeddings in memory at once, besides the chunks of one more segment."""
ROWS_AT_ONCE = 512
"""Contigs, or windows, in one batch of the model, counted from the start of the input."""
SHORTEST_WORD_NT = min(table.span for table in TABLES if not table.is_protein)
"""Nucleotides A, C, G and T in a row that a contig needs for a score."""

_SUM_UNIT = float(1 << 20)
"""Features are added up in so small parts, as whole numbers: in any order the sum is the same."""
_REACHED_INTO = 2
"""Last chunks of a segment that are in windows of the next one."""


class _Embedded(NamedTuple):
    """The embeddings of neighbouring chunks."""

    sums_CW: DoubleArray
    """float64 (C, W): sums over each chunk's frames that have both embeddings."""
    frames_C: IntArray
    """int64 (C,): number of these frames."""

    def part(self, first: int, last: int) -> _Embedded:
        return _Embedded(self.sums_CW[first:last], self.frames_C[first:last])


class _Segment(NamedTuple):
    """Neighbouring chunks of a contig."""

    length_nt: int
    """Nucleotides of the contig."""
    chunks: int
    """Chunks of the contig; 0 for one that is not scored."""
    first: int
    last: int
    """The chunk after its last one."""
    embedded: _Embedded


class _Row(NamedTuple):
    """The model's input for a contig or a window."""

    sequence_S: FloatArray | None
    """None where they are still to be found: of ``codes``, many at a time."""
    codes: ByteArray
    sums_W: DoubleArray
    frames: int
    chunks: int


def score_contigs(
    order: FrameOrder,
    model: ContigModel,
    written: ScoreFiles,
    *,
    dna: Path,
    protein: Path,
    stop: threading.Event | None = None,
) -> None:
    """Score every contig, and every chunk of the long ones, by composition and embeddings."""
    with ExitStack() as stack:
        dna_rows, protein_rows = (stack.enter_context(RowStream(path)) for path in (dna, protein))
        of_contigs, of_windows = (stack.enter_context(durable.replacing(path)) for path in written)
        width, dna_dim = dna_rows.hidden_dim + protein_rows.hidden_dim, dna_rows.hidden_dim
        scorer = _Scorer(model, order.chunk_nt, of_contigs, of_windows, width=width, dna_dim=dna_dim)
        every = _with_chunks(order.index, range(len(order.index)), order.min_nt)
        scorer.score(_segments(order, dna_rows, protein_rows), _nucleotides(order.index, every), stop)
        for rows in (dna_rows, protein_rows):
            rows.finish()


class CompositionScores(NamedTuple):
    contigs: bytes
    """float32: P(virus) of each."""
    windows: bytes
    """float32: P(virus) of the chunks of the long ones."""
    topologies: bytes
    """uint8: ``Topology`` of each."""


def score_by_composition(
    index: SequenceIndex, contigs: range, model: ContigModel, *, chunk_nt: int, min_nt: int
) -> CompositionScores:
    """Score the *contigs*, neighbours in the input, and the chunks of long ones, by a model of composition."""
    assert not model.uses_embeddings
    of_contigs, of_windows = io.BytesIO(), io.BytesIO()
    positions = index.in_input_order()[contigs.start : contigs.stop]
    lengths = index.lengths[positions]
    segments = _bare_segments(lengths, chunks_per_contig(lengths, chunk_nt, min_nt), chunk_nt)
    scorer = _Scorer(model, chunk_nt, of_contigs, of_windows, width=0, dna_dim=0)
    scorer.score(segments, _nucleotides(index, _with_chunks(index, contigs, min_nt)))
    return CompositionScores(of_contigs.getvalue(), of_windows.getvalue(), bytes(scorer.topologies))


def judge_by_homology(
    index: SequenceIndex, contigs: range, model: ContigModel, scores: FloatArray, on_share: OnShare | None = None
) -> FloatArray:
    """Return the ``evidence`` of some contigs with composition *scores*, float32 (contigs, columns)."""
    assert model.homology is not None
    chosen = np.flatnonzero(is_searched(scores))
    numbers = contigs.start + chosen
    window = NucleotideWindow(_nucleotides(index, numbers))
    searched, first_nt = [], 0
    for length_nt in index.lengths[index.in_input_order()[numbers]].tolist():
        searched.append(_searched(window, first_nt, length_nt))
        first_nt += length_nt
    window.finish()
    evidence = without_hits(scores)
    judged = model.homology.judge(scores[chosen], searched, on_share)
    evidence[chosen] = with_hits(judged, scores[chosen], model.homology.proteins.record_N)
    return evidence


def _searched(window: NucleotideWindow, first_nt: int, length_nt: int) -> ByteArray:
    """Return the codes that are searched of a contig: all, or its ends."""
    if length_nt <= SEARCHED_NT:
        return masked(window.read(first_nt, length_nt).upper())
    half = SEARCHED_NT // 2
    return apart(*(masked(window.read(first_nt + at, half).upper()) for at in (0, length_nt - half)))


def _with_chunks(index: SequenceIndex, contigs: range, min_nt: int) -> IntArray:
    """Return the numbers of those *contigs* that have chunks, int64."""
    lengths = index.lengths[index.in_input_order()[contigs.start : contigs.stop]]
    return contigs.start + np.flatnonzero(lengths >= min_nt)


def _nucleotides(index: SequenceIndex, numbers: IntArray) -> Iterator[bytes]:
    """Yield the nucleotides of contigs, end to end; *numbers* are ascending, in the order of the input."""
    positions = index.in_input_order()
    first = 0
    for file in index.files:
        of_file = numbers[np.searchsorted(numbers, first) : np.searchsorted(numbers, first + file.num_records)]
        first += file.num_records
        for at in range(0, len(of_file), CONTIGS_AT_ONCE):
            yield from stream_nucleotides(index, positions[of_file[at : at + CONTIGS_AT_ONCE]])


def _bare_segments(lengths_nt: IntArray, chunks_per_contig: IntArray, chunk_nt: int) -> Iterator[_Segment]:
    """Yield contigs without embeddings, a segment at a time."""
    segment_chunks = -(-SEGMENT_NT // chunk_nt)
    for length_nt, chunks in zip(lengths_nt.tolist(), chunks_per_contig.tolist(), strict=True):
        for first in range(0, max(chunks, 1), segment_chunks):
            last = min(first + segment_chunks, chunks)
            nothing = _Embedded(np.empty((last - first, 0)), np.zeros(last - first, dtype=np.int64))
            yield _Segment(length_nt, chunks, first, last, nothing)


def _segments(order: FrameOrder, dna_rows: RowStream, protein_rows: RowStream) -> Iterator[_Segment]:
    """Yield all contigs, a segment at a time."""
    for batch in order.batches():
        frame_ids, per_chunk = batch.frame_ids(), batch.frames_per_chunk
        frame_ends = np.append(0, np.cumsum(per_chunk))
        end = 0
        for group in _groups(batch.chunks_per_contig.tolist(), -(-SEGMENT_NT // order.chunk_nt)):
            at, end = end, end + sum(last - first for _, first, last in group)
            has_row, rows = join(dna_rows, protein_rows, frame_ids[frame_ends[at] : frame_ends[end]])
            embedded = _sums(rows, has_row, per_chunk[at:end])
            begin = 0
            for contig, first, last in group:
                part = embedded.part(begin, begin + last - first)
                begin += last - first
                yield _Segment(int(batch.lengths_nt[contig]), int(batch.chunks_per_contig[contig]), first, last, part)


def _tiles(length_nt: int) -> list[int]:
    """Return the limits of a contig's tiles, which are the same from either end: their number is odd."""
    number = -(-length_nt // TILE_NT) | 1
    before = [place * length_nt // number for place in range(number // 2 + 1)]
    return [*before, *(length_nt - limit for limit in reversed(before))]


def _groups(chunks_per_contig: Sequence[int], segment_chunks: int) -> Iterator[list[tuple[int, int, int]]]:
    """Yield groups of segments: number of the contig, first chunk, and the chunk after the last."""
    group: list[tuple[int, int, int]] = []
    room = CHUNKS_AT_ONCE
    for contig, chunks in enumerate(chunks_per_contig):
        for first in range(0, max(chunks, 1), segment_chunks):
            last = min(first + segment_chunks, chunks)
            if group and last - first > room:
                yield group
                group, room = [], CHUNKS_AT_ONCE
            group.append((contig, first, last))
            room -= last - first
    yield group


def _sums(rows_FW: FloatArray, has_row: BoolArray, frames_per_chunk: IntArray) -> _Embedded:
    """Return the sums of the embeddings of each chunk's frames."""
    chunk_of_frame = np.repeat(np.arange(len(frames_per_chunk)), frames_per_chunk)
    frames_C = np.bincount(chunk_of_frame[has_row], minlength=len(frames_per_chunk))
    sums_CW = np.zeros((len(frames_C), rows_FW.shape[1]))
    there = np.flatnonzero(frames_C)
    if len(there):
        starts = (np.cumsum(frames_C) - frames_C)[there]
        sums_CW[there] = np.add.reduceat(rows_FW, starts, axis=0, dtype=np.float64)
    return _Embedded(sums_CW, frames_C)


class _Contig:
    """A contig read segment by segment from *segment* on; *width* is W."""

    def __init__(self, segment: _Segment, chunk_nt: int, features: SequenceFeatures, width: int) -> None:
        self._chunks, self._length_nt = segment.chunks, segment.length_nt
        self._has_windows = segment.length_nt >= LONG_CONTIG_NT
        self._starts, self._ends = chunk_bounds(segment.length_nt, chunk_nt)
        self._features = features
        self._before = _Embedded(np.empty((0, width)), np.empty(0, dtype=np.int64))
        self._tiles = _tiles(segment.length_nt)
        """Limits of the tiles that are still to be read."""
        self._ends_nt = ContigEnds(segment.length_nt)
        self._known = 0
        """Nucleotides of the tiles that are A, C, G or T, and not masked."""
        self._weight = 0
        """Of these, those that the sum of features is of."""
        self._has_word = False
        self._sequence_S: DoubleArray = np.zeros(features.dim)
        self._only: ByteArray = np.empty(0, dtype=np.uint8)
        """Codes of a contig of one tile."""
        self._sums_W: DoubleArray = np.zeros(width)
        self._frames = 0

    def read(self, segment: _Segment, nucleotides: NucleotideWindow, first_nt: int) -> Iterator[_Row | None]:
        """Read the next segment, and yield the windows that end in it; *first_nt*: offset of the contig."""
        first, last = segment.first, segment.last
        seen = first - len(self._before.frames_C)
        origin = min(int(self._starts[seen]), self._tiles[0])
        end = int(self._ends[last - 1])
        letters = nucleotides.read(first_nt + origin, end - origin).upper()
        self._ends_nt.read(origin, letters)
        while len(self._tiles) > 1 and self._tiles[1] <= end:
            start = self._tiles.pop(0)
            self._read_tile(masked(letters[start - origin : self._tiles[0] - origin]))
        self._sums_W += segment.embedded.sums_CW.sum(axis=0)
        self._frames += int(segment.embedded.frames_C.sum())
        if not self._has_windows:
            return
        starts, ends = self._starts[:last] - origin, self._ends[:last] - origin
        of_chunks = [masked(letters[starts[chunk] : ends[chunk]]) for chunk in range(seen, last)]
        chunks = range(max(first - 1, 0), last if last == self._chunks else last - 1)
        pairs = zip(self._before, segment.embedded, strict=True)
        known = _Embedded(*(np.concatenate(pair) for pair in pairs))
        for low, high in [(max(chunk - 1, 0), min(chunk + 2, self._chunks)) for chunk in chunks]:
            window = np.zeros(int(ends[high - 1] - starts[low]), dtype=np.uint8)
            for chunk in range(low, high):  # they overlap, and one may have masked what the next one has not
                at = slice(int(starts[chunk] - starts[low]), int(ends[chunk] - starts[low]))
                window[at] = np.maximum(window[at], of_chunks[chunk - seen])
            part = known.part(low - seen, high - seen)
            yield (
                _Row(None, window, part.sums_CW.sum(axis=0), int(part.frames_C.sum()), high - low)
                if _has_word(window)
                else None
            )
        self._before = known.part(max(len(known.frames_C) - _REACHED_INTO, 0), len(known.frames_C))

    def _read_tile(self, codes: ByteArray) -> None:
        known = int(np.count_nonzero(codes != OTHER))
        if len(codes) == self._length_nt:
            self._only = codes
        elif _has_word(codes):
            self._sequence_S += np.rint(known * _SUM_UNIT * self._features.of(codes).astype(np.float64))
            self._weight += known
        self._known += known
        self._has_word |= _has_word(codes)

    def topology(self) -> Topology:
        """Return the topology of a fully read contig."""
        return self._ends_nt.topology()

    def row(self) -> _Row | None:
        """Return the row of a fully read contig; None where it has no word, or too little that is not masked."""
        if not self._has_word or self._known < min(LEAST_LEFT_NT, 2 * self._length_nt / 3):
            return None
        mean_S = None if len(self._only) else (self._sequence_S / (_SUM_UNIT * self._weight)).astype(np.float32)
        return _Row(mean_S, self._only, self._sums_W, self._frames, self._chunks)


class _Scorer:
    """Reads contigs, and writes their scores and those of windows; *width* is W, *dna_dim* its columns of DNA."""

    def __init__(
        self, model: ContigModel, chunk_nt: int, of_contigs: _Sink, of_windows: _Sink, *, width: int, dna_dim: int
    ) -> None:
        self._model = model
        self._chunk_nt = chunk_nt
        self._width = width
        self._of_contigs, self._of_windows = (_Scores(sink, model, dna_dim) for sink in (of_contigs, of_windows))
        self.topologies = bytearray()
        """Of each contig."""

    def score(
        self, segments: Iterator[_Segment], nucleotides: Iterator[bytes], stop: threading.Event | None = None
    ) -> None:
        """Score the contigs of *segments*; *nucleotides* are of the contigs that have chunks."""
        window = NucleotideWindow(nucleotides)
        first_nt = 0
        for segment in segments:
            if stop is not None and stop.is_set():
                raise StoppedError
            if segment.first == 0:
                contig = _Contig(segment, self._chunk_nt, self._model.features, self._width)
            if segment.chunks:
                for row in contig.read(segment, window, first_nt):
                    self._of_windows.add(row)
            if segment.last == segment.chunks:
                self._of_contigs.add(contig.row())
                self.topologies.append(contig.topology() if segment.chunks else Topology.LINEAR)
                first_nt += segment.length_nt if segment.chunks else 0
        window.finish()
        self._of_contigs.write()
        self._of_windows.write()


class _Sink(Protocol):
    def write(self, data: bytes, /) -> object: ...


class _Scores:
    """Writes P(virus) of rows as float32, NaN for None; *dna_dim*: columns of W that are DNA embeddings."""

    def __init__(self, file: _Sink, model: ContigModel, dna_dim: int) -> None:
        self._file = file
        self._model = model
        self._dna_dim = dna_dim
        self._rows: list[_Row | None] = []

    def add(self, row: _Row | None) -> None:
        self._rows.append(row)
        if len(self._rows) == ROWS_AT_ONCE:
            self.write()

    def write(self) -> None:
        """Score and write the collected rows."""
        rows = [row for row in self._rows if row is not None]
        scores = np.full(len(self._rows), np.nan, dtype=np.float32)
        if rows:
            frames = np.array([row.frames for row in rows])
            means = (np.stack([row.sums_W for row in rows]) / np.maximum(frames, 1)[:, None]).astype(np.float32)
            scores[[row is not None for row in self._rows]] = self._model.probabilities(
                self._features_of(rows),
                means[:, : self._dna_dim],
                means[:, self._dna_dim :],
                frames,
                np.array([row.chunks for row in rows]),
            )
        self._file.write(scores.tobytes())
        self._rows = []

    def _features_of(self, rows: list[_Row]) -> FloatArray:
        """Return the features of all rows, float32 (rows, S)."""
        found = iter(self._model.features.of_many([row.codes for row in rows if row.sequence_S is None]))
        return np.stack([next(found) if row.sequence_S is None else row.sequence_S for row in rows])


def _has_word(codes: ByteArray) -> bool:
    """Whether there are ``SHORTEST_WORD_NT`` known nucleotides in a row."""
    unknown = np.flatnonzero(codes == OTHER)
    limits = np.concatenate([[-1], unknown, [len(codes)]])
    return int(np.diff(limits).max()) > SHORTEST_WORD_NT
