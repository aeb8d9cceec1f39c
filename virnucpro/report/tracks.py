"""
P(virus) along a few contigs, from ``tracks.bedgraph``.

A track longer than ``TRACK_STEPS`` is averaged over windows of equal length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from virnucpro.errors import ResultError
from virnucpro.report.contig_lines import read_columns

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from virnucpro.report.contig_lines import ContigLine

TRACK_STEPS = 1000
"""Steps in one track."""


class Step(NamedTuple):
    """P(virus) of a stretch."""

    start: int
    """0-based nt; *end* is exclusive."""
    end: int
    p_virus: float


@dataclass(frozen=True)
class Track:
    """P(virus) along one contig."""

    contig: ContigLine
    steps: Sequence[Step]
    """In the order of the sequence, with gaps where there is no score."""
    window_nt: int | None
    """Nucleotides of each step's mean; None: one step a chunk."""


def read_tracks(path: Path, contigs: Sequence[ContigLine]) -> list[Track]:
    """Return the tracks of *contigs*, in that order; raise if one with a score has none."""
    wanted = {contig.found.contig: contig for contig in contigs}
    found: dict[str, Track] = {}
    if wanted:
        for name, lines in groupby(read_columns(path), key=lambda line: line[1][0]):
            if name in wanted:
                found[name] = _make_track(path, wanted[name], [columns for _, columns in lines])
                if len(found) == len(wanted):
                    break
    missing = next((name for name in wanted if name not in found), None)
    if missing is not None:
        raise ResultError(path, f"has no track of {missing!r}, which has a score")
    return [found[contig.found.contig] for contig in contigs]


def _make_track(path: Path, contig: ContigLine, lines: Iterable[Sequence[str]]) -> Track:
    try:
        steps = [Step(int(start), int(end), float(p)) for _, start, end, p in lines]
    except ValueError as error:
        raise ResultError(path, f"a line of {contig.found.contig!r} cannot be read ({error})") from error
    if len(steps) <= TRACK_STEPS:
        return Track(contig, steps, None)
    window_nt = _round_up(math.ceil(steps[-1].end / TRACK_STEPS))
    return Track(contig, list(_averaged(steps, window_nt)), window_nt)


def _averaged(steps: Iterable[Step], window_nt: int) -> Iterator[Step]:
    """Yield the mean of each window over its nucleotides with a score."""
    sums: dict[int, tuple[int, float]] = {}
    last_nt = 0
    for step in steps:
        for window in range(step.start // window_nt, (step.end - 1) // window_nt + 1):
            covered = min(step.end, (window + 1) * window_nt) - max(step.start, window * window_nt)
            nt, total = sums.get(window, (0, 0.0))
            sums[window] = (nt + covered, total + covered * step.p_virus)
        last_nt = step.end
    for window, (nt, total) in sums.items():
        yield Step(window * window_nt, min((window + 1) * window_nt, last_nt), total / nt)


def _round_up(number: int) -> int:
    """Return the next 1, 2 or 5 times a power of ten."""
    power = int("1" + "0" * (len(str(number)) - 1))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= number)
