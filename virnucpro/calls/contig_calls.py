"""
From scores of frames and contigs to calls of contigs: the table, the viral contigs, and viral regions of long ones.

A contig's score comes from its classifier's contig model (``contig_scores``), or else from ``score_by_frames``; where a
cascade does not embed a contig, it is the composition score. Two limits of the score separate viral, undecided and
non-viral contigs; ``sample_prior.call_limits`` sets them.
"""

from __future__ import annotations

import math
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from virnucpro import durable
from virnucpro.calls.frame_rules import ChunkScores, score_by_frames
from virnucpro.calls.score_files import decimals_of, map_scores
from virnucpro.calls.viral_regions import (
    LONG_CONTIG_NT,
    bed_header,
    bed_lines,
    bedgraph_header,
    bedgraph_lines,
    find_regions,
    track_id,
    track_intervals,
)
from virnucpro.choices import WrittenGenes
from virnucpro.errors import StoppedError
from virnucpro.store.contig_table import COLUMNS, SHORT_COLUMNS, UNSCORED, Call, ContigCall, ContigTable

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Mapping, Sequence

    from virnucpro.arrays import BoolArray, DoubleArray, FloatArray, IntArray
    from virnucpro.calls.evidence import Evidence, Hit
    from virnucpro.calls.frame_order import ContigBatch, FrameOrder
    from virnucpro.calls.sample_prior import CallLimits, SamplePrior
    from virnucpro.calls.score_files import ScoreReader, ScoresOfBatch
    from virnucpro.calls.viral_regions import ViralRegion
    from virnucpro.data.sequence_index import SequenceIndex
    from virnucpro.run_layout import PredictionLayout

    PArray = np.ndarray[Any, np.dtype[np.floating[Any]]]

TOO_LITTLE = "low complexity or ambiguous nucleotides: too little is left to score"
"""Reason of a contig without a composition score."""
NO_EVIDENCE = "ambiguous composition, and no known protein is similar"
"""Reason of a contig without evidence, where the share of viruses does not tell what its score is worth."""
BY_SEQUENCE = "by sequence"
"""Key of the count of embedded contigs with a score but no open frame."""
ESCAPED_IDS = "escaped ids"
"""Key of the count of contigs with an id that tracks escape."""
BY_COMPOSITION = "viral by composition"
"""Key of the count of viral contigs without a hit."""

_OF_FRAMES = ("open_chunks", "viral_chunks", "frames", "viral_frames")
"""Columns that are unknown of a contig that is not embedded."""
_LINE_NT = 60
_SKIPPED_AT_ONCE = 1 << 12
_SHOWN_DIGITS = 6
"""Of posterior and false discovery rate."""
_SCORE_DIGITS = 15
"""Digits of a contig's score: the top contigs differ in the tenth."""


@dataclass(frozen=True, kw_only=True)
class CallOutputs:
    """What is written of the calls, beside ``contigs.tsv``, ``viral.fasta``, tracks and regions; genes are later."""

    as_json: bool = False
    as_parquet: bool = False
    genes: WrittenGenes = WrittenGenes.NONE
    """Contigs with written genes."""
    only_viral: bool = False
    """Whether tables, tracks and regions hold the viral contigs alone."""
    has_frames: bool = True
    """Whether the tables have the columns of frames."""

    def table(self, layout: PredictionLayout) -> ContigTable:
        return ContigTable(
            layout.contigs,
            COLUMNS if self.has_frames else SHORT_COLUMNS,
            as_json=layout.contigs_json if self.as_json else None,
            as_parquet=layout.contigs_parquet if self.as_parquet else None,
        )

    def has_genes_of(self, call: Call) -> bool:
        """Whether the genes of contigs with this call are written."""
        return self.genes is WrittenGenes.ALL or (self.genes is WrittenGenes.VIRAL and call is Call.VIRUS)

    def lists(self, call: Call) -> bool:
        """Whether contigs with this call are in the tables."""
        return call is Call.VIRUS or not self.only_viral


@dataclass(frozen=True, kw_only=True)
class CallRules:
    limits: CallLimits
    """Of the scores of contigs."""
    sample: SamplePrior | None
    """None: the posterior is not known."""
    min_nt: int
    """Shorter contigs (nucleotides) are not scored."""
    classifier: str
    """Name, for titles."""
    fingerprint: str
    """Of classifier, models and chunk length."""
    has_contig_model: bool
    """Whether a contig model scores the embedded contigs, too."""
    is_by_composition: bool
    """Whether that model reads composition alone, so that its evidence is the embedded contigs', too."""
    reads_embeddings: bool
    """Whether it reads the embeddings of their frames."""
    searches_proteins: bool
    """Whether contigs are compared with known proteins."""
    quarantined: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    """Number in the input of each contig whose composition is not computed -> failure class, processes that tried."""


