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
from typing import TYPE_CHECKING, cast

import structlog

from virnucpro.config import (
    AUTO_TOKEN_BUDGET,
    DEFAULT_CACHE_GIB,
    BadRecordPolicy,
    GapPolicy,
    LongPolicy,
    ModelConfig,
    Precision,
    ResultForm,
    RunLimits,
    StopPolicy,
)
from virnucpro.data.index_build import check_readable
from virnucpro.models.registry import DEFAULT_PROTEIN_MODEL, resolve_model
from virnucpro.pipeline.budget_probe import PROBE_WORKER
from virnucpro.pipeline.device_claim import DeviceClaim, claim_devices, claim_of
from virnucpro.pipeline.devices import count_gpus, first_devices
from virnucpro.pipeline.failures import FailureClass
from virnucpro.pipeline.gpu_coordinator import GPUProcessCoordinator
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
from virnucpro.store.run_lock import RunLock
from virnucpro.telemetry.progress import QuietView
from virnucpro.telemetry.run_telemetry import RunTelemetry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from virnucpro.pipeline.devices import Device
    from virnucpro.pipeline.rank_runner import MessageHandler
    from virnucpro.pipeline.recovery import Recovery
    from virnucpro.pipeline.run_result import RunResult
    from virnucpro.pipeline.worker_process import WorkerFunction
    from virnucpro.telemetry.ranks import Rank

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
    devices = _devices(world_size, model_config.workers_per_device)
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
    config = configure_model(model_name, device_type=devices.type)
    result = run_embedding(fasta_files, output_dir, config, devices, limits=limits)
    result.raise_unless(allow_partial=False)
    assert result.output_path is not None
    return result.output_path


def configure_model(
    model: str | Path = DEFAULT_PROTEIN_MODEL,
    *,
    device_type: str,
    precision: str = "auto",
    weights_dir: Path | None = None,
    token_budget: int = AUTO_TOKEN_BUDGET,
    threads_per_worker: int = 1,
    workers_per_device: int = 1,
    max_residues: int | None = None,
    long_policy: LongPolicy | str = LongPolicy.TRUNCATE,
    gaps: GapPolicy | str = GapPolicy.ERROR,
    stops: StopPolicy | str = StopPolicy.ERROR,
    on_bad_record: BadRecordPolicy | str = BadRecordPolicy.ERROR,
    allow_empty: bool = False,
    cache_dir: str | Path | None = None,
    cache_gib: float = DEFAULT_CACHE_GIB,
    log_level: str = "INFO",
    profile: bool = False,
    on_download: Callable[[int, int | None], None] | None = None,
) -> ModelConfig:
    """
    Find a model's weights (fetching them once if it was named and they are not here) and settle its settings.

    Args:
        model: Registered name, or path of a checkpoint.
        device_type: ``cpu`` or ``cuda``.
        precision: ``auto`` is fp32 on a CPU; on a GPU fp16 for ESM-2 and bf16 for DNABERT-S.
        weights_dir: Folder that is looked into first.
        token_budget: Tokens in one block at the most; by default settled when the run begins (GPUs are tried out).
        threads_per_worker: Threads of a CPU worker.
        workers_per_device: Workers that share a GPU, as ``claim_devices`` was told.
        max_residues: Residues of a sequence that are embedded; by default what suits the model: 1022 for ESM-2, no
            limit for DNABERT-S.
        long_policy: What happens to longer ones.
        gaps: What happens to gaps.
        stops: What happens to stops inside proteins.
        on_bad_record: Whether a record that breaks a rule ends the run or is left out.
        allow_empty: Whether an input without records is fine.
        cache_dir: Folder of the embedding cache, on a local disk; None uses none.
        cache_gib: GiB that the cache takes at the most.
        log_level: Of the workers' log files.
        profile: Whether workers record when they did what.
        on_download: Called with bytes fetched and bytes in all.

    Raises:
        UnknownModelError: No such model.
        WeightsError: Its weights cannot be had.
        ConfigurationError: A setting is out of range.
    """
    resolved = resolve_model(model, weights_dir=weights_dir, on_download=on_download)
    automatic = Precision.FP32 if device_type == "cpu" else resolved.family.gpu_precision
    chosen = automatic if precision == "auto" else precision
    return ModelConfig(
        model_name=resolved.name,
        weights_path=str(resolved.weights_path),
        weights_sha256=resolved.weights_sha256,
        config_sha256=resolved.config_sha256,
        hidden_dim=resolved.hidden_dim,
        loader=resolved.family.loader,
        sequence_kind=resolved.family.sequence_kind,
        letters_per_token=resolved.family.letters_per_token,
        precision=cast("Precision", chosen),
        token_budget=token_budget,
        threads_per_worker=threads_per_worker,
        workers_per_device=workers_per_device,
        max_residues=resolved.family.max_letters if max_residues is None else max_residues,
        long_policy=cast("LongPolicy", long_policy),
        gaps=cast("GapPolicy", gaps),
        stops=cast("StopPolicy", stops),
        on_bad_record=cast("BadRecordPolicy", on_bad_record),
        allow_empty=allow_empty,
        cache_dir=None if cache_dir is None else str(Path(cache_dir).absolute()),
        cache_max_bytes=int(cache_gib * 2**30),
        log_level=log_level,
        profile=profile,
    )


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
) -> list[Rank]:
    """Run every rank until all blocks are done, or none is left to do them."""
    with GPUProcessCoordinator(
        run.world_size,
        run.output_dir,
        devices=run.devices,
        limits=recovery.limits,
        on_message=on_message,
        stop=stop,
        policy=recovery,
    ) as coordinator:
        for rank in recovery.ranks:  # of a run that is told to stop before there are workers
            rank.state, rank.failure = "stopped", FailureClass.STOPPED.value
        if not stop.is_set():
            coordinator.spawn_workers(worker_fn, run.worker_args)
            coordinator.wait_for_completion()
        return list(recovery.ranks)
