"""For an orchestrator's hooks: note of a killed run what is true of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from virnucpro import durable
from virnucpro.errors import OutputError, ResultError, RunLockedError
from virnucpro.pipeline.run.run import cost_so_far, note_cost, note_end, sweep
from virnucpro.pipeline.run.run_status import manifest_in, status_of
from virnucpro.run_layout import PredictionLayout, RunLayout
from virnucpro.store.locks.holder import holder_of
from virnucpro.store.locks.run_lock import RunLock

if TYPE_CHECKING:
    from pathlib import Path

    from virnucpro.pipeline.run.run_status import RunStatus


def mark_interrupted(output_dir: Path) -> RunStatus:
    """
    Note in ``run.json`` that a killed run has stopped, end what it left alive, and return how the run is now.

    The embedding runs within a prediction are marked with it. The folder's lock, which the kernel has taken back from
    the dead, is held for a moment and never waited for: a running run is left alone, and so is one of another host,
    whose processes cannot be seen. What a later start resumes from stays.

    Raises:
        ResultError: The folder holds no run, or nothing of it can be read.
    """
    parts = PredictionLayout(output_dir)
    for folder in (output_dir, parts.dna_dir, parts.protein_dir):  # the outer run takes the locks of its parts
        try:
            _mark(RunLayout(folder))
        except (RunLockedError, OutputError, ResultError):  # the next start meets it, and reports it
            break
    return status_of(output_dir)


def _mark(layout: RunLayout) -> None:
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
        cost = cost_so_far(layout)
        for path in (layout.reservation, layout.live_status):
            durable.remove(path)
        manifest = manifest_in(layout)  # as it is, now that no other process can write it
        if manifest is not None and manifest.state == "running":
            note_end(layout, "stopped")
            note_cost(layout, cost)
