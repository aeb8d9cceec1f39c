"""
Calls of reads, from the calls of the contigs that they map to.

Reads a PAF of any size whose lines are grouped by read, as minimap2 writes it; memory grows with the contigs alone.
Tables are replaced as a whole, once all of it was accepted. Reads that the PAF does not name are unknown here.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import combinations, count, groupby, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from virnucpro import durable
from virnucpro.data.fasta import read_header
from virnucpro.data.reading.text_files import open_text
from virnucpro.errors import BadInputError, InputProblem
from virnucpro.run_layout import PredictionLayout
from virnucpro.store.contig_table import Call, read_contig_calls
from virnucpro.store.reader import finished_manifest
from virnucpro.store.sorted_lines import SortedLines

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path


class ReadCall(StrEnum):
    VIRUS = "virus"
    NOT_VIRUS = "not virus"
    AMBIGUOUS = "ambiguous"
    """It maps equally well to a viral contig and to one that is not."""
    UNDECIDED = "undecided"
    """None of the contigs that it maps to has a call."""
    UNMAPPED = "unmapped"


READS, CONTIGS = "reads.tsv", "reads_per_contig.tsv"
"""Names of the two tables: a line for each read, and for each contig."""
READ_COLUMNS = ("read", "length", "call", "contigs", "score", "identity", "covered")
CONTIG_COLUMNS = ("contig", "length", "call", "reads", "bases", "shared_reads", "shared_bases")
MATES = (b"/1", b"/2")
"""Ends of the names of two reads of one pair; each has a call of its own."""
_BITS = {Call.VIRUS: 1, Call.NOT_VIRUS: 2}
_CALL_OF_BITS = (ReadCall.UNDECIDED, ReadCall.VIRUS, ReadCall.NOT_VIRUS, ReadCall.AMBIGUOUS)
_NUMBER = rb"(\d{1,10})"
_LINE = re.compile(
    rb"([^\t]*)\tN\tN\tN\t[^\t]*\t([^\t]+)\tN\t[^\t]*\t[^\t]*\tN\tN\t[^\t\r\n]+(?:[\t\r\n]|$)".replace(b"N", _NUMBER)
)
"""Read, its length, start, end, contig, its length, matching bases, bases of the alignment, tags."""
_MOST = (1 << 31) - 1
"""Largest number of a PAF, as of minimap2: sums of them stay exact."""
_MOST_LINE_BYTES = 64 << 20
"""Longest line: an alignment of a long read may come with its CIGAR."""
_SCORE = re.compile(rb"\tAS:i:(-?\d{1,10})(?=[\t\r\n]|$)")
_SAME_PART = 0.75
"""Part of a read above which minimap2 never has two primary alignments: mates that share a name have."""
_COMPARED = 64
"""Most primary alignments of a read that are compared with each other."""
_NO_CONTIG = b"*"
_ROWS_AT_ONCE = 1 << 13
_GIVE_PAF = "give a PAF as minimap2 writes it"
_MAP_AGAIN = "map the reads to the contigs that this prediction was made of"
_MATES_SHARE = (
    "end the names of mates in /1 and /2, as predict does, then map them again: "
    "awk 'NR%4==1 {$1=$1\"/1\"} 1' R1 > NEW_R1"
)
_NOT_GROUPED = "sort it by read with: sort -k1,1 -s FILE; of an index in several parts, minimap2 needs --split-prefix"


class _Alignment(NamedTuple):
    line: int
    """1-based."""
    read: bytes
    length: int
    """Bases of the read."""
    start: int
    """0-based, of its aligned part."""
    end: int
    """Exclusive."""
    contig: int
    """Its row in the table; -1 where the read maps to none."""
    matches: int
    """Matching bases."""
    columns: int
    """Bases of the alignment, gaps included."""
    is_primary: bool
    """Whether the mapper calls it primary, tp:A:P."""
    score: int | None
    """AS:i, the score of the alignment by its bases; None where the mapper did not align them."""

    @property
    def aligned(self) -> int:
        """Bases of the read that are aligned."""
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class ReadLabels:
    reads: dict[str, int]
    """Call -> reads."""
    bases: dict[str, int]
    """Call -> bases of these reads."""
    shared: int
    """Reads that map equally well to several contigs."""
    mates: int
    """Reads whose name ends in /1 or /2."""
    lists_unmapped: bool
    """Whether the PAF names reads that map to no contig."""
    reads_path: Path
    contigs_path: Path

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "reads_path": str(self.reads_path), "contigs_path": str(self.contigs_path)}


def label_reads(paf: str, prediction: Path, folder: Path) -> ReadLabels:
    """
    Write the call of each read of a PAF, and the reads of each contig.

    Args:
        paf: Plain or compressed; ``-`` is standard input.
        prediction: Folder of a finished prediction.
        folder: Where the tables go.

    Raises:
        ResultError: The prediction is absent, damaged or not finished.
        BadInputError: The PAF is unreadable, not grouped by read, or of other contigs.
        OutputError: A table cannot be written.
    """
    contigs = _Contigs(prediction)
    name = "standard input" if paf == "-" else paf
    seen = _Seen()
    with durable.replacing(folder / READS) as table, SortedLines(folder) as names:
        table.write(_row(READ_COLUMNS))
        for groups in _batched(_by_read(paf, name, contigs)):
            names.add([b"%b\t%d\n" % (group[0].read, group[0].line) for group in groups])
            table.write(b"".join([_row(_labelled(group, contigs, seen)) for group in groups]))
        _refuse_scattered(names, name)
        durable.write_bytes(folder / CONTIGS, contigs.table())
    return ReadLabels(
        reads=seen.reads,
        bases=seen.bases,
        shared=seen.shared,
        mates=seen.mates,
        lists_unmapped=seen.reads[ReadCall.UNMAPPED] > 0,
        reads_path=folder / READS,
        contigs_path=folder / CONTIGS,
    )


class _Contigs:
    """Name, length and call of each contig of a prediction, and what maps to it."""

    def __init__(self, prediction: Path) -> None:
        layout = PredictionLayout(prediction)
        manifest = finished_manifest(layout)
        manifest.check_whole(layout.contigs)
        manifest.check_file(layout.contigs)
        self._path = layout.contigs
        self.names, self.lengths, self.calls = [], [], []
        for one in read_contig_calls(layout.contigs):
            self.names.append(one.contig.encode())
            self.lengths.append(one.length)
            self.calls.append(one.call)
        self._rows = {name: row for row, name in enumerate(self.names)}
        self.bits = [_BITS.get(call, 0) for call in self.calls]
        self.counts = np.zeros((len(self.names), 4), np.int64)
        """Reads and bases of each contig, then those that it shares with other contigs."""

    def row_of(self, name: bytes, length: int) -> int:
        """Return the row of a contig. Raises LookupError: it is not one of the prediction's."""
        row = self._rows.get(name)
        if row is None:
            raise LookupError(f"the contig is not in {self._path}")
        if self.lengths[row] not in (length, None):
            raise LookupError(f"the contig has {length:,} bases, and {self.lengths[row]:,} in {self._path}")
        return row

    def table(self) -> bytes:
        lengths = ["" if length is None else length for length in self.lengths]
        rows = zip(self.names, lengths, self.calls, *self.counts.T.tolist(), strict=True)
        return b"".join(map(_row, [CONTIG_COLUMNS, *rows]))


