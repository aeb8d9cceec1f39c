"""
The main job without an orchestrator: FASTA in, one validated embeddings file out, one process a device.

``run_embedding`` reads as the pipeline: prepare, run the ranks, aggregate, validate, close. The flow does the same
steps, each as a task.
"""

from __future__ import annotations

import threading
import uuid
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from virnucpro.config import ModelConfig, RunLimits
from virnucpro.data.index.build import check_readable
from virnucpro.models.configuration import configure_model
from virnucpro.pipeline.budget_probe import PROBE_WORKER
from virnucpro.pipeline.device_claim import DeviceClaim, claim_devices, claim_of
from virnucpro.pipeline.devices import count_gpus, first_devices
from virnucpro.pipeline.failures import FailureClass
from virnucpro.pipeline.gpu_coordinator import GPUProcessCoordinator
from virnucpro.pipeline.rank_runner import RankOutcome
from virnucpro.pipeline.run_completion import (
    aggregate_run,
    close_run,
    failure_noted,
    finished_result,
    stop_run,
    validate_run,
)
from virnucpro.pipeline.run_preparation import PreparedRun, prepare_run
from virnucpro.run_layout import RunLayout
from virnucpro.settings import DEFAULT_PROTEIN_MODEL, EmbeddingSettings, ResultForm
from virnucpro.store.run_lock import RunLock
from virnucpro.telemetry.progress import QuietView
from virnucpro.telemetry.run_telemetry import RunTelemetry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virnucpro.pipeline.devices import Device
    from virnucpro.pipeline.rank_runner import MessageHandler
    from virnucpro.pipeline.recovery import Recovery
    from virnucpro.pipeline.run_result import RunResult
    from virnucpro.pipeline.worker_process import WorkerFunction

log = structlog.get_logger(__name__)

GPU_WORKER = "virnucpro.pipeline.gpu_worker:gpu_worker"
"""By name, so that the parent does not import the framework."""


def run_multi_gpu_inference(
    fasta_files: Sequence[str | Path],
    output_dir: str | Path,
    model_config: ModelConfig,
    world_size: int | None = None,
    *,
    limits: RunLimits | None = None,
    worker_fn: WorkerFunction = GPU_WORKER,
) -> tuple[Path, list[int]]:
    """
    Embed every sequence of *fasta_files*, one process a device; what survivors computed is kept.

    Args:
        fasta_files: The input, in the order of the result.
        output_dir: The run's folder; starting again with the same arguments continues what is missing.
        model_config: What to compute (see ``configure_model``).
        world_size: Number of workers; by default one for each visible GPU, and one CPU worker where there is none.
        limits: Attempts and time limits.
        worker_fn: What each process runs, with the arguments of ``gpu_worker``.

    Returns:
        The result file (``embeddings.partial.h5`` where rows are missing), and the ranks that gave up.

    Raises:
        BadInputError: The input cannot be used.
        ConfigurationError: A setting cannot work.
        WorkersFailedError: No worker succeeded.
    """
    devices = _devices(world_size, model_config.settings.hardware.workers_per_device)
    result = run_embedding(fasta_files, output_dir, model_config, devices, limits=limits, worker_fn=worker_fn)
    succeeded = not result.ranks or any(outcome.state == "complete" for outcome in result.ranks)
    if not succeeded or result.output_path is None:
        result.raise_unless(allow_partial=False)
    assert result.output_path is not None
    return result.output_path, result.failed_ranks


def run_esm2_multi_gpu(
    fasta_files: Sequence[str | Path],
    output_dir: str | Path,
    model_name: str = DEFAULT_PROTEIN_MODEL,
    world_size: int | None = None,
    *,
    limits: RunLimits | None = None,
) -> Path:
    """
    Embed proteins with an ESM-2 model and its defaults, all or nothing.

    Args:
        fasta_files: The input, in the order of the result.
        output_dir: The run's folder.
        model_name: Registered name, or path of a checkpoint.
        world_size: As in ``run_multi_gpu_inference``.
        limits: Attempts and time limits.

    Returns:
        ``embeddings.h5``.

    Raises:
        RuntimeError: A row is missing (``WorkersFailedError``).
        BadInputError: The input cannot be used.
        ConfigurationError: A setting cannot work.
    """
    check_readable(fasta_files)
    devices = _devices(world_size)
    config = configure_model(EmbeddingSettings(model=model_name), device_type=devices.type)
    result = run_embedding(fasta_files, output_dir, config, devices, limits=limits)
    result.raise_unless(allow_partial=False)
    assert result.output_path is not None
    return result.output_path


