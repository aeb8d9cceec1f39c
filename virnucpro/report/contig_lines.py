"""
The lines of ``contigs.tsv``, each with its viral regions from ``viral_regions.bed``, as one stream.

Both files are in the order of the input, so they are read side by side, one line at a time.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from virnucpro.errors import ResultError
from virnucpro.store.contig_table import Call, ContigCall, read_contig_calls

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NO_SCORE = "no score"
"""Shown instead of a call for a contig that could not be scored; its reason says why."""
GROUPS = (Call.VIRUS, Call.UNDECIDED, Call.NOT_VIRUS, Call.TOO_SHORT, NO_SCORE)
"""Groups in which contigs are counted."""

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