class _Seen:
    def __init__(self) -> None:
        self.reads = {str(call): 0 for call in ReadCall}
        self.bases = dict(self.reads)
        self.shared = self.mates = 0


def _labelled(alignments: Sequence[_Alignment], contigs: _Contigs, seen: _Seen) -> tuple[Any, ...]:
    """Return the row of a read, and count it."""
    first = alignments[0]
    seen.mates += first.read.endswith(MATES)
    mapped = [one for one in alignments if one.contig >= 0]
    if not mapped:
        seen.reads[ReadCall.UNMAPPED] += 1
        seen.bases[ReadCall.UNMAPPED] += first.length
        return first.read, first.length, ReadCall.UNMAPPED, "", "", "", ""
    best, score = best_of(mapped)
    rows = {one.contig: one for one in reversed(best)}  # of each contig its first alignment
    bits = 0
    for row, one in rows.items():
        bits |= contigs.bits[row]
        place = 0 if len(rows) == 1 else 2
        contigs.counts[row, place : place + 2] += (1, one.aligned)
    call, top = _CALL_OF_BITS[bits], best[0]
    seen.reads[call] += 1
    seen.bases[call] += top.length
    seen.shared += len(rows) > 1
    names = b",".join(contigs.names[row] for row in sorted(rows))
    identity, covered = top.matches / max(top.columns, 1), top.aligned / max(top.length, 1)
    return top.read, top.length, call, names, score, f"{identity:.4f}", f"{covered:.4f}"


