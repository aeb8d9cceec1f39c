"""``--restart``: what a folder holds of earlier runs is removed, and nothing else that may be in it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from virnucpro import durable
from virnucpro.errors import OutputError
from virnucpro.store.manifest import RunManifest
from virnucpro.store.parts import part_paths
from virnucpro.store.results.forms import existing_results, remove_results
from virnucpro.store.worker_lock import taking_part

if TYPE_CHECKING:
    from virnucpro.data.sequence_index import SequenceIndex
    from virnucpro.run_layout import RunLayout


def start_afresh(layout: RunLayout, *, index: SequenceIndex | None = None) -> None:
    """
    Remove every file that the layout names; the caller holds the folder's lock.

    The index of what is to be done now stays, with what it reads: it was made first, so that an input that cannot be
    used removes nothing.

    The manifest goes last: as long as it is there, the files are known to be ours. A folder whose result has no
    manifest is not touched, and preparing the run refuses it.

    Raises:
        OutputError: A file cannot be removed.
        ResultError: ``run.json`` is not one of ours.
    """
    if layout.manifest.exists():
        RunManifest.read(layout.manifest)
    elif any(existing_results(layout, is_partial=which) for which in (False, True)) or layout.failed_sequences.exists():
        return
    for is_partial in (False, True):
        remove_results(layout, is_partial=is_partial)
    needed = set() if index is None else {layout.index.absolute(), *(Path(file.read_path) for file in index.files)}
    for path in [
        layout.failed_sequences,
        *layout.shards(),
        *part_paths(layout.parts_dir),
        *layout.unpacked(),
        layout.index,
        *layout.worker_logs(),
        layout.reservation,
        layout.metrics_textfile,
        layout.trace,
    ]:
        if path.absolute() not in needed:
            durable.remove(path)
    try:
        for folder in (layout.output_dir, layout.work_dir, layout.parts_dir):
            if folder.is_dir():
                durable.sync_folder(folder)  # with the manifest still there, whatever of this lasts
    except OSError as error:
        raise OutputError(layout.output_dir, error.strerror or str(error)) from error
    durable.remove(layout.manifest)


def remove_run(layout: RunLayout) -> None:
    """
    Remove an embedding run within a folder whose lock the caller holds; what is not the run's stays, in its folders.

    Raises:
        OutputError: A file cannot be removed.
        ResultError: ``run.json`` is not one of ours.
    """
    if not layout.output_dir.is_dir():
        return
    start_afresh(layout)
    durable.remove_tree(layout.all_units_dir)
    folders = (layout.parts_dir, layout.unpacked_dir, layout.worker_locks_dir, layout.work_dir, layout.log_dir)
    with taking_part(layout.output_dir):
        for folder in (layout.output_dir, *folders):
            durable.remove_strays(folder)
    for path in (*layout.worker_locks(), layout.live_status, layout.lock):
        durable.remove(path)
    for folder in (*folders, layout.output_dir):
        durable.remove_empty(folder)
