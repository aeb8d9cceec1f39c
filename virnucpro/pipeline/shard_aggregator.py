"""
From shards and remaining parts to one result, in the order of the input, and the proof that it is right.

Blocks are taken by number, each once, from any checked file that holds them. Every row is read once, straight from
where it lies; a few rows at a time are in memory, and some 50 bytes for each. Copies of a sequence get the row of the
one that was computed. Every record without a row is listed by id.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import structlog

from virnucpro import durable, run_folders
from virnucpro.arrays import mapped
from virnucpro.choices import ResultForm
from virnucpro.errors import SourceGoneError
from virnucpro.pipeline.blocks.finished_blocks import find_all_finished
from virnucpro.pipeline.run.run import give_way_to_result
from virnucpro.store import schema
from virnucpro.store.parts import SealedBlocks
from virnucpro.store.results.forms import remove_results, result_at, result_of
from virnucpro.store.schema import BlockOrigin
from virnucpro.this_host import merged_processors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from virnucpro.arrays import BoolArray, FloatArray, IntArray
    from virnucpro.data.packing import BlockPlan
    from virnucpro.data.sequence_index import SequenceIndex
    from virnucpro.pipeline.blocks.finished_blocks import FinishedBlocks
    from virnucpro.pipeline.hosts.result_passes import ResultPasses
    from virnucpro.run_layout import RunLayout
    from virnucpro.store.results.result import Hosts

log = structlog.get_logger(__name__)

FAILED_HEADER = "sequence_id\treason\tattempts\n"
_POSITIONS, _PLACES, _KEPT = "positions", "places", "kept_"
"""Names of stored files."""
_STORED_AT_ONCE = 1 << 20
"""Rows stored at a time."""


@dataclass(frozen=True, kw_only=True)
class Aggregation:
    output_path: Path | None
    """The result file, or the folder of its shards; its partial name where rows are missing, None where there is no
    row."""
    files: Mapping[str, str]
    """Hex sha256 of each file of the result, by its name in the run's folder."""
    num_rows: int
    num_truncated: int
    """Rows whose sequence was truncated to the residue limit."""
    missing_positions: IntArray = field(compare=False)
    """int64 (num_missing,): index positions of those records, in the order of the input."""
    num_resplit_blocks: int = 0
    """Blocks whose rows were computed in pieces."""
    num_cached_blocks: int = 0
    """Blocks whose rows came from the embedding cache."""
    num_widened_blocks: int = 0
    """Blocks of which some rows overflowed, and were computed in float32."""
    processors: dict[str, list[str]] = field(default_factory=dict)
    """What computed the rows."""

    @property
    def num_missing(self) -> int:
        """Records of the input without a row, copies counted."""
        return len(self.missing_positions)

    @property
    def is_complete(self) -> bool:
        return not self.num_missing


def aggregate_shards(
    layout: RunLayout,
    index: SequenceIndex,
    plan: BlockPlan,
    *,
    max_residues: int,
    hidden_dim: int,
    result_form: ResultForm = ResultForm.SINGLE,
    hosts: ResultPasses | None = None,
) -> Aggregation:
    """
    Write the result from everything that is finished.

    Ranks on hosts that no longer count may still seal shards: where a file vanishes meanwhile, all is read again.

    Args:
        max_residues: Residues of a sequence that were embedded.
        hidden_dim: Width of a row, used where there is none.
        result_form: Any but ``auto``.
        hosts: Check what exists and write the shards of a sharded result; None for this process.

    Raises:
        OutputError: The result cannot be written; the file that proves it whole is absent or as before.
    """
    while True:
        finished = find_all_finished(layout, plan, check=None if hosts is None else hosts.check)
        rows, missing = _rows_of_parts(index, finished.sources, hidden_dim=hidden_dim, max_residues=max_residues)
        try:
            return _aggregated(layout, finished, rows, missing, result_form, hosts)
        except SourceGoneError as error:
            log.info("result.begun_again", source=Path(error.path).name)


