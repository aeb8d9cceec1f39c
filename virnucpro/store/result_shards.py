"""
How the rows of a sharded result are cut into files, and the removal of such a folder.

The cut follows from the number of rows and their width alone. The index of ids is written after every shard and removed
before any of them, so that a folder without it holds nothing that anybody relies on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from virnucpro import durable
from virnucpro.errors import OutputError
from virnucpro.store import id_index, schema

if TYPE_CHECKING:
    from virnucpro.run_layout import ShardedLayout

SHARD_BYTES = 1 << 30
"""Bytes of embeddings in a shard, at the most: rows arrive in any order and are sorted by the page cache, which must
hold a shard, and object stores take no more than 5 GB at once."""
SHARD_ROWS = 1 << 20
"""Rows in a shard, at the most."""


def most_rows_of_shard(hidden_dim: int) -> int:
    """Return the rows of every shard but the last, for rows of *hidden_dim* numbers."""
    return max(1, min(SHARD_ROWS, SHARD_BYTES // max(1, hidden_dim * 4)))


def shard_bounds(num_rows: int, *, rows_per_shard: int) -> list[range]:
    """Return which rows each shard has; a result without rows has one shard without rows."""
    starts = range(0, max(1, num_rows), rows_per_shard)
    return [range(first, min(first + rows_per_shard, num_rows)) for first in starts]


def sharded_bytes_at_most(num_rows: int, hidden_dim: int, *, id_bytes: int) -> int:
    """Return what a sharded result takes at the most; the arguments are those of ``schema.bytes_at_most``."""
    num_shards = len(shard_bounds(num_rows, rows_per_shard=most_rows_of_shard(hidden_dim)))
    in_shards = schema.bytes_at_most(num_rows, hidden_dim, id_bytes=id_bytes) + num_shards * schema.OVERHEAD_BYTES
    return in_shards + id_index.bytes_at_most(num_rows, num_shards)


def remove_result(layout: ShardedLayout) -> None:
    """
    Remove a sharded result, whole or not, and nothing else that may be in its folder.

    Raises:
        OutputError: The system refused.
    """
    if not layout.folder.is_dir():
        return
    durable.remove_strays(layout.folder)
    forget_index(layout)
    for path in layout.shards():
        durable.remove(path)
    durable.remove_empty(layout.folder)


def forget_index(layout: ShardedLayout) -> None:
    """
    Remove the index of a sharded result, so that from now on its shards are none.

    Raises:
        OutputError: The system refused.
    """
    if layout.index.exists():
        durable.remove(layout.index)
        try:
            durable.sync_folder(layout.folder)
        except OSError as error:
            raise OutputError(layout.index, error.strerror or str(error)) from error


def remove_unfinished(layout: ShardedLayout) -> None:
    """
    Remove the shards of a result that was not finished; they are written again.

    Raises:
        OutputError: The system refused.
    """
    if not layout.index.exists():
        remove_result(layout)
