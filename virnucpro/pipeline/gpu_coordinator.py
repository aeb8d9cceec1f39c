"""
All ranks of one run, each in a process of its own on a device of its own.

One thread a rank in ``run_worker``. The coordinator knows processes; it does not know sequences, models or files: what
a process does, and whether another one follows, is decided by the policy.
"""

from __future__ import annotations

import logging
import multiprocessing
import queue
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Self

import structlog

from virnucpro.config import RunLimits
from virnucpro.errors import ConfigurationError
from virnucpro.pipeline.devices import devices_for_ranks
from virnucpro.pipeline.work.rank_runner import RetryPolicy, run_worker
from virnucpro.pipeline.work.worker_process import importable_name
from virnucpro.telemetry.ranks import Rank

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from multiprocessing.context import SpawnProcess
    from pathlib import Path

    from virnucpro.pipeline.devices import Device
    from virnucpro.pipeline.work.rank_runner import MessageHandler
    from virnucpro.pipeline.work.worker_process import WorkerFunction, WorkerProcess


log = structlog.get_logger(__name__)


class GPUProcessCoordinator:
    """
    Starts, watches and ends one worker process a rank.

    Args:
        world_size: Number of ranks.
        output_dir: The run's folder.
        devices: One a rank; by default rank r gets entry r of the parent's visible list, and where no GPU is visible
            every rank is a CPU worker.
        limits: Attempts and time limits; by default one attempt.
        on_message: Called with rank and each message of its worker, from that rank's thread.
        stop: Set it to end the workers; by default an event of its own.
        policy: Decides about attempts; by default ``limits.attempts`` for each rank.

    Attributes:
        world_size, output_dir: As given.
        ctx: The spawn context.
        workers: Rank -> its latest process.
        results_queue: Reports that have come in and were not collected yet.
        outcomes: Rank -> how it went so far.

    Raises:
        ConfigurationError: No rank, not one device a rank, or a daemonic process, which cannot have children.
        DeviceError: More ranks than visible devices.
    """

    def __init__(
        self,
        world_size: int,
        output_dir: Path | str,
        *,
        devices: Sequence[Device] | None = None,
        limits: RunLimits | None = None,
        on_message: MessageHandler | None = None,
        stop: threading.Event | None = None,
        policy: RetryPolicy | None = None,
    ) -> None:
        if multiprocessing.current_process().daemon:
            raise ConfigurationError(
                "a daemonic process, as multiprocessing.Pool and Celery have them, cannot start workers: "
                "use concurrent.futures.ProcessPoolExecutor or a thread"
            )
        if world_size < 1:
            raise ConfigurationError(f"world_size is {world_size}: it must be at least 1")
        warnings_to_stderr()
        self.world_size = world_size
        self.output_dir = output_dir
        self.devices = list(devices_for_ranks(world_size) if devices is None else devices)
        if len(self.devices) != world_size:
            raise ConfigurationError(f"{len(self.devices)} devices for {world_size} ranks")
        self.limits = limits or RunLimits(attempts=1)
        self.ctx = multiprocessing.get_context("spawn")
        self.workers: dict[int, SpawnProcess] = {}
        self.results_queue: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        ranks = [Rank(rank=rank, device=device.label) for rank, device in enumerate(self.devices)]
        self._policy = RetryPolicy(ranks, self.limits) if policy is None else policy
        self.outcomes = {rank.rank: rank for rank in self._policy.ranks}
        self._on_message = on_message
        self._stop = threading.Event() if stop is None else stop
        self._threads: dict[int, threading.Thread] = {}

    def spawn_workers(
        self, worker_fn: WorkerFunction, worker_args: tuple[Any, ...], *, ranks: Iterable[int] | None = None
    ) -> None:
        """
        Start ranks; returns when each process has been started or has failed to.

        Args:
            worker_fn: ``(rank, world_size, results_queue, *worker_args)``, of an importable module or of a script whose
                own work stands under ``if __name__ == "__main__":``. It reports with ``results_queue.put(dict)``.
            worker_args: Passed on; must pickle.
            ranks: Which; by default all. May be called again for ranks that have ended: what they did adds up.

        Raises:
            ConfigurationError: *worker_fn* is defined inside a function or a notebook, or an earlier worker still runs.
        """
        worker_fn = ":".join(importable_name(worker_fn))
        if any(thread.is_alive() for thread in self._threads.values()):
            raise ConfigurationError("workers of this coordinator are running: wait for them, or make another one")
        launched = {rank: threading.Event() for rank in (range(self.world_size) if ranks is None else ranks)}
        for rank, is_launched in launched.items():
            self._threads[rank] = threading.Thread(
                target=self._run_attempts,
                args=(rank, worker_fn, worker_args, is_launched),
                name=f"rank-{rank}",
                daemon=True,
            )
            self._threads[rank].start()
        for event in launched.values():
            event.wait()

    def wait_for_completion(self, timeout: float | None = None) -> dict[int, bool]:
        """
        Wait for the workers, all at the same time.

        Args:
            timeout: Seconds for each worker, from now on; None waits for as long as it takes.

        Returns:
            Rank -> True when it reported success and exited with 0; False also for a worker that still runs.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        for thread in self._threads.values():
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return {
            rank: not thread.is_alive() and self.outcomes[rank].state == "complete"
            for rank, thread in self._threads.items()
        }

    def collect_results(self) -> list[dict[str, Any]]:
        """Return the reports that have come in since the last call, in the order of their arrival."""
        reports = []
        while not self.results_queue.empty():
            reports.append(self.results_queue.get())
        return reports

    def terminate_all(self) -> None:
        """End every worker: a request to stop, then by force. No process is left when this returns."""
        if any(thread.is_alive() for thread in self._threads.values()):
            self._stop.set()
        for thread in self._threads.values():
            if thread.ident is not None:  # an interrupt may have come before it was started
                thread.join()

    def kill_all(self) -> None:
        """End every worker at once."""
        self._stop.set()
        processes = list(self.workers.values())
        for process in processes:
            if process.is_alive():
                process.kill()
        for process in processes:
            process.join()  # Python takes a thread for ended once a signal interrupted its join: not waited for below
        self.terminate_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is None:
            self.terminate_all()
        else:
            self.kill_all()

    def _run_attempts(
        self, rank: int, worker_fn: WorkerFunction, worker_args: tuple[Any, ...], launched: threading.Event
    ) -> None:
        outcome = self.outcomes[rank]

        def note_start(worker: WorkerProcess) -> None:
            self.workers[rank] = worker.process
            launched.set()

        def note_end(starts_again: bool) -> None:
            if outcome.state == "failed":
                about = {"failure": outcome.failure, "reason": outcome.reason, "starts_again": starts_again}
                log.info("rank.failed", rank=rank, **about)

        try:
            run_worker(
                worker_fn,
                worker_args,
                rank=outcome,
                policy=self._policy,
                world_size=self.world_size,
                device=self.devices[rank],
                stop=self._stop,
                on_message=self._take,
                on_start=note_start,
                on_end=note_end,
            )
        finally:
            launched.set()

    def _take(self, rank: int, message: dict[str, Any]) -> None:
        if "kind" not in message:
            self.results_queue.put(message)
        if self._on_message is not None:
            self._on_message(rank, message)


def warnings_to_stderr() -> None:
    """Log warnings to standard error, unless the caller configured structlog: standard output is the caller's."""
    if not structlog.is_configured():
        structlog.configure(
            logger_factory=structlog.PrintLoggerFactory(sys.stderr),
            wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        )
