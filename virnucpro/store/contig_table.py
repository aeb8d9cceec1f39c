"""
``contigs.tsv``: one typed record for each contig of the input, written as TSV, JSON and Parquet and read back from TSV.

All formats have the same columns in the same order; an unknown number is empty in TSV, null elsewhere.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self, TextIO

from virnucpro import durable
from virnucpro.errors import ResultError
from virnucpro.run_folders import only_regular

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path


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
    open_chunks: int
    """Chunks with an open frame."""
    viral_chunks: int
    """Chunks whose highest P(virus) is at least their highest P(other)."""
    frames: int
    """Open frames."""
    viral_frames: int
    """Open frames that are more likely viral than not."""
    frame_support: float | None
    """Viral share of the scored frames, three decimals; None without any."""
    score: float | None
    """P(virus) of the contig, to rank by; None without a scored frame."""
    max_score: float | None
    """Highest P(virus) of its frames, as in ``prediction_results.txt``."""
    call: Call
    reason: str
    """Why there is no call, or what the score lacks; usually empty."""
    fingerprint: str
    """Of classifier, models and chunk length; scores compare only within one."""


COLUMNS = tuple(field.name for field in fields(ContigCall))
_INTEGERS = ("chunks", "open_chunks", "viral_chunks", "frames", "viral_frames")
_NUMBERS = ("frame_support", "score", "max_score")


class ContigTable:
    """Context manager that writes the table in up to three formats, each file atomically."""

    def __init__(self, tsv: Path, *, as_json: Path | None = None, as_parquet: Path | None = None) -> None:
        self._paths = (tsv, as_json, as_parquet)
        self._stack = ExitStack()
        self._writers: list[_TsvWriter | _JsonWriter | _ParquetWriter] = []

    def write(self, calls: Sequence[ContigCall]) -> None:
        for writer in self._writers:
            writer.write(calls)

    def __enter__(self) -> Self:
        tsv, as_json, as_parquet = self._paths
        with ExitStack() as stack:
            self._writers.append(stack.enter_context(_TsvWriter(stack.enter_context(durable.replacing(tsv)))))
            if as_json is not None:
                self._writers.append(stack.enter_context(_JsonWriter(stack.enter_context(durable.replacing(as_json)))))
            if as_parquet is not None:
                file = stack.enter_context(durable.replacing(as_parquet))
                self._writers.append(stack.enter_context(_ParquetWriter(file)))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> bool | None:  # noqa: PYI036  passed through
        return self._stack.__exit__(*error)


class _TsvWriter:
    def __init__(self, file: durable.NewFile) -> None:
        self._file = file

    def __enter__(self) -> Self:
        self._file.write(("\t".join(COLUMNS) + "\n").encode())
        return self

    def write(self, calls: Sequence[ContigCall]) -> None:
        rows = ([getattr(call, name) for name in COLUMNS] for call in calls)
        lines = ("\t".join(["" if value is None else str(value) for value in row]) + "\n" for row in rows)
        self._file.write("".join(lines).encode())

    def __exit__(self, *_: object) -> None:
        pass


class _JsonWriter:
    def __init__(self, file: durable.NewFile) -> None:
        self._file = file
        self._before = "[\n"

    def __enter__(self) -> Self:
        return self

    def write(self, calls: Sequence[ContigCall]) -> None:
        if calls:
            text = ",\n".join([json.dumps(asdict(call), ensure_ascii=False) for call in calls])
            self._file.write((self._before + text).encode())
            self._before = ",\n"

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._file.write(b"[]\n" if self._before == "[\n" else b"\n]\n")


class _ParquetWriter:
    def __init__(self, file: durable.NewFile) -> None:
        self._arrow: Any = importlib.import_module("pyarrow")  # an optional extra, and heavy
        parquet: Any = importlib.import_module("pyarrow.parquet")
        kinds = {name: self._arrow.int64() for name in (*_INTEGERS, "length")}
        kinds |= {name: self._arrow.float64() for name in _NUMBERS}
        self._schema = self._arrow.schema([(name, kinds.get(name, self._arrow.string())) for name in COLUMNS])
        self._writer = parquet.ParquetWriter(self._arrow.PythonFile(_Sink(file), mode="w"), self._schema)

    def __enter__(self) -> Self:
        return self

    def write(self, calls: Sequence[ContigCall]) -> None:
        if calls:
            rows = self._arrow.Table.from_pylist([asdict(call) for call in calls], schema=self._schema)
            self._writer.write_table(rows)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._writer.close()


class _Sink(io.RawIOBase):
    """A new file as pyarrow needs one."""

    def __init__(self, file: durable.NewFile) -> None:
        super().__init__()
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._file.write(data)


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
            numbers: dict[str, Any] = {name: int(texts[name]) for name in _INTEGERS}
            numbers |= {name: float(texts[name]) if texts[name] else None for name in _NUMBERS}
            numbers["length"] = int(texts["length"]) if texts["length"] else None
            yield ContigCall(**{**texts, **numbers, "call": Call(texts["call"])})
        except ValueError as error:
            raise ResultError(path, f"line {number} is not a contig ({error})") from error
