"""
The embedding run: FASTA in, one validated embeddings file out, one process a device.

``run_embedding`` reads as the pipeline: prepare, run the ranks, aggregate, validate, close. What computes the ranks and
what does the stages is passed: processes and calls here, tasks under Prefect.
"""

from __future__ import annotations

import threading
import warnings
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from virnucpro.choices import DEFAULT_PROTEIN_MODEL, ResultForm
from virnucpro.config import ModelConfig, RunLimits
from virnucpro.data.index.build import check_readable
from virnucpro.errors import ConfigurationError
from virnucpro.host_gpus import host_tokens
from virnucpro.models.configuration import configure_model
from virnucpro.pipeline.devices import first_devices
from virnucpro.pipeline.executor import Executor, LocalRanks
from virnucpro.pipeline.gpu_coordinator import warnings_to_stderr
from virnucpro.pipeline.hardware.device_claim import DeviceClaim, claim_devices, claim_of, devices_for
from virnucpro.pipeline.plan.budget_probe import PROBE_WORKER
from virnucpro.pipeline.run.run import failure_noted, running
from virnucpro.pipeline.run.run_completion import aggregate_run, close_run, finished_result, stop_run, validate_run
from virnucpro.pipeline.run.run_preparation import GPU_WORKER, PreparedRun, prepare_run
from virnucpro.pipeline.run.stages import Stages, call_stage
from virnucpro.pipeline.work.warm_process import kept_warm
from virnucpro.pipeline.work.worker_process import importable_name
from virnucpro.run_layout import RunLayout
from virnucpro.settings import EmbeddingSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virnucpro.pipeline.devices import Device
    from virnucpro.pipeline.run.run_result import RunResult
    from virnucpro.pipeline.run.stages import EmbeddingJob, StageRunner
    from virnucpro.pipeline.shard_aggregator import Aggregation
    from virnucpro.pipeline.work.rank_runner import MessageHandler
    from virnucpro.pipeline.work.worker_process import WorkerFunction
    from virnucpro.telemetry.run_telemetry import RunTelemetry


