"""
The sharded result of a run over several hosts, made by all of them: one pass after the other over its files.

The parts and shards of the ranks are checked, the shards of the result written, then validated. Each file is an item
that any host may do, and do again. The driver alone holds the folder's lock and moves what a host has written to its
place. It rechecks every file that a host reports as bad.
"""

from __future__ import annotations

import secrets
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from virnucpro import durable
from virnucpro.errors import OutputError, ResultError, SourceGoneError
from virnucpro.pipeline.shard_aggregator import ResultRows, RowsOfInput
from virnucpro.store.locks.worker_lock import taking_part
from virnucpro.store.parts import SealedBlocks
from virnucpro.store.results.hdf5 import ShardProof, Shards, write_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from virnucpro.pipeline.run.run_preparation import PreparedRun
    from virnucpro.store.results.result import NewRows

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class ItemMap(Protocol):
    """Calls a function for each item, on any host, and returns the answers in their order."""

    def __call__(self, function: Callable[[Item], Answer], items: Sequence[Item], /) -> list[Answer]: ...


class ResultPasses:
    """The passes over the files of a result; the caller holds the folder's lock. *do*: has items done."""

    def __init__(self, run: PreparedRun, do: ItemMap) -> None:
        self._run, self._do = run, do

    def check(self, paths: Sequence[Path]) -> dict[Path, bytes]:
        """Have parts and shards of ranks checked, every byte and number; return the seals of the intact ones."""
        seals = self._do(_seal, paths)
        return {path: seal for path, seal in zip(paths, seals, strict=True) if seal is not None}

    def write(self, rows: NewRows, bounds: Sequence[range], paths: Sequence[Path]) -> dict[Path, str]:
        """Have shards of these rows written; return the hex sha256 of each. SourceGoneError where a part is gone."""
        folder = self._run.layout.shared_rows_dir
        try:
            durable.make_folder(folder)
            about = rows.store(folder)
            written = self._do(partial(_write, self._run, about), bounds)
            for path, (name, _) in zip(paths, written, strict=True):
                durable.make_folder(path.parent)
                (folder / name).replace(path)
            durable.sync_folder(paths[0].parent)
        except OSError as error:
            raise OutputError(paths[0].parent, error.strerror or str(error)) from error
        finally:
            durable.remove_tree(folder)
        return {path: sha256 for path, (_, sha256) in zip(paths, written, strict=True)}

    def validate(self, proof: ShardProof) -> None:
        """Have the shards of a complete result validated; ``ResultError`` says what does not hold."""
        files = dict(proof.expected.files or {})
        check = partial(_holds, self._run, proof.result.path, proof.rows_per_shard, files)
        for number, holds in enumerate(self._do(check, range(len(proof)))):
            if not holds:
                proof.check(number)


def _seal(path: Path) -> bytes | None:
    try:
        source = SealedBlocks.open(path)
        source.check()
    except (ResultError, SourceGoneError, OSError):
        return None
    return source.seal


def _write(run: PreparedRun, about: dict[str, Any], bounds: range) -> tuple[str, str]:
    """Write the rows of a shard under a name of its own; return that and its sha256."""
    folder = run.layout.shared_rows_dir
    path = folder / f"{bounds.start}.{secrets.token_hex(4)}.h5"
    with taking_part(run.output_dir):
        write_file(path, ResultRows.stored(folder, about, run.open_index()).subset(bounds))
    return path.name, durable.sha256_of(path)


def _holds(run: PreparedRun, folder: Path, rows_per_shard: int, files: Mapping[str, str], number: int) -> bool:
    index = run.open_index()
    proof = ShardProof(Shards(folder), RowsOfInput(index, len(index), files), rows_per_shard=rows_per_shard)
    try:
        proof.check(number)
    except (ResultError, OSError):
        return False
    return True
