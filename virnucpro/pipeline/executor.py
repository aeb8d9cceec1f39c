"""Executors compute the ranks of a run: as processes of this machine, tasks of Prefect, or on a cluster."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import structlog

from virnucpro.pipeline.gpu_coordinator import GPUProcessCoordinator

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from virnucpro.config import ModelConfig, RunLimits
    from virnucpro.pipeline.hosts.result_passes import ResultPasses
    from virnucpro.pipeline.plan.budget_probe import DeviceProbe
    from virnucpro.pipeline.run.run_completion import Reasons
    from virnucpro.pipeline.run.run_preparation import PreparedRun
    from virnucpro.pipeline.work.rank_runner import MessageHandler
    from virnucpro.pipeline.work.recovery import Recovery
    from virnucpro.pipeline.work.work import Work
    from virnucpro.pipeline.work.worker_process import WorkerFunction
    from virnucpro.telemetry.ranks import Rank
    from virnucpro.telemetry.work_telemetry import WorkTelemetry

    Probe = Callable[[str, str, ModelConfig], list[DeviceProbe]]

log = structlog.get_logger(__name__)


class Executor(ABC):
    is_here: bool = True
    """Whether all ranks compute on this host."""

    def probe(self, run_id: str) -> Probe | None:
        """Return what probes GPUs of other hosts (arguments: index, folder, model); None where GPUs are this host's."""
        del run_id
        return None

    @abstractmethod
    def compute(self, work: Any, limits: RunLimits, telemetry: WorkTelemetry, stop: threading.Event) -> None:
        """
        Compute every block of *work* that can be computed; no worker is left when this returns or raises.

        Failed ranks are outcomes, not errors. *stop* ends them at their next batch boundary.
        """

    @abstractmethod
    def outcomes(self) -> list[Rank]:
        """Return how each rank went, by rank; empty where that is not known."""

    @abstractmethod
    def reasons(self) -> Reasons:
        """Return what knows why a sequence has no row."""

    def result_passes(self, run: PreparedRun) -> AbstractContextManager[ResultPasses | None]:
        """Return a context within which other hosts take part in writing the result; None where there are none."""
        del run
        return nullcontext()


class LocalRanks(Executor):
    """One process a device of this machine; *on_message* gets rank and message, *worker_fn*: None is the work's."""

    def __init__(self, worker_fn: WorkerFunction | None = None, on_message: MessageHandler | None = None) -> None:
        self._worker_fn = worker_fn
        self._on_message = on_message
        self._outcomes: list[Rank] = []
        self._recovery: Recovery | None = None

    def compute(self, work: Work, limits: RunLimits, telemetry: WorkTelemetry, stop: threading.Event) -> None:
        """Run every rank until all blocks are done, or no rank is left to compute them."""
        self._recovery = recovery = work.recovery(limits, telemetry)
        if work.is_small:
            work.compute_here(recovery, stop)
            return
        with GPUProcessCoordinator(
            work.world_size,
            work.output_dir,
            devices=work.devices,
            limits=recovery.limits,
            on_message=self._on_message,
            stop=stop,
            policy=recovery,
        ) as coordinator:
            self._outcomes = list(recovery.ranks)
            coordinator.spawn_workers(self._worker_fn or work.worker_fn, work.worker_args)
            coordinator.wait_for_completion()

    def outcomes(self) -> list[Rank]:
        return self._outcomes

    def reasons(self) -> Reasons:
        assert self._recovery is not None
        return self._recovery
