"""
A folder says what is true of a run that could not say it itself: one that was killed leaves ``running`` behind.

For whoever sees a run end without a word, such as an orchestrator's hook. The folder's lock, which the kernel has taken
back from the dead, is held for a moment and never waited for: a run that goes on is left alone, and so is one of
another host, of which nothing can be known. Everything that a later start resumes from stays as it is.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from virnucpro import durable
from virnucpro.errors import OutputError, ResultError, RunLockedError
from virnucpro.pipeline.run_preparation import sweep
from virnucpro.pipeline.run_status import manifest_in, status_of
from virnucpro.run_layout import PredictionLayout, RunLayout
from virnucpro.store.manifest import RunManifest
from virnucpro.store.run_holder import holder_of
from virnucpro.store.run_lock import RunLock

if TYPE_CHECKING:
    from pathlib import Path

    from virnucpro.pipeline.run_status import RunStatus


def settle(output_dir: Path) -> RunStatus:
    """
    Note in ``run.json`` that a run which was killed has stopped, end what it left alive, and remove its live status.

    Args:
        output_dir: Folder of a run; the two embedding runs within an identification are settled with it.

    Returns:
        How the run is now.

    Raises:
        ResultError: The folder holds no run, or nothing of it can be read.
    """
    parts = PredictionLayout(output_dir)
    for folder in (output_dir, parts.dna_dir, parts.protein_dir):  # the parts' locks are the whole's to take
        try:
            _settle(RunLayout(folder))
        except (RunLockedError, OutputError, ResultError):  # whoever starts next meets it, and says so
            break
    return status_of(output_dir)


def _settle(layout: RunLayout) -> None:
    if not layout.lock.exists():
        return
    holder = holder_of(layout.lock)
    if holder is not None and holder.is_alive is None:
        raise RunLockedError(layout.output_dir, f"process {holder.pid} on {holder.host}")
    manifest = manifest_in(layout)
    is_left_running = manifest is not None and manifest.state == "running"
    if holder is None and not is_left_running and not layout.live_status.exists():
        return
    run_id = manifest.run_id if manifest is not None else holder.run_id if holder is not None else ""
    with RunLock(layout.lock, run_id=run_id):
        sweep(layout)
        for path in (layout.reservation, layout.live_status):
            durable.remove(path)
        manifest = manifest_in(layout)  # as it is, now that nobody else can write it
        if manifest is None or manifest.state != "running":
            return
        manifest.state = "stopped"
        manifest.finished = datetime.now(UTC).isoformat(timespec="seconds")
        if isinstance(manifest, RunManifest):
            manifest.ranks = [
                {**rank, "state": "stopped"} if rank.get("state") == "running" else rank for rank in manifest.ranks
            ]
        manifest.write(layout.manifest)
