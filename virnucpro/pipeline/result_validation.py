"""The proof that a result is right: its bytes, its shape, its ids in the order of the input, finite numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from virnucpro import durable
from virnucpro.errors import ResultError, printable
from virnucpro.pipeline.result_form import is_sharded, name_of
from virnucpro.run_layout import ShardedLayout
from virnucpro.store import schema
from virnucpro.store.id_index import IdIndex, id_hashes
from virnucpro.store.result_shards import shard_bounds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from virnucpro.data.sequence_index import SequenceIndex

    IntArray = np.ndarray[Any, np.dtype[np.int64]]
    HashArray = np.ndarray[Any, np.dtype[np.uint64]]


class ProofHosts(Protocol):
    """Something that has the shards of a result validated on several hosts."""

    def validate(self, proof: ShardProof) -> None:
        """Raise ``ResultError`` where something does not hold."""
        ...


class ShardProof:
    """
    The proof of a whole sharded result, shard by shard, in any order and on any host.

    Args:
        layout: The shards.
        index: The input, each record of which has its row.
        rows_per_shard: Rows of every shard but the last.
        expected_files: Name in the run's folder and hex sha256 of each file of the result.
    """

    def __init__(
        self, layout: ShardedLayout, index: SequenceIndex, *, rows_per_shard: int, expected_files: Mapping[str, str]
    ) -> None:
        self.layout = layout
        self.rows_per_shard = rows_per_shard
        self.expected_files = expected_files
        self._index = index
        self._in_order = index.in_input_order()
        self._bounds = shard_bounds(len(index), rows_per_shard=rows_per_shard)

    def __len__(self) -> int:
        return len(self._bounds)

    def check(self, number: int) -> None:
        """
        Prove one shard: bytes, shape, ids in the input's order and each once, finite numbers.

        Raises:
            ResultError: Something does not hold; says what.
        """
        rows = self._bounds[number]
        shard = self.layout.shard(number, len(self._bounds))
        _check_bytes(shard, self.layout.folder, self.expected_files)
        order = _InputOrder(self._index, self._in_order[rows.start : rows.stop], is_complete=True)
        _check_file(shard, len(rows), order)

    def id_hashes(self) -> HashArray:
        """Return the hash of the id of each row, as they are once every shard is proved."""
        hashes = np.empty(len(self._in_order), dtype=np.uint64)
        for start in range(0, len(hashes), schema.IDS_PER_WRITE):
            some = self._in_order[start : start + schema.IDS_PER_WRITE]
            hashes[start : start + len(some)] = id_hashes(self._index.sequence_ids(some))
        return hashes


def validate_result(
    path: Path,
    index: SequenceIndex,
    *,
    expected_rows: int,
    expected_files: Mapping[str, str] | None,
    hosts: ProofHosts | None = None,
) -> None:
    """
    Prove that a result is whole: bytes, shape, ids in the input's order and each once, finite numbers.

    Args:
        path: The result file, or the folder of shards.
        index: The input.
        expected_rows: Rows that it must have.
        expected_files: Name in the run's folder and hex sha256 of each of its files, or None to leave that out.
        hosts: Who looks at the shards, where every record has its row; None for this process.

    Raises:
        ResultError: Something does not hold; says what.
    """
    order = _InputOrder(index, index.in_input_order(), is_complete=expected_rows == len(index))
    if not is_sharded(path):
        _check_bytes(path, path, expected_files)
        _check_file(path, expected_rows, order)
        return
    layout = ShardedLayout(path)
    _check_bytes(layout.index, path, expected_files)
    ids = IdIndex(layout.index)
    try:
        if ids.num_rows != expected_rows:
            raise ResultError(layout.index, f"has {ids.num_rows} rows, expected {expected_rows}")
        if hosts is not None and expected_files is not None and expected_rows == len(index):
            proof = ShardProof(layout, index, rows_per_shard=ids.rows_per_shard, expected_files=expected_files)
            hosts.validate(proof)
            ids.check(proof.id_hashes())
            return
        hashes = np.empty(expected_rows, dtype=np.uint64)
        bounds = shard_bounds(expected_rows, rows_per_shard=ids.rows_per_shard)
        for number, rows in enumerate(bounds):
            shard = layout.shard(number, len(bounds))
            _check_bytes(shard, path, expected_files)
            _check_file(shard, len(rows), order, hashes[rows.start : rows.stop])
        ids.check(hashes)
    finally:
        ids.close()


def _check_bytes(file: Path, path: Path, expected_files: Mapping[str, str] | None) -> None:
    if not file.is_file():
        raise ResultError(file, "is missing")
    if expected_files is not None and durable.sha256_of(file) != expected_files.get(name_of(file, path)):
        raise ResultError(file, "damaged: its sha256 is not the one that run.json recorded")


def _check_file(path: Path, expected_rows: int, order: _InputOrder, hashes: HashArray | None = None) -> None:
    """Check one file of rows, whose ids are the next of the input's; put the hashes of its ids into *hashes*."""
    with schema.open_checked(path) as file:
        rows = schema.embeddings_of(file, path)
        if rows.shape[0] != expected_rows:
            raise ResultError(path, f"has {rows.shape[0]} rows, expected {expected_rows}")
        filled = 0
        for names in schema.iter_sequence_ids(file, path):
            order.check(names, path)
            if hashes is not None:
                hashes[filled : filled + len(names)] = id_hashes(names)
            filled += len(names)
        step = schema.rows_at_once(rows.shape[1])
        for start in range(0, rows.shape[0], step):
            if not np.isfinite(rows[start : start + step]).all():
                raise ResultError(path, f"a number in rows {start} to {start + step - 1} is not finite")


class _InputOrder:
    """The ids of records in the input's order, against which a result's are held; a partial one leaves some out."""

    def __init__(self, index: SequenceIndex, positions: IntArray, *, is_complete: bool) -> None:
        self._expected = _ids(index, positions)
        self._is_complete = is_complete

    def check(self, names: list[str], path: Path) -> None:
        """
        Check the next ids of a result.

        Raises:
            ResultError: One is not the input's, or stands in the wrong place.
        """
        for name in names:
            wanted = next(self._expected, None)
            while not self._is_complete and wanted is not None and wanted != name:
                wanted = next(self._expected, None)
            if wanted != name:
                raise ResultError(path, f"id {printable(name)!r} is not the input's, or stands in the wrong place")


def _ids(index: SequenceIndex, positions: IntArray) -> Iterator[str]:
    for start in range(0, len(positions), schema.IDS_PER_WRITE):
        yield from index.sequence_ids(positions[start : start + schema.IDS_PER_WRITE])