def call_contigs(
    order: FrameOrder,
    layout: PredictionLayout,
    rules: CallRules,
    scores_of_contigs: ScoreReader,
    outputs: CallOutputs,
    *,
    stop: threading.Event | None = None,
) -> tuple[Counter[str], BoolArray]:
    """
    Call every contig of the input, and list skipped records after them, from the scores in *layout*.

    Returns:
        Count of each call, without skipped records, and counts by ``BY_SEQUENCE``, ``ESCAPED_IDS`` (long contigs) and
        ``BY_COMPOSITION``; and the contigs with wanted genes, bool (contigs,) in input order.
    """
    num_frames = order.num_frames
    of_frames = map_scores(layout.frame_scores, "frames", num_frames, 2) if num_frames else np.empty((0, 2), np.float32)
    calls: Counter[str] = Counter()
    has_genes: list[BoolArray] = []
    first_frame = first_contig = 0
    with _CallFiles(layout, order, rules, outputs) as files:
        for batch in order.batches():
            if stop is not None and stop.is_set():
                raise StoppedError
            last_frame = first_frame + int(batch.frames_per_chunk.sum())
            scores = np.array(of_frames[first_frame:last_frame])
            first_frame = last_frame
            of_batch = scores_of_contigs.of(batch)
            found = _calls(batch, scores, of_batch, rules)
            for number in rules.quarantined.keys() & range(first_contig, first_contig + len(found)):
                found[number - first_contig] = _unscored(found[number - first_contig], rules.quarantined[number])
            first_contig += len(found)
            calls.update(one.call for one in found)
            has_genes.append(np.array([outputs.has_genes_of(one.call) for one in found], dtype=np.bool_))
            calls[BY_SEQUENCE] += sum(one.score is not None and one.frames == 0 for one in found)
            calls[BY_COMPOSITION] += sum(
                one.call is Call.VIRUS and one.evidence in {"composition", "none"} for one in found
            )
            calls[ESCAPED_IDS] += sum(
                track_id(one.contig) != one.contig for one in found if (one.length or 0) >= LONG_CONTIG_NT
            )
            files.write(batch, found, _browser_lines(batch, scores, of_batch, order.chunk_nt, rules))
        if not outputs.only_viral:
            _list_skipped(order.index, files.table, rules)
    return calls, np.concatenate([np.empty(0, np.bool_), *has_genes])


class _CallFiles:
    def __init__(self, layout: PredictionLayout, order: FrameOrder, rules: CallRules, outputs: CallOutputs) -> None:
        self._layout, self._index, self._rules, self._outputs = layout, order.index, rules, outputs
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        layout, rules = self._layout, self._rules
        with ExitStack() as stack:
            self.table = stack.enter_context(self._outputs.table(layout))
            self._fasta, self._tracks, self._regions, self._proviruses = (
                stack.enter_context(durable.replacing(path))
                for path in (layout.viral_fasta, layout.tracks, layout.viral_regions, layout.proviruses)
            )
            self._tracks.write(bedgraph_header(rules.classifier, rules.fingerprint).encode())
            self._regions.write(bed_header(rules.classifier, rules.fingerprint).encode())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> bool | None:  # noqa: PYI036  passed through
        return self._stack.__exit__(*error)

    def write(
        self,
        batch: ContigBatch,
        found: Sequence[ContigCall],
        long_contigs: Iterator[tuple[int, str, list[ViralRegion]]],
    ) -> None:
        """Write the contigs of a batch; of each long one its place in the batch, bedGraph lines, and viral regions."""
        outputs = self._outputs
        self.table.write([one for one in found if outputs.lists(one.call)])
        for position, one in zip(batch.positions.tolist(), found, strict=True):
            if one.call is Call.VIRUS:
                record = self._index.read(position)
                self._fasta.write(_fasta(record.header, record.sequence))
        for contig, track, regions in long_contigs:
            if outputs.lists(found[contig].call):
                name = batch.contig_ids[contig]
                self._tracks.write(track.encode())
                self._regions.write(bed_lines(name, regions).encode())
                parts = [region for region in regions if region.end - region.start < batch.lengths_nt[contig]]
                letters = self._index.read(int(batch.positions[contig])).sequence if parts else ""
                for region in parts:
                    header = f"{name}|{region.start + 1}-{region.end}".encode()
                    self._proviruses.write(_fasta(header, letters[region.start : region.end]))


