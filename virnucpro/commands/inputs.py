"""The input of a run as the command line names it: files, and ``-`` for standard input."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from virnucpro import durable
from virnucpro.data.index.build import check_readable
from virnucpro.data.reading.input_files import STDIN
from virnucpro.data.reading.standard_input import save_stream, stdin_stream
from virnucpro.errors import OutputError, ResultError
from virnucpro.pipeline.run.run import new_run_id
from virnucpro.run_layout import FolderLayout
from virnucpro.store.locks.run_lock import RunLock
from virnucpro.store.manifest import read_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@contextmanager
def readable_inputs(inputs: Sequence[Path], output: Path, *, is_flow: bool) -> Iterator[list[Path]]:
    """
    Check that every file can be opened, long before any is read, and save standard input into the run's folder.

    Yields the files to read. The saved one stays as long as the run in the folder is not complete and has it as input.

    Raises:
        BadInputError: A file cannot be opened, or standard input cannot be used.
        RunLockedError: Another run holds the folder.
        typer.BadParameter: Standard input is named twice, or for a flow.
    """
    streams = [path for path in inputs if str(path) == STDIN]
    check_readable([path for path in inputs if path not in streams])
    if not streams:
        yield list(inputs)
        return
    if is_flow:
        raise typer.BadParameter(f"{STDIN}: a flow does not read standard input: save it to a file first.")
    if len(streams) > 1:
        raise typer.BadParameter(f"{STDIN}: standard input can be read only once.")
    layout, stream = FolderLayout(output), stdin_stream()
    with RunLock(layout.lock, run_id=new_run_id()):
        saved = save_stream(stream, layout)
    try:
        yield [saved if path in streams else path for path in inputs]
    finally:
        if not _is_needed(saved, layout):
            with suppress(OutputError):
                durable.remove(saved)
            durable.remove_empty(layout.unpacked_dir)
            durable.remove_empty(layout.work_dir)


def _is_needed(saved: Path, layout: FolderLayout) -> bool:
    """Whether a run that is not complete has it as input."""
    try:
        manifest = read_manifest(layout.manifest)
    except ResultError:
        return False
    return manifest.state != "complete" and str(saved.resolve()) in {item["path"] for item in manifest.inputs}
