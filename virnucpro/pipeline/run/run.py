"""
What every run does with its folder: begin, resume or refuse, start from scratch, note a failure.

Embeddings, predictions and trainings differ in what they compute and which files they write, not in this. The
functions expect that the caller holds the folder's lock.
"""

from __future__ import annotations

import os
import uuid
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from virnucpro import durable
from virnucpro.data.reading.input_files import hash_content, open_regular
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.errors import BadInputError, OutputError, ResultError, SettingsChangedError, StoppedError
from virnucpro.pipeline.result.disk_space import release
from virnucpro.run_layout import RunLayout
from virnucpro.store.locks.run_lock import RunLock
from virnucpro.store.manifest import read_manifest
from virnucpro.store.results.forms import remove_unfinished_results
from virnucpro.telemetry.run_telemetry import RunTelemetry
from virnucpro.telemetry.show.progress import QuietView

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from pathlib import Path

    from virnucpro.config import InputRules
    from virnucpro.run_layout import FolderLayout
    from virnucpro.store.manifest import Manifest


def new_run_id() -> str:
    """Return an identifier for one start of a run."""
    return uuid.uuid4().hex[:12]


@contextmanager
def running(layout: FolderLayout, telemetry: RunTelemetry | None) -> Iterator[tuple[str, RunTelemetry]]:
    """
    Hold a folder, and show the run in it, for the time of the block.

    Args:
        layout: Of the folder.
        telemetry: Shows the run; None for one of its own, which leaves metrics and status in the folder, and reports
            failures on standard error.

    Yields:
        The identifier of this start, and what shows the run.

    Raises:
        RunLockedError: Another run holds the folder.
    """
    run_id = new_run_id()
    with (
        RunTelemetry(views=[QuietView()]) if telemetry is None else nullcontext(telemetry) as shown,
        RunLock(layout.lock, run_id=run_id),
        shown.running(layout, run_id),
    ):
        yield run_id, shown


@contextmanager
def failure_noted(layout: FolderLayout) -> Iterator[None]:
    """Note in ``run.json`` that the run failed, or was stopped, when the block ends with an error."""
    try:
        yield
    except BaseException as error:
        was_stopped = isinstance(error, StoppedError) or not isinstance(error, Exception)
        with suppress(OutputError, ResultError):  # the disk may be what failed; the error itself is what counts
            note_end(layout, "stopped" if was_stopped else "failed")
        raise
    finally:
        sweep(layout)


def note_end(layout: FolderLayout, state: str) -> None:
    """
    Note in ``run.json`` that the run ended just now, in *state*.

    Raises:
        OutputError: It cannot be written.
        ResultError: It cannot be read.
    """
    if isinstance(layout, RunLayout):
        with suppress(OutputError):
            release(layout)
    manifest = read_manifest(layout.manifest)
    manifest.end(state)
    manifest.write(layout.manifest)


# --- may the run resume what the folder holds? ------------------------------------------------------------------------


def is_same_input(
    output_dir: Path, earlier: Manifest, input_files: Sequence[str | Path], settings: dict[str, Any]
) -> bool:
    """
    Refuse an input other than the earlier run's; False where a file cannot be read: indexing says what is wrong.

    *settings* are those of now; those that differ are named with the input.

    Raises:
        SettingsChangedError: Paths or content differ.
    """
    before = [(item["path"], item["sha256"]) for item in earlier.inputs]
    try:
        now = [(item["path"], item["sha256"]) for item in map(about_file, input_files)]
    except BadInputError:
        return False
    others = _differences(earlier.settings, settings)
    for number, name in enumerate(("input", "sha256 of the input")):
        was, is_now = ([item[number] for item in items] for items in (before, now))
        if was != is_now:
            raise SettingsChangedError(output_dir, {name: (was, is_now), **others})
    return True


def refuse_other_settings(output_dir: Path, earlier: Manifest, settings: dict[str, Any]) -> None:
    """
    Refuse settings other than the earlier run's.

    Raises:
        SettingsChangedError: Some differ; all of them are named.
    """
    differences = _differences(earlier.settings, settings)
    if differences:
        raise SettingsChangedError(output_dir, differences)


