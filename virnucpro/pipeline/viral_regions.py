"""
Where in a long contig the virus is: P(virus) along the sequence, runs of viral chunks, and both as lines of text.

Works on the arrays of one contig at a time and knows neither files nor classifiers. Positions are 0-based and half
open, as bedGraph and BED have them; lines are tab-separated and end with a line feed. Both formats as UCSC describes
them (https://genome.ucsc.edu/FAQ/FAQformat.html, 1 and 1.8): within a contig the intervals of bedGraph do not
overlap, and the score of a BED line is a whole number from 0 to 1000.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    IntArray = np.ndarray[Any, np.dtype[np.int64]]
    FloatArray = np.ndarray[Any, np.dtype[np.floating[Any]]]
    BoolArray = np.ndarray[Any, np.dtype[np.bool_]]

LONG_CONTIG_NT = 10_000
"""Nucleotides from which on a contig has a track and may have regions."""
MIN_VIRAL_CHUNKS = 3
"""Viral chunks that a region holds at the least."""
MAX_BRIDGED_CHUNKS = 2
"""Chunks in a row that are not viral, or have no open frame, across which a region goes on."""

_MAX_SCORE = 1000
_BED_NAME_CHARACTERS = 255


class TrackIntervals(NamedTuple):
    """P(virus) along one contig, where it is known; in the order of the sequence."""

    starts: IntArray
    """int64 (intervals,): 0-based nt."""
    ends: IntArray
    """int64 (intervals,): 0-based nt, exclusive; never beyond the next start."""
    p_virus: FloatArray
    """(intervals,): from 0 to 1."""


class ViralRegion(NamedTuple):
    """A run of viral chunks in one contig."""

    start: int
    """0-based nt: the start of its first viral chunk."""
    end: int
    """0-based nt, exclusive: the end of its last viral chunk."""
    p_virus: float
    """Mean over its chunks that have an open frame."""
    viral_chunks: int
    """Chunks in it that are viral."""
    chunks: int
    """Chunks in it, those that are bridged included."""


def track_intervals(starts: IntArray, ends: IntArray, p_virus: FloatArray) -> TrackIntervals:
    """
    Cut a contig's chunks, which overlap a little, into intervals that do not: neighbours meet amid their overlap.

    Args:
        starts: int64 (chunks,): 0-based nt, each at least 2 beyond the one before.
        ends: int64 (chunks,): exclusive; none before the end of the chunk before, none beyond it without overlap.
        p_virus: (chunks,): NaN for a chunk without an open frame, which gets no interval.
    """
    limits = np.concatenate([starts[:1], (starts[1:] + ends[:-1]) // 2, ends[-1:]])
    known = np.isfinite(p_virus)
    return TrackIntervals(limits[:-1][known], limits[1:][known], p_virus[known])


def viral_runs(starts: IntArray, ends: IntArray, p_virus: FloatArray, is_viral: BoolArray) -> list[ViralRegion]:
    """
    Find the runs of viral chunks in one contig.

    A run starts and ends with a viral chunk, holds at least ``MIN_VIRAL_CHUNKS`` of them, and goes on across at most
    ``MAX_BRIDGED_CHUNKS`` others in a row.

    Args:
        starts: int64 (chunks,): 0-based nt, in the order of the sequence.
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
    """Return the track line of ``tracks.bedgraph``: the scale is fixed to 0..1."""
    return f'track type=bedGraph name="P(virus)" {_description(classifier, fingerprint)} autoScale=off viewLimits=0:1\n'


def bedgraph_lines(contig: str, track: TrackIntervals) -> str:
    """Return one line an interval: contig, start, end, P(virus) with four decimals."""
    columns = zip(track.starts.tolist(), track.ends.tolist(), track.p_virus.tolist(), strict=True)
    return "".join(f"{contig}\t{start}\t{end}\t{p:.4f}\n" for start, end, p in columns)


def bed_header(classifier: str, fingerprint: str) -> str:
    """Return the track line of ``viral_regions.bed``: the higher the score, the darker the region."""
    return f'track name="viral regions" {_description(classifier, fingerprint)} useScore=1\n'


def bed_lines(contig: str, regions: Iterable[ViralRegion]) -> str:
    """
    Return one line of BED6 a region: contig, start, end, name, score, and no strand.

    The name is ``{contig}_region_N``, N from 1; of a contig's name no more than fits the format's 255 characters. The
    score is 1000 times the region's P(virus), rounded.
    """
    lines = []
    for number, region in enumerate(regions, start=1):
        suffix = f"_region_{number}"
        name = contig[: _BED_NAME_CHARACTERS - len(suffix)] + suffix
        score = round(_MAX_SCORE * min(max(region.p_virus, 0.0), 1.0))
        lines.append(f"{contig}\t{region.start}\t{region.end}\t{name}\t{score}\t.\n")
    return "".join(lines)


def _description(classifier: str, fingerprint: str) -> str:
    """Return the attribute: a quoted text cannot hold a quote, and a track line is one line."""
    text = " ".join(f"virnucpro {classifier} {fingerprint}".replace('"', "'").split())
    return f'description="{text}"'
