"""
The two forms of a result, one file or a folder of shards: which one a run takes, where it is, what belongs to it.

The form is settled when a run begins, once for the life of its folder. A result is told by one path, the file or the
folder; which of the two it is follows from its name.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from virnucpro import durable
from virnucpro.run_layout import ShardedLayout
from virnucpro.settings import AUTO_SHARDED_BYTES, AUTO_SHARDED_ROWS, ResultForm
from virnucpro.store.result_shards import remove_result, remove_unfinished

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from virnucpro.run_layout import RunLayout


def settle_form(asked: ResultForm, *, num_rows: int, hidden_dim: int) -> ResultForm:
    """
    Return the form that a result takes, single or sharded.

    Args:
        asked: What was asked for.
        num_rows: Rows that the result should have.
        hidden_dim: Width of a row; 0 where only the checkpoint knows it, so that only the rows count.
    """
    if asked is not ResultForm.AUTO:
        return asked
    is_large = num_rows >= AUTO_SHARDED_ROWS or num_rows * hidden_dim * 4 >= AUTO_SHARDED_BYTES
    return ResultForm.SHARDED if is_large else ResultForm.SINGLE


def result_path(layout: RunLayout, form: ResultForm, *, is_partial: bool) -> Path:
    """Return where the result of a run is: a file, or the folder of its shards."""
    if form is ResultForm.SHARDED:
        return (layout.partial_sharded_embeddings if is_partial else layout.sharded_embeddings).folder
    return layout.partial_embeddings if is_partial else layout.embeddings


def is_sharded(path: Path) -> bool:
    """Whether a result at *path* is a folder of shards."""
    return path.suffix != ".h5"


def proof_of(path: Path) -> Path:
    """Return the file that exists only when the whole result does."""
    return ShardedLayout(path).index if is_sharded(path) else path


def files_of(path: Path) -> list[Path]:
    """Return the files of a result, as far as they exist."""
    shards = ShardedLayout(path).shards() if is_sharded(path) else []
    return [*shards, *([proof_of(path)] if proof_of(path).is_file() else [])]


def name_of(file: Path, path: Path) -> str:
    """Return how ``run.json`` names a file of the result at *path*: its path in the run's folder."""
    return file.relative_to(path.parent).as_posix()


def recorded_files(files: Mapping[str, str], path: Path) -> dict[Path, str]:
    """Return those of the files of ``run.json`` that belong to the result at *path*, with the hex sha256 of each."""
    return {path.parent / name: sha256 for name, sha256 in files.items() if PurePosixPath(name).parts[0] == path.name}


def is_intact(files: Mapping[str, str], path: Path) -> bool:
    """Whether the whole result is there, with the bytes that ``run.json`` recorded."""
    recorded = recorded_files(files, path)
    return proof_of(path) in recorded and all(
        file.is_file() and durable.sha256_of(file) == sha256 for file, sha256 in recorded.items()
    )


def existing_results(layout: RunLayout, *, is_partial: bool) -> list[Path]:
    """Return the whole results, or the partial ones, of which there is any file, of whichever form."""
    forms = (ResultForm.SINGLE, ResultForm.SHARDED)
    paths = [result_path(layout, form, is_partial=is_partial) for form in forms]
    return [path for path in paths if files_of(path)]


def remove_results(layout: RunLayout, *, is_partial: bool) -> None:
    """
    Remove the whole result, or the partial one, of whichever form.

    Raises:
        OutputError: The system refused.
    """
    durable.remove(layout.partial_embeddings if is_partial else layout.embeddings)
    remove_result(layout.partial_sharded_embeddings if is_partial else layout.sharded_embeddings)


def remove_unfinished_results(layout: RunLayout) -> None:
    """
    Remove shards without their index, of a run that was ended while it wrote them.

    Raises:
        OutputError: The system refused.
    """
    for sharded in (layout.sharded_embeddings, layout.partial_sharded_embeddings):
        remove_unfinished(sharded)
