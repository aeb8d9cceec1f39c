"""
Processes that have probed a GPU and wait, with the model loaded, for the rank that goes on with them: one load a GPU.

A run opens the place where they wait (``kept_warm``); its probes leave them there, and its ranks take them.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from virnucpro.pipeline.devices import Device
    from virnucpro.pipeline.work.worker_process import NextWork, WorkerFunction, WorkerProcess

BECOMES = "becomes"
"""In a report: name of the worker function that the process can go on with; it is in ``next_work`` then."""

_waiting: dict[str, dict[str, tuple[WorkerProcess, str]]] = {}
"""Run -> token of a device -> the process on it, and what it becomes."""


@contextmanager
def kept_warm(run_id: str) -> Iterator[None]:
    """Let processes wait for ranks of this run; those that are left at the end of the block are ended."""
    _waiting[run_id] = {}
    try:
        yield
    finally:
        for worker, _ in _waiting.pop(run_id).values():
            worker.dismiss()


def leave_waiting(run_id: str, device: Device, worker: WorkerProcess, becomes: str) -> None:
    """Let a process wait for a rank; it is ended where its run has no place for it."""
    if run_id in _waiting:
        _waiting[run_id][device.token] = worker, becomes
    else:
        worker.dismiss()


def take_waiting(run_id: str, device: Device, worker_fn: WorkerFunction, work: NextWork) -> WorkerProcess | None:
    """Have the process that waits on *device* for *worker_fn* go on, and return it; one of no use is dismissed."""
    worker, becomes = _waiting.get(run_id, {}).pop(device.token, (None, ""))
    if worker is not None and (becomes != worker_fn or not worker.process.is_alive()):
        worker.dismiss()
        return None
    if worker is not None:
        worker.go_on(work)
    return worker
