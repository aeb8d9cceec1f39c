"""
``contigs.tsv``: one typed record for each contig of the input, written as TSV, JSON and Parquet and read back from TSV.

All formats have the same columns in the same order; an unknown number is empty in TSV, null elsewhere. Columns of
frames are there where frames were embedded.
"""

from __future__ import annotations

import csv
import importlib
import json
import sys
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TextIO

from virnucpro import durable
from virnucpro.errors import ResultError
from virnucpro.run_folders import only_regular
from virnucpro.store.results.parquet import parquet_writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    Write = Callable[[Sequence["ContigCall"]], object]


class Call(StrEnum):
    VIRUS = "virus"
    NOT_VIRUS = "not virus"
    UNDECIDED = "undecided"
    TOO_SHORT = "too short"
    NO_OPEN_FRAME = "no open frame"


class ContigCall(NamedTuple):
    contig: str
    """Id: the header up to the first space or tab."""
    length: int | None
    """Nucleotides; None for a skipped record."""
    score: float | None
    """P(virus) of the contig, to rank by; None without a scored frame or a word of nucleotides."""
    call: Call
    reason: str
    """Why there is no call, or what the score lacks; usually empty."""
    evidence: str
    """What the score rests on: homology, composition, both, none, or frames; empty without a score."""
    viral_hit: str
    """Accession and organism of the genome whose protein is the best viral hit; empty without one."""
    viral_identity: float | None
    """Share of identical residues in its alignment, three decimals."""
    viral_bits: float | None
    """Score of its alignment in bits, one decimal."""
    cellular_hit: str
    """The best hit among proteins of cellular genomes, likewise."""
    cellular_identity: float | None
    cellular_bits: float | None
    posterior: float | None
    """P(virus) given the share of viruses in the sample, six digits; None without a score, or with the prior off."""
    fdr: float | None
    """Expected share of others among the contigs of at least this score, six digits; None as ``posterior``."""
    topology: str
    """linear, direct terminal repeat or inverted terminal repeat; empty where composition is not read."""
    chunks: int | None
    embedded: bool
    """Whether its frames were embedded and scored: yes or no in TSV. Where not, what frames tell is None."""
    open_chunks: int | None
    """Chunks with an open frame."""
    viral_chunks: int | None
    """Chunks whose highest P(virus) is at least their highest P(other)."""
    frames: int | None
    viral_frames: int | None
    """Open frames that are more likely viral than not."""
    frame_support: float | None
    """Viral share of the scored frames, three decimals; None without any."""
    max_score: float | None
    """Highest P(virus) of its frames, as in ``prediction_results.txt``."""
    fingerprint: str
    """Of classifier, models and chunk length; scores compare only within one."""


COLUMNS = ContigCall._fields
"""Of a table where frames are embedded."""
SHORT_COLUMNS = COLUMNS[: COLUMNS.index("chunks")]
"""Of any other; what is not there reads as None, False or empty."""
INTEGERS = ("length", "chunks", "open_chunks", "viral_chunks", "frames", "viral_frames")
NUMBERS = (
    "score",
    *("viral_identity", "viral_bits", "cellular_identity", "cellular_bits"),
    *("posterior", "fdr", "frame_support", "max_score"),
)


UNSCORED = ContigCall._make(
    Call.UNDECIDED if name == "call" else False if name == "embedded" else None if name in {*INTEGERS, *NUMBERS} else ""
    for name in COLUMNS
)
"""A record without known values."""


def _integer(text: str) -> int | None:
    return int(text) if text else None


def _number(text: str) -> float | None:
    return float(text) if text else None


_OF_TEXTS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(COLUMNS, str),
    **dict.fromkeys(INTEGERS, _integer),
    **dict.fromkeys(NUMBERS, _number),
    "embedded": {"yes": True, "no": False}.__getitem__,
    "call": {str(call): call for call in Call}.__getitem__,
    "fingerprint": sys.intern,  # the same in every line
}
"""Column -> its value from text."""
_ABSENT = UNSCORED[len(SHORT_COLUMNS) :]
"""Values of the columns that a short table lacks."""
_ROWS_AT_ONCE = 1 << 10
"""Lines that are read at once, a column after the other: in half the time that one after the other takes."""