def _aggregated(
    layout: RunLayout,
    finished: FinishedBlocks,
    rows: ResultRows,
    missing: IntArray,
    result_form: ResultForm,
    hosts: ResultPasses | None,
) -> Aggregation:
    """Write the result; ``SourceGoneError`` where it must be done again."""
    if len(missing):  # an earlier result, found damaged, must not keep the name of a complete one
        remove_results(layout, is_partial=False)
    if len(missing) and not len(rows):
        remove_results(layout, is_partial=True)
        return Aggregation(output_path=None, files={}, num_rows=0, num_truncated=0, missing_positions=missing)
    result = result_of(layout, result_form, is_partial=len(missing) > 0)
    known = result.write(rows, give_way=partial(give_way_to_result, layout), hosts=hosts)
    origins = [origin for source in finished.sources for origin in source.blocks[:, 2].tolist()]
    copies = len(rows) - int(rows.starts[-1])
    log.info("result.written", result=result.path.name, rows=len(rows), copies=copies, missing=len(missing))
    return Aggregation(
        output_path=result.path,
        files={result.name_of(file): known.get(file) or durable.sha256_of(file) for file in result.files()},
        num_rows=len(rows),
        num_truncated=int((rows.truncated_from() > 0).sum()),
        missing_positions=missing,
        num_resplit_blocks=origins.count(BlockOrigin.RESPLIT),
        num_cached_blocks=origins.count(BlockOrigin.CACHED),
        num_widened_blocks=origins.count(BlockOrigin.WIDENED),
        processors=merged_processors(source.processors for source in finished.sources),
    )


def write_failed_sequences(
    layout: RunLayout,
    index: SequenceIndex,
    missing: IntArray,
    why: Callable[[int], tuple[str, int]],
) -> None:
    """
    List every record without a row, those skipped at reading first; removes an earlier list where there is none.

    Args:
        missing: int64 (num_missing,): index positions, in the order of the input.
        why: Returns (reason, worker processes that tried) of the computed sequence at an index position.
    """
    if not len(missing) and not index.num_skipped:
        durable.remove(layout.failed_sequences)
        return
    with durable.replacing(layout.failed_sequences) as file:
        file.write(FAILED_HEADER.encode())
        for record in index.skipped():
            file.write(f"{record.sequence_id}\t{record.reason}\t0\n".encode())
        for start in range(0, len(missing), schema.IDS_PER_WRITE):
            positions = missing[start : start + schema.IDS_PER_WRITE]
            computed = index.representatives[positions].tolist()
            named = zip(index.sequence_ids(positions), map(why, computed), strict=True)
            file.write("".join(f"{name}\t{reason}\t{attempts}\n" for name, (reason, attempts) in named).encode())


def validate_result(
    path: Path,
    index: SequenceIndex,
    *,
    expected_rows: int,
    expected_files: Mapping[str, str] | None,
    hosts: Hosts | None = None,
) -> None:
    """
    Prove that a result is complete: bytes, shape, ids in the input's order and each once, finite numbers.

    Args:
        expected_files: Hex sha256 of each of its files by its name in ``run.json``; None leaves their bytes unchecked.
        hosts: Check the shards of a complete result; None for this process.

    Raises:
        ResultError: Something does not hold; says what.
    """
    result_at(path).validate(RowsOfInput(index, expected_rows, expected_files), hosts=hosts)


@dataclass(frozen=True)
class RowsOfInput:
    """``ExpectedRows``: what the result of an input must hold."""

    index: SequenceIndex
    num_rows: int
    files: Mapping[str, str] | None

    @property
    def is_complete(self) -> bool:
        return self.num_rows == len(self.index)

    def iter_ids(self, rows: range | None = None) -> Iterator[list[str]]:
        positions = self._in_order if rows is None else self._in_order[rows.start : rows.stop]
        yield from _ids_at(self.index, positions)

    @cached_property
    def _in_order(self) -> IntArray:
        return self.index.in_input_order()


