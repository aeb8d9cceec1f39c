"""
The worker: a process that embeds blocks of a run on the one device that it sees.

Everything it needs is in its arguments, and its results are on disk when it reports. On SIGTERM it stops at a batch
boundary, and what it finished is kept. Here is how it begins and ends, and what it has of its device; ``block_work`` is
what it does in between.
"""

from __future__ import annotations

import importlib
import os
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import torch

from virnucpro import spans
from virnucpro.allowed_roots import DATA_ROOTS
from virnucpro.choices import KERNEL_SEPARATOR, SequenceKind
from virnucpro.data.collators import check_shared_memory
from virnucpro.data.packing import make_plan
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.errors import ConfigurationError
from virnucpro.models.registry import check_model_path, is_path
from virnucpro.pipeline.blocks.block_work import BlockWork
from virnucpro.pipeline.devices import CPU_TOKEN, VISIBLE_VARIABLE, processor_of
from virnucpro.pipeline.hardware.device_claim import usable_cores
from virnucpro.pipeline.hardware.device_errors import failure_of
from virnucpro.pipeline.work import own_process
from virnucpro.pipeline.work.assignment import AssignedUnit, Assignment
from virnucpro.run_layout import RunLayout
from virnucpro.store.locks.worker_lock import hold_worker_lock, take_part

if TYPE_CHECKING:
    from virnucpro.config import ModelConfig
    from virnucpro.data.collators import Tokenizer
    from virnucpro.pipeline.async_inference import PackedEncoder
    from virnucpro.pipeline.work.worker_process import ReportPipe

    Loaded = tuple[PackedEncoder, Tokenizer]

log = structlog.get_logger(__name__)


LOADERS, LOADERS_TOKENS = 2, 10_000_000
"""Processes, and the tokens of a worker from which on they gain more seconds than they take to start."""


def gpu_worker(
    rank: int,
    world_size: int,
    results_queue: ReportPipe,
    index_path: str | Path,
    output_dir: str | Path,
    model_config: ModelConfig,
    assignment: Assignment | None = None,
    *,
    loaded: Loaded | None = None,
) -> None:
    """
    Embed blocks of a run on the one device that this process sees.

    Args:
        rank: Of this worker.
        world_size: Number of ranks.
        results_queue: Takes telemetry and, last, the report: ``{'rank', 'status': 'complete', 'shard_path',
            'num_sequences'}`` or ``{'rank', 'status': 'failed', 'error', 'failure'}``.
        index_path: The sequence index.
        output_dir: The run's folder.
        model_config: What to compute.
        assignment: Whether it asks its parent for blocks, and what is known of earlier failures; by default it computes
            the stride of its rank.
        loaded: The run's model, where this process has it already.

    Raises:
        SystemExit: The work failed; its code tells the class of the failure, the report tells the reason.
    """
    layout = RunLayout(Path(output_dir))
    begin_logging(rank, layout, model_config, results_queue, assignment)
    with own_process.failure_reported(rank, results_queue, failure_of):
        if assignment is not None and assignment.is_on_cluster:
            take_part(layout.output_dir)
        else:
            hold_worker_lock(layout.output_dir, rank)
        stop = own_process.stop_on_sigterm()
        device = own_device(model_config)
        index = SequenceIndex.open(Path(index_path))
        plan = make_plan(index, model_config, device_type=device.type)
        assignment = assignment or Assignment(first=AssignedUnit(blocks=plan.rank_blocks(rank, world_size)))
        if model_config.settings.monitoring.profile:
            process: dict[str, int | str] = {"model": model_config.model_name, "rank": rank}
            process |= {"device": own_process.own_label(), "attempt": assignment.attempt}
            spans.enable(layout.spans_dir, process, block_of=plan.block_of)
        load = partial(load_model, model_config, device, results_queue, loaded)
        loaders = loader_processes(model_config, device, tokens=int(plan.tokens.sum()), workers=world_size)
        work = BlockWork(index, plan, layout, model_config, assignment, results_queue, stop, load, loaders)
        num_sequences = work.do(rank, device)
    shard_path = str(layout.shard(rank))
    results_queue.put({"rank": rank, "status": "complete", "shard_path": shard_path, "num_sequences": num_sequences})