def best_of(alignments: Sequence[_Alignment]) -> tuple[list[_Alignment], int]:
    """Return the best alignments of a read and their score: AS:i where each has one, else matching bases."""
    scores = [one.score for one in alignments if one.score is not None]
    if len(scores) < len(alignments):
        scores = [one.matches for one in alignments]
    top = max(scores)
    return [one for one, score in zip(alignments, scores, strict=True) if score == top], top


def _by_read(paf: str, name: str, contigs: _Contigs) -> Iterator[list[_Alignment]]:
    parsed = (_parsed(line, number, name, contigs) for number, line in enumerate(_lines(paf, name), start=1))
    for read, group in groupby(parsed, key=attrgetter("read")):
        lines = list(group)
        if len(lines) > 1 and _are_of_mates(lines):
            what = f"alignments of two reads with one name, the first in line {lines[0].line}"
            raise _unusable(name, lines[-1].line, what, _MATES_SHARE, read)
        yield lines


def _are_of_mates(lines: Sequence[_Alignment]) -> bool:
    """Whether several lines with one name cannot be of one read."""
    if len({one.length for one in lines}) > 1 or any(one.contig < 0 for one in lines):
        return True
    primary = [(one.start, one.end) for one in lines if one.is_primary][:_COMPARED]
    return any(
        min(ends) - max(starts) > _SAME_PART * max(one[1] - one[0] for one in pair)
        for pair in combinations(primary, 2)
        for starts, ends in [zip(*pair, strict=True)]
    )


def _lines(paf: str, name: str) -> Iterator[bytes]:
    with open_text(paf) as file:
        for number in count(1):
            line = file.readline(_MOST_LINE_BYTES + 1)
            if len(line) > _MOST_LINE_BYTES:
                raise _unusable(name, number, f"a line of more than {_MOST_LINE_BYTES:,} bytes", _GIVE_PAF)
            if not line:
                return
            yield line


def _parsed(line: bytes, number: int, name: str, contigs: _Contigs) -> _Alignment:
    if line.startswith((b"@HD\t", b"@SQ\t", b"@PG\t")):
        raise _unusable(name, number, "SAM, not PAF", "leave out minimap2's option -a")
    fields = _LINE.match(line)
    if fields is None:
        raise _unusable(name, number, "no alignment of a PAF", _GIVE_PAF)
    read, contig = fields[1], fields[5]
    length, start, end, contig_nt, matches, columns = numbers = [int(fields[place]) for place in (2, 3, 4, 6, 7, 8)]
    score = _SCORE.search(line)
    is_possible = start <= end <= length and matches <= columns and max(numbers) <= _MOST
    if not is_possible or (score is None and b"\tAS:i:" in line):
        raise _unusable(name, number, "no alignment of a PAF", _GIVE_PAF)
    name_alone, fault = read_header(read, number)
    if fault is not None or name_alone != read:
        what, remedy = ("blank or line end in the name", "remove it") if fault is None else fault[1:]
        raise _unusable(name, number, f"read: {what}", remedy, read)
    row = -1
    if contig != _NO_CONTIG:
        try:
            row = contigs.row_of(contig, contig_nt)
        except LookupError as error:
            raise _unusable(name, number, error.args[0], _MAP_AGAIN, contig) from None
    is_primary = b"\ttp:A:P" in line
    return _Alignment(
        number, read, length, start, end, row, matches, columns, is_primary, None if score is None else int(score[1])
    )


def _refuse_scattered(names: SortedLines, name: str) -> None:
    """Check that the lines of each read stood together; *names*: name, tab, line of each group; *name*: the PAF's."""
    lines = (line for piece in names.pieces() for line in piece.splitlines())
    for (read, line), (next_read, next_line) in pairwise(one.rsplit(b"\t", 1) for one in lines):
        if read == next_read:
            what = f"not grouped by read: line {min(int(line), int(next_line))} is of the same read"
            raise _unusable(name, max(int(line), int(next_line)), what, _NOT_GROUPED, read)


def _unusable(name: str, line: int | None, what: str, remedy: str, sequence_id: bytes | None = None) -> BadInputError:
    shown = None if sequence_id is None else sequence_id.decode(errors="replace")
    return BadInputError([InputProblem(name, line, what, remedy, shown)])


def _batched(groups: Iterable[list[_Alignment]]) -> Iterator[list[list[_Alignment]]]:
    batch = []
    for group in groups:
        batch.append(group)
        if len(batch) == _ROWS_AT_ONCE:
            yield batch
            batch = []
    yield batch


def _row(values: Iterable[Any]) -> bytes:
    return b"\t".join([one if isinstance(one, bytes) else str(one).encode() for one in values]) + b"\n"
