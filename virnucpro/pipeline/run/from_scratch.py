"""``--restart``: what a folder holds of earlier embedding runs is removed, and nothing else that may be in it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from virnucpro import durable
from virnucpro.pipeline.run.run import remove_files
from virnucpro.store.locks.worker_lock import taking_part
from virnucpro.store.manifest import RunManifest
from virnucpro.store.parts import part_paths
from virnucpro.store.results.forms import existing_results, remove_results

if TYPE_CHECKING:
    from virnucpro.data.sequence_index import SequenceIndex
    from virnucpro.run_layout import RunLayout


def unknown_results(layout: RunLayout) -> list[Path]:
    """Return the results in a folder that has no manifest: nothing tells whose they are."""
    if layout.manifest.exists():
        return []
    results = [path for which in (False, True) for path in existing_results(layout, is_partial=which)]
    return [path for path in (*results, layout.failed_sequences) if path.exists()]


def start_from_scratch(layout: RunLayout, *, index: SequenceIndex | None = None) -> None:
    """
    Remove every file that the layout names; the caller holds the folder's lock.

    *index* stays, with what it reads: it is that of the next run, and was made first, so that an input that cannot be
    used removes nothing. A folder whose result has no manifest is not touched, and preparing the run refuses it.

    Raises:
        OutputError: A file cannot be removed.
        ResultError: ``run.json`` is not of an embedding run.
    """
    if layout.manifest.exists():
        RunManifest.read(layout.manifest)
    elif unknown_results(layout):
        return
    for is_partial in (False, True):
        remove_results(layout, is_partial=is_partial)
    needed = set() if index is None else {layout.index.absolute(), *(Path(file.read_path) for file in index.files)}
    files = [
        layout.failed_sequences,
        *layout.shards(),
        *part_paths(layout.parts_dir),
        *layout.unpacked(),
        layout.index,
        *layout.worker_logs(),
        layout.reservation,
        layout.metrics_textfile,
        layout.trace,
    ]
    remove_files(layout, files, keep=needed)


def remove_run(layout: RunLayout) -> None:
    """
    Remove an embedding run within a folder whose lock the caller holds; what is not the run's stays, in its folders.

    Raises:
        OutputError: A file cannot be removed.
        ResultError: ``run.json`` is not of an embedding run.
    """
    if not layout.output_dir.is_dir():
        return
    start_from_scratch(layout)
    durable.remove_tree(layout.all_units_dir)
    folders = (layout.parts_dir, layout.unpacked_dir, layout.worker_locks_dir, layout.work_dir, layout.log_dir)
    with taking_part(layout.output_dir):
        for folder in (layout.output_dir, *folders):
            durable.remove_strays(folder)
    for path in (*layout.worker_locks(), layout.live_status, layout.lock):
        durable.remove(path)
    for folder in (*folders, layout.output_dir):
        durable.remove_empty(folder)