def run_multi_gpu_inference(
    fasta_files: str | Path | Sequence[str | Path],
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
        fasta_files: One path or several, in the order of the result.
        output_dir: The run's folder; starting again with the same arguments continues what is missing.
        model_config: What to compute (see ``configure_model``).
        world_size: Number of workers; by default one for each visible GPU, and one CPU worker where there is none.
        limits: Attempts and time limits.
        worker_fn: What each process runs, with the arguments of ``gpu_worker``.

    Returns:
        The result file (``embeddings.partial.h5`` where rows are missing), and the ranks that gave up.

    Raises:
        BadInputError: The input cannot be used.
        ConfigurationError: A setting cannot work, or *model_config* was not made by ``configure_model``.
        WorkersFailedError: No worker succeeded.
    """
    if not isinstance(model_config, ModelConfig):
        made_by = "virnucpro.models.configuration.configure_model(EmbeddingSettings(model=...), device_type=...)"
        raise ConfigurationError(f"model_config is a {type(model_config).__name__}: make it with {made_by}")
    importable_name(worker_fn)
    warnings_to_stderr()
    fasta_files = listed(fasta_files)
    devices = _devices(world_size, model_config.settings.hardware.workers_per_device)
    result = run_embedding(fasta_files, output_dir, model_config, devices, limits=limits, worker_fn=worker_fn)
    succeeded = not result.ranks or any(outcome.state == "complete" for outcome in result.ranks)
    if not succeeded or result.output_path is None:
        result.raise_unless(allow_partial=False)
    assert result.output_path is not None
    return result.output_path, result.failed_ranks


def run_esm2_multi_gpu(
    fasta_files: str | Path | Sequence[str | Path],
    output_dir: str | Path,
    model_name: str | None = None,
    world_size: int | None = None,
    *,
    limits: RunLimits | None = None,
) -> Path:
    """
    Embed proteins with an ESM-2 model and its defaults, all or nothing.

    Args:
        fasta_files: One path or several, in the order of the result.
        output_dir: The run's folder.
        model_name: Registered name, such as ``esm2_t33_650M_UR50D``, or path of a checkpoint. None, which warns, takes
            the bundled demonstration encoder: 128 numbers a protein.
        world_size: As in ``run_multi_gpu_inference``.
        limits: Attempts and time limits.

    Returns:
        ``embeddings.h5``.

    Raises:
        RuntimeError: A row is missing (``WorkersFailedError``).
        BadInputError: The input cannot be used.
        ConfigurationError: A setting cannot work.
    """
    warnings_to_stderr()
    if model_name is None:
        model_name = DEFAULT_PROTEIN_MODEL
        warn_of_demonstration()
    fasta_files = listed(fasta_files)
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
    executor: Executor | None = None,
    stage_runner: StageRunner = call_stage,
    telemetry: RunTelemetry | None = None,
    stop: threading.Event | None = None,
    keep_shards: bool = False,
    restart: bool = False,
    result_form: ResultForm = ResultForm.SINGLE,
) -> RunResult:
    """
    Run the job to its end and return how it went; failed workers are in the result, not raised.

    Args:
        fasta_files: The input, in the order of the result.
        output_dir: The run's folder.
        model_config: What to compute.
        devices: A claim, whose devices are waited for once they are needed, or one device a rank, which no other
            process may use.
        limits: Attempts and time limits.
        worker_fn: What each process runs.
        probe_fn: What a process on each GPU runs before, to find its attention kernel and token budget.
        on_message: Called with rank and message for every message of a worker.
        executor: Computes the ranks; by default processes of this machine that run *worker_fn*.
        stage_runner: Does each stage; by default in place.
        telemetry: Shows the run; None for one of its own (see ``running``).
        stop: Set it to end the run at the next batch boundary.
        keep_shards: Leave the shards of a complete run in its folder.
        restart: Remove what the folder holds of earlier runs first.
        result_form: What the rows are written into; ``auto`` keeps the form of the folder's earlier run.

    Raises:
        VirNucProError: With the exit code of the command: input, settings, folder or disk do not do, or *stop* was set
            before there was anything to keep.
    """
    stop = stop or threading.Event()
    executor = executor or LocalRanks(worker_fn, on_message)
    layout = RunLayout(Path(output_dir))
    claim = DeviceClaim.of(devices)
    with running(layout, telemetry) as (run_id, shown), claim.held(shown, run_id=run_id, stop=stop), kept_warm(run_id):
        stages = Stages(shown, stage_runner, model=model_config.model_name)
        prepared = partial(
            prepare_run,
            fasta_files,
            output_dir,
            model_config,
            claim,
            run_id=run_id,
            probe_fn=probe_fn,
            probe_elsewhere=executor.probe(run_id),
            stop=stop,
            restart=restart,
            result_form=result_form,
        )
        run = stages.do("index", prepared)
        if run.already_complete:
            return finished_result(run, keep_shards=keep_shards)
        with failure_noted(layout):
            return _compute(run, executor, limits or RunLimits(), stages, stop, keep_shards=keep_shards)


def _compute(
    run: PreparedRun, executor: Executor, limits: RunLimits, stages: Stages, stop: threading.Event, *, keep_shards: bool
) -> RunResult:
    """Embed what is left of a prepared run, and make its result."""
    facts = run.facts()
    with stages.shown("embed"):
        embedding = stages.telemetry.begin_work(facts if executor.is_here else replace(facts, host=""))
        try:
            executor.compute(run, limits, embedding, stop)
        except BaseException:
            if executor.outcomes():
                stop_run(run, executor.outcomes(), stages_s=stages.seconds())
            raise
        finally:
            embedding.over()
    outcomes = executor.outcomes()
    if stop.is_set():
        return stop_run(run, outcomes, stages_s=stages.seconds())
    with executor.result_passes(run) as hosts:

        def aggregated() -> Aggregation:
            aggregation = aggregate_run(run, outcomes, executor.reasons(), hosts=hosts)
            embedding.aggregated(run.missing_of_blocks(aggregation.missing_positions))
            return aggregation

        aggregation = stages.do("aggregate", aggregated)
        stages.do("validate", lambda: validate_run(run, aggregation, hosts=hosts))
    return close_run(run, outcomes, aggregation, stages_s=stages.seconds(), keep_shards=keep_shards)


def embed_job(
    job: EmbeddingJob,
    *,
    claim: DeviceClaim,
    workers: int | None,
    limits: RunLimits | None,
    telemetry: RunTelemetry,
    stop: threading.Event,
) -> RunResult:
    """Run an embedding run within a prediction or training; *workers* is the number of CPU workers that was given."""
    devices = devices_for(claim, job.model, job.files, workers=workers)
    return run_embedding(job.files, job.folder, job.model, devices, limits=limits, telemetry=telemetry, stop=stop)


def warn_of_demonstration() -> None:
    """Warn the caller of the caller that no model was named."""
    text = f"no model was named: {DEFAULT_PROTEIN_MODEL}, a demonstration encoder, embeds the sequences"
    warnings.warn(text, stacklevel=3)


def listed(files: str | Path | Sequence[str | Path]) -> list[str | Path]:
    return [files] if isinstance(files, str | PathLike) else list(files)


def _devices(world_size: int | None, workers_per_device: int = 1) -> DeviceClaim:
    """Claim *world_size* devices, by default every visible GPU; CPU workers where there is no GPU at all."""
    if not host_tokens():
        return claim_devices("cpu", workers=world_size)
    if world_size is None:
        return claim_devices("auto", workers_per_device=workers_per_device)
    return claim_of(first_devices(world_size, workers_per_device=workers_per_device))
