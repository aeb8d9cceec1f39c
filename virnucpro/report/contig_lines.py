"""
The lines of ``contigs.tsv``, each with its viral regions from ``viral_regions.bed``, as one stream.

Both files are in the order of the input, so they are read side by side and nothing is kept but the line at hand.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from virnucpro.errors import ResultError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

VIRUS = "virus"
NOT_VIRUS = "not virus"
UNDECIDED = "undecided"
NO_CALL = "no call"
"""Stands on the page for every other call, and for none: each has its reason."""
CALLS = (VIRUS, UNDECIDED, NOT_VIRUS, NO_CALL)

_COLUMNS = (
    *("contig", "length", "chunks", "open_chunks", "viral_chunks", "frame_support", "score", "max_score"),
    *("call", "reason"),
)
_END: tuple[None, tuple[()]] = (None, ())
_TRACK_LINE = "track "
"""A contig's name ends at its first space, so no contig's line begins so."""
_REMEDY = "start the same `virnucpro predict` command again to write it anew"


class Region(NamedTuple):
    """A viral region of a contig."""

    start: int
    """0-based nt."""
    end: int
    """0-based nt, exclusive."""
    score: int
    """0 to 1000."""


class ContigLine(NamedTuple):
    """One contig. Numbers are None where the line has none: of a record that was left out there are no chunks."""

    number: int
    """From 0, in the order of the file."""
    contig: str
    length_nt: int | None
    chunks: int | None
    open_chunks: int | None
    viral_chunks: int | None
    frame_support: float | None
    score: float | None
    """P(virus)."""
    max_score: float | None
    call: str
    """As in the file."""
    reason: str
    regions: tuple[Region, ...]

    @property
    def group(self) -> str:
        """One of ``CALLS``."""
        return self.call if self.call in CALLS else NO_CALL

    @property
    def rank(self) -> tuple[float, int, int]:
        """The greater, the further up: by score, then length, then order of the input."""
        score = -1.0 if self.score is None else self.score
        return score, self.length_nt or 0, -self.number

    @property
    def region_nt(self) -> int:
        """Nucleotides in viral regions."""
        return sum(region.end - region.start for region in self.regions)


def read_contig_lines(contigs: Path, viral_regions: Path) -> Iterator[ContigLine]:
    """
    Yield every line of *contigs*.

    Raises:
        ResultError: A file is missing, a line cannot be read, or a region is of no contig or out of order.
    """
    regions = _read_regions(viral_regions)
    next_contig, next_regions = next(regions, _END)
    lines = read_columns(contigs)
    _, header = next(lines, (1, []))
    try:
        columns = [header.index(name) for name in _COLUMNS]
    except ValueError as error:
        raise ResultError(contigs, f"is no table of contigs ({error}): {_REMEDY}") from error
    for number, (line, fields) in enumerate(lines):
        try:
            contig, length, chunks, opened, viral, support, score, top, call, reason = [fields[c] for c in columns]
            values = (
                _int(length),
                _int(chunks),
                _int(opened),
                _int(viral),
                _float(support),
                _float(score),
                _float(top),
            )
        except (ValueError, IndexError) as error:
            raise ResultError(contigs, f"line {line} cannot be read ({error}): {_REMEDY}") from error
        mine: tuple[Region, ...] = ()
        if next_contig == contig:
            mine = next_regions
            next_contig, next_regions = next(regions, _END)
        yield ContigLine(number, contig, *values, call, reason, mine)
    if next_contig is not None:
        what = f"its region of {next_contig!r} is of no contig, or not in the order of {contigs.name}: {_REMEDY}"
        raise ResultError(viral_regions, what)


def read_columns(path: Path) -> Iterator[tuple[int, list[str]]]:
    """
    Yield the 1-based number and the tab-separated columns of every line but ``track`` lines.

    Raises:
        ResultError: The file cannot be read.
    """
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                if not line.startswith(_TRACK_LINE):
                    yield number, line.removesuffix("\n").split("\t")
    except OSError as error:
        raise ResultError(path, f"cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise ResultError(path, f"is not UTF-8 text ({error}): {_REMEDY}") from error


def _int(text: str) -> int | None:
    return int(text) if text else None


def _float(text: str) -> float | None:
    return float(text) if text else None


def _read_regions(path: Path) -> Iterator[tuple[str, tuple[Region, ...]]]:
    try:
        for contig, lines in groupby(read_columns(path), key=lambda line: line[1][0]):
            yield contig, tuple(Region(int(start), int(end), int(score)) for _, (_, start, end, _, score, *_) in lines)
    except ValueError as error:
        raise ResultError(path, f"a line cannot be read ({error}): {_REMEDY}") from error
