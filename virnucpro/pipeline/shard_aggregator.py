"""
From shards and left-over parts to one result file, in the order of the input; and the proof that it is right.

Blocks are taken by number, each once, from whatever checked file holds them. Copies of a sequence get the row of the
one that was computed. What has no row is listed by id: nothing is dropped in silence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog

from virnucpro import durable
from virnucpro.errors import ResultError, printable
from virnucpro.pipeline import disk_space
from virnucpro.pipeline.finished_blocks import find_finished_blocks
from virnucpro.store import schema
from virnucpro.store.parts import RowWriter
from virnucpro.store.schema import BlockOrigin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from virnucpro.data.packing import BlockPlan
    from virnucpro.data.sequence_index import SequenceIndex
    from virnucpro.pipeline.finished_blocks import FinishedBlocks
    from virnucpro.run_layout import RunLayout
    from virnucpro.store.parts import SealedBlocks

    IntArray = np.ndarray[Any, np.dtype[np.int64]]
    BoolArray = np.ndarray[Any, np.dtype[np.bool_]]

log = structlog.get_logger(__name__)

FAILED_HEADER = "sequence_id\treason\tattempts\n"


@dataclass(frozen=True, kw_only=True)
class Aggregation:
    """What came out of putting a run together."""

    output_path: Path | None
    """``embeddings.h5``, or ``embeddings.partial.h5`` where rows are missing, or None where there is no row."""
    sha256: str | None
    """Hex sha256 of that file."""
    num_rows: int
    """Rows in it."""
    num_missing: int
    """Records of the input without a row, copies counted."""
    num_truncated: int
    """Rows whose sequence was cut to the residue limit."""
    missing_positions: IntArray = field(compare=False)
    """int64 (num_missing,): index positions of those records, in the order of the input."""
    num_resplit_blocks: int = 0
    """Blocks whose rows were computed in pieces."""
    num_cached_blocks: int = 0
    """Blocks whose rows came from the embedding cache."""

    @property
    def is_complete(self) -> bool:
        """Whether every record has its row."""
        return self.num_missing == 0


def aggregate_shards(
    layout: RunLayout, index: SequenceIndex, plan: BlockPlan, *, max_residues: int, hidden_dim: int
) -> Aggregation:
    """
    Write the result file from everything that is finished.

    Args:
        layout: The run's folder.
        index: The input.
        plan: Of the run.
        max_residues: Residues of a sequence that were embedded.
        hidden_dim: Width of a row, used where there is none.

    Returns:
        What was written and what is missing.

    Raises:
        OutputError: The result cannot be written; the final name is absent or as it was.
    """
    finished = find_finished_blocks(layout, plan)
    present = _present_records(index, finished.sources)
    num_rows = int(present.sum())
    num_missing = len(index) - num_rows
    if num_missing:  # a result of before, found damaged, must not stand under the name that says complete
        durable.remove(layout.embeddings)
    missing = np.flatnonzero(~present)
    missing = missing[np.argsort(index.input_rows[missing], kind="stable")]
    if num_rows == 0 and num_missing:
        durable.remove(layout.partial_embeddings)
        return Aggregation(
            output_path=None,
            sha256=None,
            num_rows=0,
            num_missing=num_missing,
            num_truncated=0,
            missing_positions=missing,
        )
    path = layout.partial_embeddings if num_missing else layout.embeddings
    width = max((source.hidden_dim for source in finished.sources), default=hidden_dim)
    disk_space.give_way_to_result(layout)
    num_truncated = _write_result(path, index, finished, present, width, max_residues)
    origins = [origin for source in finished.sources for origin in source.blocks[:, 2].tolist()]
    num_copies = num_rows - sum(len(source.positions) for source in finished.sources)
    log.info("result.written", result=path.name, rows=num_rows, copies=num_copies, missing=num_missing)
    return Aggregation(
        output_path=path,
        sha256=durable.sha256_of(path),
        num_rows=num_rows,
        num_missing=num_missing,
        num_truncated=num_truncated,
        missing_positions=missing,
        num_resplit_blocks=origins.count(BlockOrigin.RESPLIT),
        num_cached_blocks=origins.count(BlockOrigin.CACHED),
    )


def write_failed_sequences(
    layout: RunLayout,
    index: SequenceIndex,
    missing: IntArray,
    why: Callable[[int], tuple[str, int]],
) -> None:
    """
    List every record without a row, those left out at reading first; an earlier run's list goes when there is none.

    Args:
        layout: The run's folder.
        index: The input.
        missing: int64 (num_missing,): index positions, in the order of the input.
        why: Returns (reason, worker processes that tried) of the computed sequence at an index position.

    Raises:
        OutputError: The list cannot be written.
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


