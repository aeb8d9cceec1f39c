"""
What a report reads of contigs: the lines of ``contigs.tsv`` with their viral regions, and the tracks of a few.

``contigs.tsv`` and ``viral_regions.bed`` are in the order of the input, so they are read side by side, one line at a
time. A track longer than ``TRACK_STEPS`` is averaged over windows of equal length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from virnucpro.errors import ResultError
from virnucpro.store.contig_table import Call, ContigCall, read_contig_calls

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

NO_SCORE = "no score"
"""Shown instead of a call for a contig that could not be scored; its reason says why."""
GROUPS = (Call.VIRUS, Call.UNDECIDED, Call.NOT_VIRUS, Call.TOO_SHORT, NO_SCORE)
"""Groups in which contigs are counted."""

TRACK_STEPS = 1000
"""Steps in one track."""
_TRACK_LINE = "track "
"""A contig's name ends at its first space, so no contig's line begins so."""
_END: tuple[None, tuple[()]] = (None, ())
_REMEDY = "start the same `virnucpro predict` command again to write it anew"


class Region(NamedTuple):
    """A viral region of a contig."""

    start: int
    """0-based nt; *end* is exclusive."""
    end: int
    score: int
    """0 to 1000."""


class ContigLine(NamedTuple):
    """A contig with its viral regions."""

    number: int
    """From 0, in the order of the file."""
    found: ContigCall
    regions: tuple[Region, ...]

    @property
    def group(self) -> str:
        """One of ``GROUPS``."""
        has_no_call = self.found.score is None and self.found.call is not Call.TOO_SHORT
        return NO_SCORE if has_no_call else self.found.call

    @property
    def rank(self) -> tuple[float, int, int]:
        """Sorts by score, then length, then order of the input; the greatest comes first."""
        score = -1.0 if self.found.score is None else self.found.score
        return score, self.length_nt, -self.number

    @property
    def length_nt(self) -> int:
        """Nucleotides; 0 for a skipped record."""
        return self.found.length or 0

    @property
    def region_nt(self) -> int:
        return sum(region.end - region.start for region in self.regions)


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


def read_contig_lines(contigs: Path, viral_regions: Path) -> Iterator[ContigLine]:
    """Yield every line of *contigs*; raise if a region belongs to no contig or is out of order."""
    regions = _read_regions(viral_regions)
    next_contig, next_regions = next(regions, _END)
    for number, found in enumerate(read_contig_calls(contigs)):
        mine: tuple[Region, ...] = ()
        if next_contig == found.contig:
            mine = next_regions
            next_contig, next_regions = next(regions, _END)
        yield ContigLine(number, found, mine)
    if next_contig is not None:
        what = f"its region of {next_contig!r} is of no contig, or not in the order of {contigs.name}: {_REMEDY}"
        raise ResultError(viral_regions, what)


def read_columns(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the 1-based number and the tab-separated columns of every line but ``track`` lines."""
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                if not line.startswith(_TRACK_LINE):
                    yield number, line.removesuffix("\n").split("\t")
    except OSError as error:
        raise ResultError(path, f"cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise ResultError(path, f"is not UTF-8 text ({error}): {_REMEDY}") from error


def _read_regions(path: Path) -> Iterator[tuple[str, tuple[Region, ...]]]:
    try:
        for contig, lines in groupby(read_columns(path), key=lambda line: line[1][0]):
            yield contig, tuple(Region(int(start), int(end), int(score)) for _, (_, start, end, _, score, *_) in lines)
    except ValueError as error:
        raise ResultError(path, f"a line cannot be read ({error}): {_REMEDY}") from error


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