def begin_logging(
    rank: int, layout: RunLayout, config: ModelConfig, reports: ReportPipe, assignment: Assignment | None = None
) -> None:
    """See ``own_process.begin_logging``; paths are confined here as they are where the run was started."""
    if config.data_roots is not None:
        os.environ.setdefault(DATA_ROOTS, config.data_roots)
    level = config.settings.monitoring.log_level
    own_process.begin_logging(rank, layout.log_dir, reports, level=level, assignment=assignment)


def own_device(config: ModelConfig) -> torch.device:
    """
    Return our device and set the threads; a GPU is always the only one we see.

    Raises:
        ConfigurationError: A GPU was asked for that torch cannot use.
    """
    torch.set_num_threads(config.settings.hardware.threads)
    token = os.environ.get(VISIBLE_VARIABLE)
    if token and not torch.cuda.is_available():
        raise ConfigurationError(
            f"device {token} was asked for, but torch {torch.__version__} sees no CUDA device: "
            "install a CUDA build of torch, or use --devices cpu"
        )
    return torch.device("cuda:0" if torch.cuda.is_available() and token != CPU_TOKEN else "cpu")


def loader_processes(config: ModelConfig, device: torch.device, *, tokens: int, workers: int) -> int:
    """
    Return how many processes read and tokenise for each of *workers*: as asked, or two for many *tokens* of DNA.

    One alone is no faster than none: 0.48, 0.44 and 0.71 million tokens a second by none, one and two on two cores; an
    H100 takes 1.16 (feeding_2026-11-24.json and gpu_check_2026-11-26.json in benchmarks/results).
    """
    asked = config.settings.hardware.loader_processes
    if asked is not None or device.type == "cpu" or config.sequence_kind is not SequenceKind.DNA:
        return asked or 0
    cores = usable_cores() // workers
    chosen = LOADERS if tokens >= LOADERS_TOKENS * workers and cores > LOADERS else 0
    try:
        check_shared_memory(chosen)
    except ConfigurationError as error:
        log.warning("loaders.left_out", reason=str(error))
        return 0
    log.info("loaders.chosen", processes=chosen, tokens=tokens, cores=cores)
    return chosen


def load_model(config: ModelConfig, device: torch.device, reports: ReportPipe, loaded: Loaded | None = None) -> Loaded:
    """
    Load the run's model onto *device*, unless it is *loaded*, and report it.

    Raises:
        WeightsError: The weights are absent or unusable.
        ConfigurationError: A package's loader cannot be imported, or the run's rows are computed with an attention
            kernel that is not this device's.
    """
    started_s = time.monotonic()
    module, function = config.loader.split(":")
    try:
        load = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        what = f"the loader {config.loader} of {config.model_name} cannot be used: {error}"
        raise ConfigurationError(what) from error
    if is_path(config.settings.model):
        check_model_path(Path(config.weights_path))
    with spans.span(spans.PREPARING, name="load model"):
        model, tokenizer = loaded or load(config.weights_path, device, precision=config.precision)
    seconds = round(time.monotonic() - started_s, 3)
    event = "model.loaded" if loaded is None else "model.kept"
    log.info(event, model=config.model_name, precision=config.precision, seconds=seconds)
    attention = model.attention
    log.info("attention.chosen", kernel=attention.name, reason=attention.reason)
    if config.attention_kernel and attention.name not in config.attention_kernel.split(KERNEL_SEPARATOR):
        raise ConfigurationError(
            f"this run's rows are computed with the attention kernel {config.attention_kernel}, but this device would "
            f"use {attention.name} ({attention.reason}): use the same packages and GPUs, or another output folder"
        )
    about = {"seconds": seconds, "attention_kernel": attention.name, "processor": processor_of(device.type)}
    reports.put({"kind": "model_loaded", **about} | ({"gpu_uuid": _gpu_uuid(device)} if device.type == "cuda" else {}))
    return model, tokenizer


def _gpu_uuid(device: torch.device) -> str:
    """Return what the driver calls the GPU that we see: numbers of CUDA need not be those of the driver."""
    token = os.environ.get(VISIBLE_VARIABLE, "")
    return token if token.startswith("MIG-") else f"GPU-{torch.cuda.get_device_properties(device).uuid}"
