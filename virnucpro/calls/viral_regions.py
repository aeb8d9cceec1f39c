"""
Viral regions of long contigs: P(virus) along the sequence and runs of viral chunks, as bedGraph and BED.

Works on the arrays of one contig. Positions are 0-based and half open. Formats as in UCSC's FAQ
(https://genome.ucsc.edu/FAQ/FAQformat.html, 1 and 1.8): bedGraph intervals of a contig do not overlap, and a BED score
is a whole number from 0 to 1000.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from virnucpro.arrays import BoolArray, IntArray

    FloatArray = np.ndarray[Any, np.dtype[np.floating[Any]]]

LONG_CONTIG_NT = 10_000
"""Least nucleotides of a contig with a track."""
MIN_VIRAL_CHUNKS = 3
"""Least viral chunks of a region."""
MAX_BRIDGED_CHUNKS = 2
"""Most chunks in a row within a region that are not viral or have no open frame."""

_MAX_SCORE = 1000
_BED_NAME_CHARACTERS = 255


class TrackIntervals(NamedTuple):
    """P(virus) along one contig where known, in sequence order."""

    starts: IntArray
    """int64 (intervals,): 0-based nt."""
    ends: IntArray
    """int64 (intervals,): 0-based nt, exclusive; never beyond the next start."""
    p_virus: FloatArray
    """(intervals,): from 0 to 1."""


class ViralRegion(NamedTuple):
    """A run of viral chunks in one contig."""

    start: int
    """0-based nt: start of its first viral chunk."""
    end: int
    """0-based nt, exclusive: end of its last viral chunk."""
    p_virus: float
    """Mean over its chunks with an open frame."""
    viral_chunks: int
    chunks: int
    """All chunks in it, viral or bridged."""


def track_intervals(starts: IntArray, ends: IntArray, p_virus: FloatArray) -> TrackIntervals:
    """
    Turn the overlapping chunks of a contig into adjacent intervals that meet in the middle of each overlap.

    Args:
        starts: int64 (chunks,): 0-based nt, each at least 2 beyond the one before.
        ends: int64 (chunks,): exclusive, not descending.
        p_virus: (chunks,): NaN for a chunk without an open frame, which gets no interval.
    """
    limits = np.concatenate([starts[:1], (starts[1:] + ends[:-1]) // 2, ends[-1:]])
    known = np.isfinite(p_virus)
    return TrackIntervals(limits[:-1][known], limits[1:][known], p_virus[known])


def viral_runs(starts: IntArray, ends: IntArray, p_virus: FloatArray, is_viral: BoolArray) -> list[ViralRegion]:
    """
    Find the runs of viral chunks in one contig.

    A run begins and ends with a viral chunk, has at least ``MIN_VIRAL_CHUNKS`` of them, and bridges at most
    ``MAX_BRIDGED_CHUNKS`` others in a row.

    Args:
        starts: int64 (chunks,): 0-based nt, in sequence order.
        ends: int64 (chunks,): exclusive.
        p_virus: (chunks,): NaN for a chunk without an open frame; known for every viral one.
        is_viral: bool (chunks,).
    """
    viral = np.flatnonzero(is_viral)
    runs = np.split(viral, np.flatnonzero(np.diff(viral) > MAX_BRIDGED_CHUNKS + 1) + 1)
    found = []
    for run in runs:
        if len(run) < MIN_VIRAL_CHUNKS:
            continue
        first, last = int(run[0]), int(run[-1])
        mean = float(np.nanmean(p_virus[first : last + 1], dtype=np.float64))
        found.append(ViralRegion(int(starts[first]), int(ends[last]), mean, len(run), last - first + 1))
    return found


def bedgraph_header(classifier: str, fingerprint: str) -> str:
    """Return the track line of ``tracks.bedgraph``, with a fixed scale of 0 to 1."""
    return f'track type=bedGraph name="P(virus)" {_description(classifier, fingerprint)} autoScale=off viewLimits=0:1\n'


def bedgraph_lines(contig: str, track: TrackIntervals) -> str:
    """Return one line for each interval: contig, start, end, P(virus) with four decimals."""
    columns = zip(track.starts.tolist(), track.ends.tolist(), track.p_virus.tolist(), strict=True)
    return "".join(f"{contig}\t{start}\t{end}\t{p:.4f}\n" for start, end, p in columns)


def bed_header(classifier: str, fingerprint: str) -> str:
    """Return the track line of ``viral_regions.bed``: a higher score is darker."""
    return f'track name="viral regions" {_description(classifier, fingerprint)} useScore=1\n'


def bed_lines(contig: str, regions: Iterable[ViralRegion]) -> str:
    """
    Return one BED6 line for each region, without a strand.

    The name is ``{contig}_region_N``, N from 1, truncated to the format's 255 characters; the score is 1000 times
    P(virus).
    """
    lines = []
    for number, region in enumerate(regions, start=1):
        suffix = f"_region_{number}"
        name = contig[: _BED_NAME_CHARACTERS - len(suffix)] + suffix
        score = round(_MAX_SCORE * min(max(region.p_virus, 0.0), 1.0))
        lines.append(f"{contig}\t{region.start}\t{region.end}\t{name}\t{score}\t.\n")
    return "".join(lines)


def _description(classifier: str, fingerprint: str) -> str:
    """Return the attribute as one line without double quotes."""
    text = " ".join(f"virnucpro {classifier} {fingerprint}".replace('"', "'").split())
    return f'description="{text}"'
