"""
Removing the whole folder of an old run, for an operator's retention.

Only a folder that holds an embedding run or a prediction, and nothing else: with any other file in it, in use, or used
again since, it is left as it is. A classifier that was trained is never removed, because predictions need it.
"""

from __future__ import annotations

import os
import shutil
from datetime import UTC, datetime
from pathlib import Path

from virnucpro import durable
from virnucpro.errors import ResultError, RunLockedError, printable
from virnucpro.run_layout import SHARD_NAME, FolderLayout, PredictionLayout, RunLayout
from virnucpro.store.locks.holder import holder_of
from virnucpro.store.locks.run_lock import RunLock
from virnucpro.store.manifest import PredictionManifest, RunManifest, read_manifest
from virnucpro.store.results.forms import FORMS

_SHOWN = 3
"""Names of other files in a message."""


def remove_old_run(output_dir: Path, *, ended_before: datetime, dry_run: bool = False) -> int:
    """
    Remove a run's folder; return its bytes.

    Args:
        output_dir: The folder, which may not be a link.
        ended_before: With time zone; a run that ended or began later stays.

    Raises:
        ResultError: The folder is not one that may be removed; the message has the reason.
        RunLockedError: A run is working in it.
        OutputError: The system refused; what is left is still known as a run's folder.
    """
    layout = _checked(output_dir, ended_before)
    holder = holder_of(layout.lock)
    if holder is not None and holder.is_alive is not False:  # perhaps of another host, where locks do not reach
        raise RunLockedError(output_dir, f"process {holder.pid} on {holder.host}")
    if dry_run:
        return _bytes(output_dir)
    with RunLock(layout.lock, run_id="retention"):
        _checked(output_dir, ended_before)
        size = _bytes(output_dir)
        last = [layout.manifest, layout.lock, layout.lock.with_suffix(".lease")]
        with durable.writing(output_dir):
            for path in sorted(output_dir.iterdir()):
                if path in last:
                    continue
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            for path in last:
                path.unlink(missing_ok=True)
            output_dir.rmdir()
    return size


def _checked(output_dir: Path, ended_before: datetime) -> FolderLayout:
    """Return the layout of a folder that may be removed."""
    if output_dir.is_symlink() or not output_dir.is_dir():
        raise ResultError(output_dir, "is not a folder")
    manifest = read_manifest(FolderLayout(output_dir).manifest)
    if not isinstance(manifest, RunManifest | PredictionManifest):
        raise ResultError(output_dir, "holds a classifier, which is never removed")
    last = datetime.fromisoformat(manifest.finished or manifest.started)
    if (last if last.tzinfo else last.replace(tzinfo=UTC)) >= ended_before:
        raise ResultError(output_dir, f"was used since, at {last.isoformat(timespec='minutes')}")
    layout: RunLayout | PredictionLayout = RunLayout(output_dir)
    others = _others(layout)
    if isinstance(manifest, PredictionManifest):
        layout = PredictionLayout(output_dir)
        parts = [part for part in (layout.dna_dir, layout.protein_dir) if part.is_dir() and not part.is_symlink()]
        others = [*_others(layout), *(path for part in parts for path in _others(RunLayout(part)))]
    if others:
        names = ", ".join(printable(str(path.relative_to(output_dir))) for path in others[:_SHOWN])
        raise ResultError(output_dir, f"holds files that no run wrote, such as {names}")
    return layout


def _others(layout: RunLayout | PredictionLayout) -> list[Path]:
    """Return what in a folder is no file or folder of a run."""
    known = {path.relative_to(layout.output_dir).parts[0] for path in layout.fixed()}
    known |= {layout.lock.with_suffix(".lease").name}
    if isinstance(layout, RunLayout):
        for form in FORMS.values():
            known |= {layout.result(form.suffix, is_partial=is_partial).name for is_partial in (False, True)}

    def is_ours(path: Path) -> bool:
        if isinstance(layout, PredictionLayout) and layout.has_output(path.name):
            return True
        return path.name in known or SHARD_NAME.fullmatch(path.name) is not None

    return [path for path in sorted(layout.output_dir.iterdir()) if not is_ours(path)]


def _bytes(folder: Path) -> int:
    return sum(os.lstat(Path(root, name)).st_size for root, _, names in os.walk(folder) for name in names)