class ContigTable:
    """Context manager that writes the table in up to three formats, each atomically; *columns*: of either table."""

    def __init__(
        self,
        tsv: Path,
        columns: Sequence[str] = COLUMNS,
        *,
        as_json: Path | None = None,
        as_parquet: Path | None = None,
    ) -> None:
        self._columns = columns
        self._formats = ((tsv, _writing_tsv), (as_json, _writing_json), (as_parquet, _writing_parquet))
        self._stack = ExitStack()
        self._writers: list[Write] = []

    def write(self, calls: Sequence[ContigCall]) -> None:
        for write in self._writers:
            write(calls)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for path, writing in self._formats:
                if path is not None:
                    file = stack.enter_context(durable.replacing(path))
                    self._writers.append(stack.enter_context(writing(file, self._columns)))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> bool | None:  # noqa: PYI036  passed through
        return self._stack.__exit__(*error)


@contextmanager
def _writing_tsv(file: durable.NewFile, names: Sequence[str]) -> Iterator[Write]:
    def write(calls: Sequence[ContigCall]) -> None:
        columns = [texts(values) for values in islice(zip(*calls, strict=True), len(names))]
        file.write("".join(["\t".join(row) + "\n" for row in zip(*columns, strict=True)]).encode())

    file.write(("\t".join(names) + "\n").encode())
    yield write


def texts(column: Iterable[Any]) -> list[str]:
    """Return the values of a column as TSV has them."""
    return ["" if v is None else "yes" if v is True else "no" if v is False else str(v) for v in column]


@contextmanager
def _writing_json(file: durable.NewFile, names: Sequence[str]) -> Iterator[Write]:
    before = "[\n"

    def write(calls: Sequence[ContigCall]) -> None:
        nonlocal before
        if calls:
            text = ",\n".join([json.dumps(dict(zip(names, call, strict=False)), ensure_ascii=False) for call in calls])
            file.write((before + text).encode())
            before = ",\n"

    yield write
    file.write(b"[]\n" if before == "[\n" else b"\n]\n")


@contextmanager
def _writing_parquet(file: durable.NewFile, names: Sequence[str]) -> Iterator[Write]:
    arrow: Any = importlib.import_module("pyarrow")  # an optional extra, and heavy
    kinds = {name: arrow.int64() for name in INTEGERS} | {name: arrow.float64() for name in NUMBERS}
    kinds["embedded"] = arrow.bool_()
    columns = arrow.schema([(name, kinds.get(name, arrow.string())) for name in names])

    def write(calls: Sequence[ContigCall]) -> None:
        if calls:
            rows = [dict(zip(names, call, strict=False)) for call in calls]
            writer.write_table(arrow.Table.from_pylist(rows, schema=columns))

    with parquet_writer(file, columns) as writer:
        yield write


def read_contig_calls(path: Path) -> Iterator[ContigCall]:
    """Yield the contigs of a ``contigs.tsv``, in input order."""
    try:
        with open(path, encoding="utf-8", newline="\n", opener=only_regular) as file:
            yield from _parsed(file, path)
    except OSError as error:
        raise ResultError(path, error.strerror or str(error)) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ResultError(path, f"is not a table of contigs ({error})") from error


def _parsed(file: TextIO, path: Path) -> Iterator[ContigCall]:
    rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE, lineterminator="\n")
    columns = tuple(next(rows, COLUMNS))
    if columns not in {COLUMNS, SHORT_COLUMNS}:
        raise ResultError(path, "is not a table of contigs of this version")
    while batch := list(islice(rows, _ROWS_AT_ONCE)):
        yield from _calls_of(batch, columns, path, rows.line_num - len(batch) + 1)


def _calls_of(rows: Sequence[Sequence[str]], names: Sequence[str], path: Path, first: int) -> list[ContigCall]:
    """Return the contigs of rows, beginning with line *first*; ResultError names a line that is not a contig."""
    try:
        columns = zip(names, zip(*rows, strict=True), strict=True)
        found = [map(_OF_TEXTS[name], column) for name, column in columns]
        absent = [repeat(value) for value in _ABSENT[: len(COLUMNS) - len(names)]]
        return list(map(ContigCall, *found, *absent))
    except (KeyError, ValueError) as error:
        if len(rows) > 1:
            lines = enumerate(rows, start=first)
            return [one for number, row in lines for one in _calls_of([row], names, path, number)]
        raise ResultError(path, f"line {first} is not a contig ({error})") from error