def validate_result(path: Path, index: SequenceIndex, *, expected_rows: int, expected_sha256: str | None) -> None:
    """
    Prove that a result file is whole: bytes, shape, ids in the input's order and each once, finite numbers.

    Args:
        path: ``embeddings.h5`` or ``embeddings.partial.h5``.
        index: The input.
        expected_rows: Rows that it must have.
        expected_sha256: Hex sha256 that its bytes must have, or None to leave that out.

    Raises:
        ResultError: Something does not hold; says what.
    """
    if not path.is_file():
        raise ResultError(path, "is missing")
    if expected_sha256 is not None and durable.sha256_of(path) != expected_sha256:
        raise ResultError(path, "damaged: its sha256 is not the one that run.json recorded")
    with schema.open_checked(path) as file:
        rows = schema.embeddings_of(file, path)
        if rows.shape[0] != expected_rows:
            raise ResultError(path, f"has {rows.shape[0]} rows, expected {expected_rows}")
        _check_ids(schema.iter_sequence_ids(file, path), index, path, expected_rows)
        step = schema.rows_at_once(rows.shape[1])
        for start in range(0, rows.shape[0], step):
            if not np.isfinite(rows[start : start + step]).all():
                raise ResultError(path, f"a number in rows {start} to {start + step - 1} is not finite")


def _check_ids(found: Iterator[list[str]], index: SequenceIndex, path: Path, num_rows: int) -> None:
    """Ids must be the input's in its order; in a partial file some are left out."""
    expected = _ids_in_input_order(index, np.ones(len(index), dtype=np.bool_))
    is_complete = num_rows == len(index)
    for names in found:
        for name in names:
            wanted = next(expected, None)
            while not is_complete and wanted is not None and wanted != name:
                wanted = next(expected, None)
            if wanted != name:
                raise ResultError(path, f"id {printable(name)!r} is not the input's, or stands in the wrong place")


def _present_records(index: SequenceIndex, sources: list[SealedBlocks]) -> BoolArray:
    """Return, for every index position, whether its sequence (or the one it is a copy of) has a row."""
    present = np.zeros(len(index), dtype=np.bool_)
    for source in sources:
        present[source.positions] = True
    return np.asarray(present[index.representatives[:]])


def _write_result(
    path: Path, index: SequenceIndex, finished: FinishedBlocks, present: BoolArray, width: int, max_residues: int
) -> int:
    """Write ids and rows under a temporary name, then take the final one; return how many rows were cut."""
    num_rows = int(present.sum())
    output_rows = _output_rows(index, present)
    truncated_from = np.zeros(num_rows, dtype=np.int64)
    long = np.flatnonzero(present & (index.lengths[:] > max_residues))
    truncated_from[output_rows[long]] = index.lengths[long]
    low_information = np.zeros(num_rows, dtype=np.uint8)
    low_information[output_rows[present & (index.low_information[:] > 0)]] = 1
    most_bytes = schema.bytes_at_most(num_rows, width, id_bytes=index.id_bytes)
    with durable.replacing(path) as new:
        with schema.created(new, most_bytes=most_bytes) as file:
            ids = file.create_dataset(schema.SEQUENCE_IDS, (num_rows,), dtype=schema.UTF8, track_times=False)
            chunk: list[str] = []
            filled = 0
            for name in _ids_in_input_order(index, present):
                chunk.append(name)
                if len(chunk) == schema.IDS_PER_WRITE:
                    ids[filled : filled + len(chunk)] = chunk
                    filled, chunk = filled + len(chunk), []
            if chunk:
                ids[filled:] = chunk
            if len(long):
                file.create_dataset(schema.TRUNCATED_FROM, data=truncated_from, track_times=False)
            if low_information.any():
                file.create_dataset(schema.LOW_INFORMATION, data=low_information, track_times=False)
            offset = schema.early_allocated(file, schema.EMBEDDINGS, (num_rows, width))
        _write_rows(RowWriter(new, offset, width), index, finished.sources, output_rows)
    return len(long)


def _write_rows(writer: RowWriter, index: SequenceIndex, sources: list[SealedBlocks], output_rows: IntArray) -> None:
    copies = np.argsort(index.representatives[:], kind="stable")
    represented = index.representatives[:][copies]
    for source in sources:
        first = 0
        for rows in source.iter_rows():
            positions = source.positions[first : first + len(rows)]
            start = np.searchsorted(represented, positions, side="left")
            count = np.searchsorted(represented, positions, side="right") - start
            within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
            targets = output_rows[copies[np.repeat(start, count) + within]]
            order = np.argsort(targets, kind="stable")
            origins = np.repeat(np.arange(len(rows)), count)[order]
            for at in range(0, len(order), max(1, len(rows))):  # a row may have any number of copies
                some = slice(at, at + len(rows))
                writer.write(targets[order[some]], rows[origins[some]])
            first += len(rows)


def _output_rows(index: SequenceIndex, present: BoolArray) -> IntArray:
    """Return, for every index position that is present, its row in the result; -1 for the others."""
    by_input = np.zeros(len(index), dtype=np.bool_)
    by_input[index.input_rows[:]] = present
    row_of_input = np.cumsum(by_input) - 1
    return np.where(present, row_of_input[index.input_rows[:]], -1)


def _ids_in_input_order(index: SequenceIndex, present: BoolArray) -> Iterator[str]:
    positions = np.empty(len(index), dtype=np.int64)
    positions[index.input_rows[:]] = np.arange(len(index))
    wanted = positions[present[positions]]
    for start in range(0, len(wanted), schema.IDS_PER_WRITE):
        yield from index.sequence_ids(wanted[start : start + schema.IDS_PER_WRITE])