@dataclass(frozen=True)
class ResultRows:
    """``NewRows`` of a run: which sequence each row belongs to, and where its numbers are."""

    index: SequenceIndex
    sources: Sequence[SealedBlocks]
    """Checked parts and shards, no block in two of them."""
    starts: IntArray
    """int64 (sources + 1,): number of each source's first row over all sources and, last, the number of rows."""
    positions: IntArray
    """int64 (rows,): index position of each row's sequence."""
    places: IntArray
    """int64 (rows,): number of each row over all sources."""
    hidden_dim: int
    max_residues: int

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def id_bytes(self) -> int:
        return self.index.id_bytes_of(self.positions)

    def subset(self, rows: range) -> ResultRows:
        some = slice(rows.start, rows.stop)
        return replace(self, positions=np.array(self.positions[some]), places=np.array(self.places[some]))

    def iter_ids(self) -> Iterator[list[str]]:
        return _ids_at(self.index, self.positions)

    def truncated_from(self) -> IntArray:
        lengths = self.index.lengths[self.positions]
        return np.where(lengths > self.max_residues, lengths, 0).astype(np.int64)

    def low_information(self) -> BoolArray:
        return np.asarray(self.index.low_information[self.positions] > 0)

    def iter_rows(self) -> Iterator[tuple[IntArray, FloatArray]]:
        """Yield ascending row numbers and their rows, in disk order; ``SourceGoneError`` where a source is gone."""
        in_order = np.argsort(self.places, kind="stable")
        places = self.places[in_order]
        of_sources = pairwise(np.searchsorted(places, self.starts).tolist())
        for source, start, (first, end) in zip(self.sources, self.starts.tolist(), of_sources, strict=False):
            if first == end:  # a shard of the result has rows of few sources
                continue
            targets = in_order[first:end]
            for some, rows in source.iter_rows_at(places[first:end] - start):
                by_target = np.argsort(targets[some], kind="stable")
                yield targets[some][by_target], rows[by_target]

    def store(self, folder: Path) -> dict[str, Any]:
        """Write to *folder* where every row is, 16 bytes a row; return the rest of it, ready for JSON."""
        with durable.replacing(folder / _POSITIONS) as positions, durable.replacing(folder / _PLACES) as places:
            for start in range(0, len(self), _STORED_AT_ONCE):
                some = slice(start, start + _STORED_AT_ONCE)
                positions.write(self.positions[some].astype("<i8").tobytes())
                places.write(self.places[some].astype("<i8").tobytes())
        sources = []
        for number, source in enumerate(self.sources):
            if source.kept_rows is not None:
                durable.write_bytes(folder / f"{_KEPT}{number}", np.packbits(source.kept_rows).tobytes())
            sources.append(
                {
                    "path": str(source.path),
                    "offset_bytes": source.offset_bytes,
                    "hidden_dim": source.hidden_dim,
                    "seal": source.seal.hex(),
                    "kept_of": None if source.kept_rows is None else len(source.kept_rows),
                }
            )
        return {
            "num_rows": len(self),
            "hidden_dim": self.hidden_dim,
            "max_residues": self.max_residues,
            "starts": self.starts.tolist(),
            "sources": sources,
        }

    @classmethod
    def stored(cls, folder: Path, about: Mapping[str, Any], index: SequenceIndex) -> Self:
        """Return rows that ``store`` wrote to *folder*; *about* is what it returned. Arrays stay on disk."""
        return cls(
            index=index,
            sources=[_restored(source, folder / f"{_KEPT}{number}") for number, source in enumerate(about["sources"])],
            starts=np.array(about["starts"], dtype=np.int64),
            positions=_mapped(folder / _POSITIONS, about["num_rows"]),
            places=_mapped(folder / _PLACES, about["num_rows"]),
            hidden_dim=about["hidden_dim"],
            max_residues=about["max_residues"],
        )


def _rows_of_parts(
    index: SequenceIndex, sources: Sequence[SealedBlocks], *, hidden_dim: int, max_residues: int
) -> tuple[ResultRows, IntArray]:
    """Return every row that the sources have, and the records without one, both in the order of the input."""
    starts = np.cumsum([0, *(len(source.positions) for source in sources)])
    place = np.full(len(index), -1, dtype=np.int64)  # of a computed sequence: its row, over all sources
    for source, start in zip(sources, starts.tolist(), strict=False):
        place[source.positions] = np.arange(start, start + len(source.positions))
    in_order = index.in_input_order()
    places = place[index.representatives[in_order]]
    present = places >= 0
    rows = ResultRows(
        index=index,
        sources=sources,
        starts=starts,
        positions=in_order[present],
        places=places[present],
        hidden_dim=max((source.hidden_dim for source in sources), default=hidden_dim),
        max_residues=max_residues,
    )
    return rows, in_order[~present]


def _mapped(path: Path, num_rows: int) -> IntArray:
    return mapped(path, "<i8", num_rows) if num_rows else np.empty(0, np.int64)


def _restored(about: Mapping[str, Any], kept: Path) -> SealedBlocks:
    """Return a source whose rows can be read; which blocks it holds is no longer needed."""
    of, kept_rows = about["kept_of"], None
    if of is not None:
        kept_rows = np.unpackbits(np.frombuffer(run_folders.read_bytes(kept), np.uint8), count=of).astype(np.bool_)
    return SealedBlocks(
        path=Path(about["path"]),
        plan_fingerprint="",
        blocks=np.empty((0, 3), np.int64),
        positions=np.empty(0, np.int64),
        hidden_dim=about["hidden_dim"],
        offset_bytes=about["offset_bytes"],
        seal=bytes.fromhex(about["seal"]),
        processors={},
        kept_rows=kept_rows,
    )


def _ids_at(index: SequenceIndex, positions: IntArray) -> Iterator[list[str]]:
    for start in range(0, len(positions), schema.IDS_PER_WRITE):
        yield index.sequence_ids(positions[start : start + schema.IDS_PER_WRITE])