def _calls(batch: ContigBatch, scores: FloatArray, by_model: ScoresOfBatch, rules: CallRules) -> list[ContigCall]:
    frames_per_chunk = batch.frames_per_chunk
    chunk_ends = np.cumsum(batch.chunks_per_contig)
    frame_ends = _ends(frames_per_chunk, chunk_ends)
    frames_per_contig = np.diff(frame_ends, prepend=0)
    embedded, frames = batch.is_embedded.tolist(), frames_per_contig.tolist()
    scored = _sums(~np.isnan(scores[:, 1]), frame_ends)
    of_contigs = decimals_of(by_model.contigs)
    if not rules.has_contig_model:
        by_frames = score_by_frames(scores[:, 1], frames_per_contig)
        either = zip(of_contigs, _rounded(by_frames, _SCORE_DIGITS), embedded, strict=True)
        of_contigs = [of_frames if is_embedded else of_composition for of_composition, of_frames, is_embedded in either]
    columns = {
        "contig": batch.contig_ids,
        "length": batch.lengths_nt.tolist(),
        "chunks": batch.chunks_per_contig.tolist(),
        "embedded": embedded,
        "open_chunks": _sums(frames_per_chunk > 0, chunk_ends),
        "viral_chunks": _sums(ChunkScores.of(scores, frames_per_chunk).is_viral, chunk_ends),
        "frames": frames,
        "viral_frames": _sums(scores[:, 1] > scores[:, 0], frame_ends),
        "score": of_contigs,
        "max_score": decimals_of(ChunkScores.of(scores, frames_per_contig).max_p_virus),
        "fingerprint": [rules.fingerprint] * len(frames),
        **_evidence_columns(by_model.evidence, embedded, of_contigs, rules),
    }
    columns["frame_support"] = [
        round(viral / of, 3) if of else None for viral, of in zip(columns["viral_frames"], scored, strict=True)
    ]
    rests_on = (columns[name] for name in ("chunks", "embedded", "frames", "evidence"))
    decided = map(partial(_call_and_reason, rules), *rests_on, scored, of_contigs)
    columns["call"], columns["reason"] = zip(*decided, strict=True)
    for name in _OF_FRAMES:
        columns[name] = [number if one else None for number, one in zip(columns[name], embedded, strict=True)]
    columns |= dict.fromkeys(("posterior", "fdr"), [None] * len(frames))
    if rules.sample is not None:
        known = np.array(of_contigs, dtype=np.float64)  # NaN for None
        columns["posterior"] = _rounded(rules.sample.posteriors(known), _SHOWN_DIGITS)
        columns["fdr"] = _rounded(rules.sample.fdrs(known), _SHOWN_DIGITS)
    return list(map(ContigCall._make, zip(*(columns[name] for name in COLUMNS), strict=True)))


def _evidence_columns(
    evidence: Sequence[Evidence], embedded: Sequence[bool], scores: Sequence[float | None], rules: CallRules
) -> dict[str, list[Any]]:
    """Return the columns of evidence; *scores* of embedded contigs rest on frames where no model reads composition."""
    rest_on_frames = [is_embedded and not rules.is_by_composition for is_embedded in embedded]
    kinds = [
        "" if score is None else "frames" if on_frames else one.kind
        for one, on_frames, score in zip(evidence, rest_on_frames, scores, strict=True)
    ]
    columns: dict[str, list[Any]] = {"evidence": kinds, "topology": [one.topology for one in evidence]}
    for side in ("viral", "cellular"):
        hits: list[Hit | None] = [getattr(one, side) for one in evidence]
        columns[f"{side}_hit"] = ["" if hit is None else hit.name for hit in hits]
        columns[f"{side}_identity"] = [None if hit is None else hit.identity for hit in hits]
        columns[f"{side}_bits"] = [None if hit is None else hit.bits for hit in hits]
    return columns


def _unscored(one: ContigCall, why: tuple[str, int]) -> ContigCall:
    """Return the call of a contig that ended the processes computing its composition."""
    if one.call is not Call.UNDECIDED:  # too short for a score, or scored by its embeddings
        return one
    failure, attempts = why
    return one._replace(reason=f"not scored: it ended {attempts} processes ({failure}), see failed_sequences.tsv")


