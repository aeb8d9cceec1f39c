"""
``contigs.tsv``: one line a contig of the input, as a typed record, written in several formats and read again.

All formats hold the same columns in the same order. A number that is not known is an empty field, null in JSON.
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
    """What is said of a contig."""

    VIRUS = "virus"
    NOT_VIRUS = "not virus"
    UNDECIDED = "undecided"
    TOO_SHORT = "too short"
    NO_OPEN_FRAME = "no open frame"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContigCall:
    """What was found out about one contig."""

    contig: str
    """Its id: the header up to the first space or tab."""
    length: int | None
    """Nucleotides; None for a record that was left out."""
    chunks: int
    """Chunks that it was cut into."""
    open_chunks: int
    """Chunks with an open frame."""
    viral_chunks: int
    """Chunks whose highest P(virus) is at least their highest P(other)."""
    frames: int
    """Open frames."""
    viral_frames: int
    """Open frames that are more likely viral than not."""
    frame_support: float | None
    """Share of the scored frames that are viral, three decimals; None where there is no scored frame."""
    score: float | None
    """P(virus) of the contig: the number to rank by; None where nothing could be scored."""
    max_score: float | None
    """Highest P(virus) of its frames, as in ``prediction_results.txt``."""
    call: Call
    """What is said of it."""
    reason: str
    """Why there is no call, or what the score does without; as a rule empty."""
    fingerprint: str
    """Of classifier, models and chunk length: scores of different ones are not to be compared."""


COLUMNS = tuple(field.name for field in fields(ContigCall))
_INTEGERS = ("chunks", "open_chunks", "viral_chunks", "frames", "viral_frames")
_NUMBERS = ("frame_support", "score", "max_score")


class ContigTable:
    """
    Context manager that writes the table in all formats asked for; each file is whole or as it was before.

    Args:
        tsv: Where the table goes.
        as_json: Where it goes as a JSON array; None writes none.
        as_parquet: Where it goes as a Parquet table; None writes none.

    Raises:
        OutputError: A file cannot be written.
    """

    def __init__(self, tsv: Path, *, as_json: Path | None = None, as_parquet: Path | None = None) -> None:
        self._paths = (tsv, as_json, as_parquet)
        self._stack = ExitStack()
        self._writers: list[_TsvWriter | _JsonWriter | _ParquetWriter] = []

    def write(self, calls: Sequence[ContigCall]) -> None:
        """Append some contigs."""
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

    def __exit__(self, *error: Any) -> bool | None:  # noqa: PYI036  handed on as they are
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
    """A new file as pyarrow wants to write to one."""

    def __init__(self, file: durable.NewFile) -> None:
        super().__init__()
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._file.write(data)


def read_contig_calls(path: Path) -> Iterator[ContigCall]:
    """
    Yield the contigs of a ``contigs.tsv``, in the order of the input.

    Raises:
        ResultError: It cannot be read, or is not one.
    """
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
            raise ResultError(path, f"line {number} is no contig ({error})") from error
