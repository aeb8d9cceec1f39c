"""
What computes the ranks of an embedding run: processes of this machine, tasks of Prefect, or the tasks of a cluster.

The pipeline around an executor is the same for all (``multi_gpu_inference.run_embedding``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import TYPE_CHECKING

import structlog

from virnucpro.pipeline.failures import FailureClass
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
    from virnucpro.pipeline.work.worker_process import WorkerFunction
    from virnucpro.telemetry.embedding_telemetry import EmbeddingTelemetry
    from virnucpro.telemetry.ranks import Rank

    Probe = Callable[[str, str, ModelConfig], list[DeviceProbe]]

log = structlog.get_logger(__name__)

GPU_WORKER = "virnucpro.pipeline.gpu_worker:gpu_worker"
"""By name, so that the parent does not import the framework."""


class Executor(ABC):
    """Computes the ranks of one embedding run."""

    is_here: bool = True
    """Whether all ranks compute on this host."""

    def probe(self, run_id: str) -> Probe | None:
        """Return what probes GPUs of other hosts, from index, folder and model; None where they are this host's."""
        del run_id
        return None

    @abstractmethod
    def embed(self, run: PreparedRun, limits: RunLimits, telemetry: EmbeddingTelemetry, stop: threading.Event) -> None:
        """
        Compute every block that can be had; no worker is left when this returns or raises.

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
    """
    One process a device of this machine.

    Args:
        worker_fn: What each process runs, with the arguments of ``gpu_worker``.
        on_message: Called with rank and message for every message of a worker.
    """

    def __init__(self, worker_fn: WorkerFunction = GPU_WORKER, on_message: MessageHandler | None = None) -> None:
        self._worker_fn = worker_fn
        self._on_message = on_message
        self._outcomes: list[Rank] = []
        self._recovery: Recovery | None = None

    def embed(self, run: PreparedRun, limits: RunLimits, telemetry: EmbeddingTelemetry, stop: threading.Event) -> None:
        """Run every rank until all blocks are done, or no rank is left to compute them."""
        self._recovery = recovery = run.recovery(limits, telemetry)
        with GPUProcessCoordinator(
            run.world_size,
            run.output_dir,
            devices=run.devices,
            limits=recovery.limits,
            on_message=self._on_message,
            stop=stop,
            policy=recovery,
        ) as coordinator:
            self._outcomes = list(recovery.ranks)
            for rank in self._outcomes:  # of a run that is stopped before there are workers
                rank.state, rank.failure = "stopped", FailureClass.STOPPED.value
            if not stop.is_set():
                coordinator.spawn_workers(self._worker_fn, run.worker_args)
                coordinator.wait_for_completion()

    def outcomes(self) -> list[Rank]:
        """See ``Executor.outcomes``."""
        return self._outcomes

    def reasons(self) -> Reasons:
        """See ``Executor.reasons``."""
        assert self._recovery is not None
        return self._recovery