def run_embedding(
    fasta_files: Sequence[str | Path],
    output_dir: str | Path,
    model_config: ModelConfig,
    devices: DeviceClaim | Sequence[Device],
    *,
    limits: RunLimits | None = None,
    worker_fn: WorkerFunction = GPU_WORKER,
    probe_fn: WorkerFunction = PROBE_WORKER,
    on_message: MessageHandler | None = None,
    telemetry: RunTelemetry | None = None,
    stop: threading.Event | None = None,
    keep_shards: bool = False,
    restart: bool = False,
    result_form: ResultForm = ResultForm.SINGLE,
) -> RunResult:
    """
    Run the job to its end and say how it went; failed workers are in the result, not raised.

    Args:
        fasta_files: The input, in the order of the result.
        output_dir: The run's folder.
        model_config: What to compute.
        devices: A claim, whose devices are waited for once they are needed, or one device a rank, which nobody else
            may use.
        limits: Attempts and time limits.
        worker_fn: What each process runs.
        probe_fn: What a process on each GPU runs before, to find its attention kernel and token budget.
        on_message: Called with rank and message for everything that a worker says.
        telemetry: Shows the run; by default one of its own, which leaves metrics and status in the folder, and says
            what goes wrong on standard error.
        stop: Set it to end the run at the next batch boundary.
        keep_shards: Leave the shards of a complete run in its folder.
        restart: Remove what the folder holds of earlier runs first.
        result_form: What the rows are written into; ``auto`` keeps the form of the folder's earlier run.

    Raises:
        BadInputError: The input cannot be used.
        ConfigurationError: A setting cannot work, or the folder holds another run.
        RunLockedError: Another run holds the folder.
        OutputError: Something cannot be written.
        ResultError: The result did not stand its validation.
        StoppedError: *stop* was set before there was anything to keep.
    """
    stop = stop or threading.Event()
    run_id = new_run_id()
    layout = RunLayout(Path(output_dir))
    claim = DeviceClaim.of(devices)
    with (
        RunTelemetry(views=[QuietView()]) if telemetry is None else nullcontext(telemetry) as shown,
        RunLock(layout.lock, run_id=run_id),
        shown.running(layout, run_id),
        claim.held(shown, run_id=run_id, stop=stop),
    ):
        stage = partial(shown.stage, model=model_config.model_name)
        with stage("index"):
            run = prepare_run(
                fasta_files,
                output_dir,
                model_config,
                claim,
                run_id=run_id,
                probe_fn=probe_fn,
                stop=stop,
                restart=restart,
                result_form=result_form,
            )
        if run.already_complete:
            return finished_result(run, keep_shards=keep_shards)
        with failure_noted(run):
            embedding = shown.begin_embedding(run.facts())
            recovery = run.recovery(limits or RunLimits(), embedding)
            try:
                with stage("embed"):
                    outcomes = _run_ranks(run, recovery, worker_fn, on_message, stop)
            finally:
                embedding.over()
            stages_s = partial(shown.stages_s, model_config.model_name)
            if stop.is_set():
                return stop_run(run, outcomes, stages_s=stages_s())
            with stage("aggregate"):
                aggregation = aggregate_run(run, outcomes, recovery)
            with stage("validate"):
                validate_run(run, aggregation)
            return close_run(run, outcomes, aggregation, stages_s=stages_s(), keep_shards=keep_shards)


def _devices(world_size: int | None, workers_per_device: int = 1) -> DeviceClaim:
    """Claim *world_size* devices, by default every visible GPU; CPU workers where there is no GPU at all."""
    if count_gpus() == 0:
        return claim_devices("cpu", workers=world_size)
    if world_size is None:
        return claim_devices("auto", workers_per_device=workers_per_device)
    return claim_of(first_devices(world_size, workers_per_device=workers_per_device))


def new_run_id() -> str:
    """Return an identifier for one start of a run."""
    return uuid.uuid4().hex[:12]


def _run_ranks(
    run: PreparedRun,
    recovery: Recovery,
    worker_fn: WorkerFunction,
    on_message: MessageHandler | None,
    stop: threading.Event,
) -> list[RankOutcome]:
    """Run every rank, and then the work of those that were lost on the others, until none is left to do it."""
    with GPUProcessCoordinator(
        run.world_size,
        run.output_dir,
        devices=run.devices,
        limits=recovery.limits,
        on_message=on_message,
        stop=stop,
        policy=recovery,
    ) as coordinator:
        ranks = list(range(run.world_size))
        outcomes = [  # of a run that is told to stop before there are workers
            RankOutcome(rank=rank, device=device.label, state="stopped", failure=FailureClass.STOPPED.value)
            for rank, device in enumerate(run.devices)
        ]
        while ranks and not stop.is_set():
            coordinator.spawn_workers(worker_fn, run.worker_args, ranks=ranks)
            coordinator.wait_for_completion()
            outcomes = [coordinator.outcomes[rank] for rank in range(run.world_size)]
            ranks = recovery.take_over(outcomes)
            if ranks:
                log.warning("ranks.lost", lost=[item.rank for item in outcomes if item.state != "complete"], by=ranks)
        return outcomes
