"""
Viral regions of long contigs: P(virus) along the sequence and its most likely viral stretches, as bedGraph and BED.

Works on the arrays of one contig. Positions are 0-based and half open. Formats as in UCSC's FAQ
(https://genome.ucsc.edu/FAQ/FAQformat.html, 1 and 1.8): bedGraph intervals of a contig do not overlap, and a BED score
is a whole number from 0 to 1000.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from virnucpro.arrays import BoolArray, DoubleArray, IntArray

    FloatArray = np.ndarray[Any, np.dtype[np.floating[Any]]]

LONG_CONTIG_NT = 10_000
"""Least nucleotides of a contig with a track."""
NEUTRAL_P = 0.5
"""P(virus) of a chunk that is evidence neither for a region nor against one, whatever the threshold of calls is."""
SWITCH_COST = 5.0
"""Log-odds that the chunks beyond a border need together."""
MOST_LOG_ODDS = 4.0
"""Most log-odds that one chunk gives for either state. Both constants: ``benchmarks/regions.py --choose``."""

_CONTROL_WORDS = ("#", "track", "browser")
_LEAST_P = 1e-12
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
    """A viral stretch of one contig."""

    start: int
    """0-based nt: start of its first chunk."""
    end: int
    """0-based nt, exclusive: end of its last chunk."""
    p_virus: float
    """Mean over its chunks that have one."""


def track_intervals(starts: IntArray, ends: IntArray, p_virus: FloatArray) -> TrackIntervals:
    """
    Turn the overlapping chunks of a contig into adjacent intervals that meet in the middle of each overlap.

    Arguments as of ``find_regions``, each start at least 2 beyond the one before. NaN chunks have no interval.
    """
    limits = np.concatenate([starts[:1], (starts[1:] + ends[:-1]) // 2, ends[-1:]])
    known = np.isfinite(p_virus)
    return TrackIntervals(limits[:-1][known], limits[1:][known], p_virus[known])


def find_regions(
    starts: IntArray, ends: IntArray, p_virus: FloatArray, neutral_p: float = NEUTRAL_P
) -> list[ViralRegion]:
    """
    Divide one contig into viral and non-viral stretches, and return the viral ones.

    The most likely path of a hidden Markov model of two states (Viterbi 1967). A chunk's evidence for a virus is the
    log-odds of its P(virus) less that of *neutral_p*, at most ``MOST_LOG_ODDS`` either way; a switch of states costs
    ``SWITCH_COST``, which covers that neighbours share letters. A contig may begin and end in either state. Chunks
    without P(virus) give no evidence: a region bridges them, and neither begins nor ends with one.

    Args:
        starts: int64 (chunks,): 0-based nt, in sequence order.
        ends: int64 (chunks,): exclusive.
        p_virus: (chunks,): NaN where unknown.
    """
    is_known = np.isfinite(p_virus)
    evidence = np.zeros(len(p_virus))
    evidence[is_known] = np.clip(
        _log_odds(p_virus[is_known]) - _log_odds(np.array(neutral_p)), -MOST_LOG_ODDS, MOST_LOG_ODDS
    )
    is_viral = _most_likely_states(evidence)
    borders = np.flatnonzero(np.diff(is_viral, prepend=False, append=False)).reshape(-1, 2)
    found = []
    for first, after in borders.tolist():
        known = first + np.flatnonzero(is_known[first:after])
        mean = float(p_virus[known].mean(dtype=np.float64))
        found.append(ViralRegion(int(starts[known[0]]), int(ends[known[-1]]), mean))
    return found


def _log_odds(p: FloatArray) -> DoubleArray:
    bounded = np.clip(p.astype(np.float64), _LEAST_P, 1 - _LEAST_P)
    return np.asarray(np.log(bounded) - np.log1p(-bounded))


def _most_likely_states(evidence: DoubleArray) -> BoolArray:
    """
    Return where the most likely path is viral, bool (chunks,).

    Viterbi's two best paths up to a chunk are kept as their difference, the viral path's lead. Where it exceeds the
    cost of a switch, the best path goes through that state, whatever follows; elsewhere it stays in the next chunk's.
    """
    leads = []
    lead = 0.0
    for one in evidence.tolist():
        lead = max(-SWITCH_COST, min(SWITCH_COST, lead)) + one
        leads.append(lead)
    is_viral = np.zeros(len(leads), dtype=np.bool_)
    state = lead > 0
    for chunk in range(len(leads) - 1, -1, -1):
        if abs(leads[chunk]) > SWITCH_COST:
            state = leads[chunk] > 0
        is_viral[chunk] = state
    return is_viral


def bedgraph_header(classifier: str, fingerprint: str) -> str:
    return f'track type=bedGraph name="score" {_description(classifier, fingerprint)} autoScale=off viewLimits=0:1\n'


def track_id(contig: str) -> str:
    """Return an id as tracks hold it: one that browsers and bedtools take for a control line begins with ``%XX``."""
    return f"%{ord(contig[0]):02X}{contig[1:]}" if contig.startswith(_CONTROL_WORDS) else contig


def bedgraph_lines(contig: str, track: TrackIntervals) -> str:
    """Return one line for each interval: contig, start, end, P(virus) with four decimals."""
    columns = zip(track.starts.tolist(), track.ends.tolist(), track.p_virus.tolist(), strict=True)
    contig = track_id(contig)
    return "".join(f"{contig}\t{start}\t{end}\t{p:.4f}\n" for start, end, p in columns)


def bed_header(classifier: str, fingerprint: str) -> str:
    """Return the track line of ``viral_regions.bed``: a higher score is darker."""
    return f'track name="viral regions" {_description(classifier, fingerprint)} useScore=1\n'


def bed_lines(contig: str, regions: Iterable[ViralRegion]) -> str:
    """Return one BED6 line for each region: ``{contig}_region_N``, truncated to 255 characters, score 1000 P(virus)."""
    lines = []
    for number, region in enumerate(regions, start=1):
        suffix = f"_region_{number}"
        name = contig[: _BED_NAME_CHARACTERS - len(suffix)] + suffix
        score = round(_MAX_SCORE * min(max(region.p_virus, 0.0), 1.0))
        lines.append(f"{track_id(contig)}\t{region.start}\t{region.end}\t{name}\t{score}\t.\n")
    return "".join(lines)


def _description(classifier: str, fingerprint: str) -> str:
    """Return the attribute as one line without double quotes."""
    text = " ".join(f"virnucpro {classifier} {fingerprint}".replace('"', "'").split())
    return f'description="{text}"'
