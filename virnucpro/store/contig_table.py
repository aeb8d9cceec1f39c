"""
``contigs.tsv``: one typed record for each contig of the input, written as TSV, JSON and Parquet and read back from TSV.

All formats have the same columns in the same order; an unknown number is empty in TSV, null elsewhere.
"""

from __future__ import annotations

import csv
import importlib
import json
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self, TextIO

from virnucpro import durable
from virnucpro.errors import ResultError
from virnucpro.run_folders import only_regular
from virnucpro.store.results.parquet import parquet_writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    Write = Callable[[Sequence["ContigCall"]], object]


class Call(StrEnum):
    """The call of a contig."""

    VIRUS = "virus"
    NOT_VIRUS = "not virus"
    UNDECIDED = "undecided"
    TOO_SHORT = "too short"
    NO_OPEN_FRAME = "no open frame"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContigCall:
    """One contig and its call."""

    contig: str
    """Id: the header up to the first space or tab."""
    length: int | None
    """Nucleotides; None for a skipped record."""
    chunks: int
    embedded: bool
    """Whether its frames were embedded and scored: yes or no in TSV. Where not, what frames tell is None."""
    open_chunks: int | None
    """Chunks with an open frame."""
    viral_chunks: int | None
    """Chunks whose highest P(virus) is at least their highest P(other)."""
    frames: int | None
    """Open frames."""
    viral_frames: int | None
    """Open frames that are more likely viral than not."""
    frame_support: float | None
    """Viral share of the scored frames, three decimals; None without any."""
    score: float | None
    """P(virus) of the contig, to rank by; None without a scored frame or a word of letters."""
    posterior: float | None
    """P(virus) given the share of viruses in the sample, six digits; None without a score, or with the prior off."""
    fdr: float | None
    """Expected share of others among the contigs of at least this score, six digits; None as ``posterior``."""
    max_score: float | None
    """Highest P(virus) of its frames, as in ``prediction_results.txt``."""
    call: Call
    reason: str
    """Why there is no call, or what the score lacks; usually empty."""
    fingerprint: str
    """Of classifier, models and chunk length; scores compare only within one."""


COLUMNS = tuple(ContigCall.__dataclass_fields__)
_INTEGERS = ("length", "chunks", "open_chunks", "viral_chunks", "frames", "viral_frames")
_BOOLEANS = {"yes": True, "no": False}
_NUMBERS = ("frame_support", "score", "posterior", "fdr", "max_score")


class ContigTable:
    """Context manager that writes the table in up to three formats, each file atomically."""

    def __init__(self, tsv: Path, *, as_json: Path | None = None, as_parquet: Path | None = None) -> None:
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
                    self._writers.append(stack.enter_context(writing(file)))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> bool | None:  # noqa: PYI036  passed through
        return self._stack.__exit__(*error)


@contextmanager
def _writing_tsv(file: durable.NewFile) -> Iterator[Write]:
    def write(calls: Sequence[ContigCall]) -> None:
        rows = ([getattr(call, name) for name in COLUMNS] for call in calls)
        lines = ("\t".join(map(_text, row)) + "\n" for row in rows)
        file.write("".join(lines).encode())

    file.write(("\t".join(COLUMNS) + "\n").encode())
    yield write


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)


@contextmanager
def _writing_json(file: durable.NewFile) -> Iterator[Write]:
    before = "[\n"

    def write(calls: Sequence[ContigCall]) -> None:
        nonlocal before
        if calls:
            text = ",\n".join([json.dumps(asdict(call), ensure_ascii=False) for call in calls])
            file.write((before + text).encode())
            before = ",\n"

    yield write
    file.write(b"[]\n" if before == "[\n" else b"\n]\n")


@contextmanager
def _writing_parquet(file: durable.NewFile) -> Iterator[Write]:
    arrow: Any = importlib.import_module("pyarrow")  # an optional extra, and heavy
    kinds = {name: arrow.int64() for name in _INTEGERS} | {name: arrow.float64() for name in _NUMBERS}
    kinds["embedded"] = arrow.bool_()
    columns = arrow.schema([(name, kinds.get(name, arrow.string())) for name in COLUMNS])

    def write(calls: Sequence[ContigCall]) -> None:
        if calls:
            writer.write_table(arrow.Table.from_pylist([asdict(call) for call in calls], schema=columns))

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
    rows: Iterable[list[str]] = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE, lineterminator="\n")
    for number, row in enumerate(rows, start=1):
        if number == 1:
            if tuple(row) != COLUMNS:
                raise ResultError(path, "is not a table of contigs of this version")
            continue
        try:
            texts = dict(zip(COLUMNS, row, strict=True))
            values: dict[str, Any] = {name: int(texts[name]) if texts[name] else None for name in _INTEGERS}
            values |= {name: float(texts[name]) if texts[name] else None for name in _NUMBERS}
            values["chunks"] = int(texts["chunks"])
            values["embedded"] = _BOOLEANS[texts["embedded"]]
            yield ContigCall(**{**texts, **values, "call": Call(texts["call"])})
        except (KeyError, ValueError) as error:
            raise ResultError(path, f"line {number} is not a contig ({error})") from error