def _rounded(numbers: DoubleArray, digits: int) -> list[float | None]:
    """Return numbers of *digits* significant digits, None for NaN."""
    return [float(f"{number:.{digits}g}") if number == number else None for number in numbers.tolist()]  # noqa: PLR0124


def _call_and_reason(
    rules: CallRules, chunks: int, embedded: bool, frames: int, evidence: str, scored: int, score: float | None
) -> tuple[Call, str]:
    """Return the call, and the reason for none or what its score lacks."""
    if not chunks:
        return Call.TOO_SHORT, f"shorter than the minimal length of {rules.min_nt} nt"
    if score is None and (rules.has_contig_model or not embedded):
        return Call.UNDECIDED, TOO_LITTLE
    if score is None and not frames:
        return Call.NO_OPEN_FRAME, "every frame of every chunk has a stop codon or no codon of A, C, G and T"
    if score is None:
        return Call.UNDECIDED, "none of its frames could be embedded: see failed_sequences.tsv"
    if evidence == "none" and rules.searches_proteins and rules.sample is None:
        return Call.UNDECIDED, NO_EVIDENCE
    rests_on = _what_is_missing(frames, scored) if rules.reads_embeddings and embedded else ""
    limits = rules.limits
    if score >= limits.virus_from:
        return Call.VIRUS, rests_on
    if score < limits.not_virus_below:
        return Call.NOT_VIRUS, rests_on
    why = (
        f"score between {limits.not_virus_below:.9g} and {limits.virus_from:.9g}"
        if math.isfinite(limits.virus_from)
        else "no score has so low an expected false discovery rate"
    )
    return Call.UNDECIDED, "; ".join(filter(None, [why, rests_on]))


def _what_is_missing(frames: int, scored: int) -> str:
    """Return what the score by a contig model of embeddings lacks, usually nothing."""
    if not frames:
        return "no open frame: scored by its sequence alone"
    if not scored:
        return "none of its frames could be embedded, so scored by its sequence alone: see failed_sequences.tsv"
    if scored < frames:
        return f"{frames - scored} of its {frames} frames could not be embedded: see failed_sequences.tsv"
    return ""


def _fasta(header: bytes, sequence: str) -> bytes:
    lines = "\n".join([sequence[at : at + _LINE_NT] for at in range(0, len(sequence), _LINE_NT)])
    return b">%s\n%s\n" % (header, lines.encode())


def _browser_lines(
    batch: ContigBatch, scores: FloatArray, by_model: ScoresOfBatch, chunk_nt: int, rules: CallRules
) -> Iterator[tuple[int, str, list[ViralRegion]]]:
    """Yield the place in the batch of each long contig, its bedGraph lines, and its viral regions."""
    frames_per_chunk = batch.frames_per_chunk
    chunk_ends, frame_ends = np.cumsum(batch.chunks_per_contig), np.cumsum(frames_per_chunk)
    window = 0
    for contig in np.flatnonzero(batch.lengths_nt >= LONG_CONTIG_NT).tolist():
        last = int(chunk_ends[contig])
        first = last - int(batch.chunks_per_contig[contig])
        if first == last:
            continue
        p_virus: PArray = by_model.windows[window : window + last - first]
        window += last - first
        if batch.is_embedded[contig] and not rules.has_contig_model:
            of_contig = frames_per_chunk[first:last]
            some = scores[int(frame_ends[first] - of_contig[0]) : int(frame_ends[last - 1])]
            p_virus = score_by_frames(some[:, 1], of_contig)
        starts, ends = batch.chunk_bounds(contig, chunk_nt)
        track = bedgraph_lines(batch.contig_ids[contig], track_intervals(starts, ends, p_virus))
        yield contig, track, find_regions(starts, ends, p_virus)


def _list_skipped(index: SequenceIndex, table: ContigTable, rules: CallRules) -> None:
    records = iter(index.skipped())
    while some := list(islice(records, _SKIPPED_AT_ONCE)):
        table.write(
            [
                UNSCORED._replace(
                    contig=record.sequence_id, reason=f"skipped: {record.reason}", fingerprint=rules.fingerprint
                )
                for record in some
            ]
        )


def _ends(counts: IntArray, group_ends: IntArray) -> IntArray:
    """Return the cumulative *counts* at the end of each group, int64 (groups,)."""
    before = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    ends: IntArray = before[group_ends]
    return ends


def _sums(values: np.ndarray[Any, Any], group_ends: IntArray) -> list[int]:
    """Return the sum of *values* in each group of neighbours."""
    sums: list[int] = np.diff(_ends(values, group_ends), prepend=0).tolist()
    return sums