def refuse_foreign_files(paths: Iterable[Path]) -> None:
    """
    Refuse to write over files that no ``run.json`` names.

    Raises:
        OutputError: One of *paths* exists.
    """
    for path in paths:
        if os.path.lexists(path):
            raise OutputError(path, "there is such a file, and no run.json that tells whose: use another folder")


def is_intact(path: Path, sha256: str) -> bool:
    """Whether a file is there and has this hex sha256."""
    try:
        return path.is_file() and durable.sha256_of(path) == sha256
    except OSError:
        return False


def all_intact(output_dir: Path, files: dict[str, str]) -> bool:
    """Whether every file of a manifest is as it was recorded."""
    return all(is_intact(output_dir / name, sha256) for name, sha256 in files.items())


def _differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[object, object]]:
    keys = sorted(set(before) | set(now))
    return {key: (before.get(key), now.get(key)) for key in keys if before.get(key) != now.get(key)}


# --- what the run reads -----------------------------------------------------------------------------------------------


def about_file(path: str | Path) -> dict[str, Any]:
    """
    Return what ``run.json`` holds of an input file.

    Raises:
        BadInputError: It cannot be read.
    """
    with open_regular(os.fspath(path)) as descriptor:
        size, sha256 = hash_content(descriptor)
    return {"path": os.path.realpath(path), "size_bytes": size, "sha256": sha256}


def about_indexed(index: SequenceIndex) -> list[dict[str, Any]]:
    """Return what ``run.json`` holds of the files of an index."""
    return [{"path": file.real_path, "size_bytes": file.size_bytes, "sha256": file.sha256} for file in index.files]


def ensure_index(
    layout: FolderLayout, path: Path, input_files: Sequence[str | Path], rules: InputRules
) -> SequenceIndex:
    """
    Return the index at *path* of the input, made unless it is there; a refused input leaves nothing behind.

    Raises:
        BadInputError: The input cannot be used; names every problem.
        OutputError: Something cannot be written.
    """
    try:
        return SequenceIndex.ensure(input_files, path, unpack_dir=layout.unpacked_dir, rules=rules)
    except BadInputError:
        if not layout.manifest.exists():  # no earlier run needs what was unpacked
            remove_unpacked(layout)
        raise
    except OutputError:
        durable.remove_strays(layout.unpacked_dir)  # of a run that was killed: they may be what fills the disk
        raise


# --- what is removed --------------------------------------------------------------------------------------------------


def sweep(layout: FolderLayout) -> None:
    """Remove what processes that have ended left half written; the input, where there is one, has been accepted."""
    for folder in (layout.output_dir, layout.work_dir, layout.unpacked_dir):
        durable.remove_strays(folder)
    if isinstance(layout, RunLayout):
        durable.remove_strays(layout.parts_dir)
        if layout.manifest.exists():  # else nothing tells whose they are
            with suppress(OutputError):  # they are written over then
                remove_unfinished_results(layout)


def remove_unpacked(layout: FolderLayout) -> None:
    """Remove the unpacked inputs and, where nothing else is in them, their folder and ``work/``."""
    with suppress(OutputError):
        for path in layout.unpacked():
            durable.remove(path)
    durable.remove_strays(layout.unpacked_dir)
    durable.remove_empty(layout.unpacked_dir)
    durable.remove_empty(layout.work_dir)


def remove_files(
    layout: FolderLayout, files: Iterable[Path], *, keep: Collection[Path] = (), with_manifest: bool = True
) -> None:
    """
    Remove *files* of a run but those that the next one reads, *keep* (absolute), and then its manifest.

    It goes last: as long as it is there, the files are known to be ours.

    Raises:
        OutputError: A file cannot be removed.
    """
    removed = [path for path in files if path.absolute() not in keep and path.resolve() not in keep]
    for path in removed:
        durable.remove(path)
    try:
        for folder in {path.parent for path in removed}:
            if folder.is_dir():
                durable.sync_folder(folder)  # with the manifest still there, whatever of this lasts
    except OSError as error:
        raise OutputError(layout.output_dir, error.strerror or str(error)) from error
    if with_manifest:
        durable.remove(layout.manifest)
