"""
The worker: load the model, embed this rank's blocks that are not finished yet, make them durable, seal the shard.

Everything it needs is in its arguments; everything that it finds out is on disk when it reports. It stops at a batch
boundary when it is told to (SIGTERM), and what it finished is kept.
"""

from __future__ import annotations

import importlib
import os
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

import structlog
import torch

from virnucpro.config import KERNEL_SEPARATOR
from virnucpro.data.collators import VarlenCollator, create_async_dataloader
from virnucpro.data.packing import make_plan
from virnucpro.data.sequence_dataset import IndexBasedDataset
from virnucpro.data.sequence_index import SequenceIndex, get_worker_indices
from virnucpro.errors import ConfigurationError, StoppedError
from virnucpro.pipeline.async_inference import AsyncInferenceRunner
from virnucpro.pipeline.cached_blocks import BlockCache
from virnucpro.pipeline.devices import CPU_TOKEN, VISIBLE_VARIABLE
from virnucpro.pipeline.failures import classify_error, exit_code_of
from virnucpro.pipeline.finished_blocks import find_finished_blocks, seal_shard
from virnucpro.pipeline.worker_process import error_sentence
from virnucpro.run_layout import RunLayout
from virnucpro.store.parts import BlockRows, write_part
from virnucpro.store.schema import BlockOrigin
from virnucpro.telemetry.worker_logging import setup_worker_logging

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from virnucpro.config import ModelConfig
    from virnucpro.data.collators import Tokenizer
    from virnucpro.data.packing import BlockPlan
    from virnucpro.pipeline.async_inference import InferenceResult, PackedEncoder
    from virnucpro.pipeline.worker_process import ReportPipe

log = structlog.get_logger(__name__)

PART_INTERVAL_S = 60.0
"""Seconds after which finished blocks are made durable even if they are few: what a crash can cost."""


def gpu_worker(
    rank: int,
    world_size: int,
    results_queue: ReportPipe,
    index_path: str | Path,
    output_dir: str | Path,
    model_config: ModelConfig,
) -> None:
    """
    Embed the blocks of one rank on the one device that this process sees.

    Args:
        rank: Of this worker.
        world_size: Number of ranks.
        results_queue: Takes telemetry and, last, the report: ``{'rank', 'status': 'complete', 'shard_path',
            'num_sequences'}`` or ``{'rank', 'status': 'failed', 'error', 'failure'}``.
        index_path: The sequence index.
        output_dir: The run's folder.
        model_config: What to compute.

    Raises:
        SystemExit: The work failed; its code tells the class of the failure, the report tells the reason.
    """
    layout = RunLayout(Path(output_dir))
    device_token = os.environ.get(VISIBLE_VARIABLE) or "cpu"
    setup_worker_logging(rank, layout.log_dir, level=model_config.log_level, device=device_token)
    with failure_reported(rank, results_queue):
        num_sequences = _work(
            rank, world_size, results_queue, SequenceIndex.open(Path(index_path)), layout, model_config
        )
    shard_path = str(layout.shard(rank))
    results_queue.put({"rank": rank, "status": "complete", "shard_path": shard_path, "num_sequences": num_sequences})


@contextmanager
def failure_reported(rank: int, reports: ReportPipe) -> Iterator[None]:
    """
    Log an error of the block and report its class.

    Raises:
        SystemExit: There was one; its code tells the class.
    """
    try:
        yield
    except Exception as error:
        failure = classify_error(error, device_memory_error=torch.OutOfMemoryError)
        log.exception("worker.failed", failure=failure.value)
        reports.put({"rank": rank, "status": "failed", "error": error_sentence(error), "failure": failure.value})
        raise SystemExit(int(exit_code_of(failure))) from error


def _work(
    rank: int, world_size: int, reports: ReportPipe, index: SequenceIndex, layout: RunLayout, config: ModelConfig
) -> int:
    """Do the rank's work; return the rows of its shard."""
    stop = _stop_on_sigterm()
    device = own_device(config)
    plan = make_plan(index, config, device_type=device.type)
    mine = plan.rank_blocks(rank, world_size)
    finished = find_finished_blocks(layout, plan, among=mine).blocks
    todo = [block for block in mine if block not in finished]
    resumed = sum(len(plan.block_positions(block)) for block in mine if block in finished)
    log.info("worker.started", blocks=len(mine), blocks_to_do=len(todo), sequences_resumed=resumed, pid=os.getpid())
    hidden_dim = config.hidden_dim
    with BlockCache(config, index, plan, reports) as cache:
        finished |= _write_cached(todo, cache, plan, layout, config, reports, stop)
        todo = [block for block in todo if block not in finished]
        reports.put({"kind": "resumed", "sequences": resumed, "tokens_to_do": int(plan.tokens[todo].sum())})
        if todo:
            dataset = IndexBasedDataset(index, get_worker_indices(index, rank, world_size, plan))
            model, tokenizer = load_model(config, device, reports)
            loader = create_async_dataloader(
                dataset,
                VarlenCollator(tokenizer, max_residues=config.max_residues),
                _batches(plan, mine, finished),
                loader_workers=config.loader_workers,
                pin_memory=device.type == "cuda",
            )
            results = AsyncInferenceRunner(model, device).run(loader, stop=stop)
            _write_results(todo, results, cache, plan, layout, config, reports)
            hidden_dim = model.hidden_dim
    return seal_shard(rank, mine, plan, layout, hidden_dim=hidden_dim)


def _write_cached(
    todo: list[int],
    cache: BlockCache,
    plan: BlockPlan,
    layout: RunLayout,
    config: ModelConfig,
    reports: ReportPipe,
    stop: threading.Event,
) -> set[int]:
    """
    Make those blocks durable that the cache holds whole; return their numbers.

    Raises:
        StoppedError: We were told to stop.
    """
    blocks: set[int] = set()
    sequences = 0
    with _PendingBlocks(layout.parts_dir, plan.fingerprint, config.sequences_per_part) as pending:
        for rows in cache.take(todo):
            pending.add(rows)
            blocks.add(rows.block)
            sequences += len(rows.positions)
            if stop.is_set():
                break
    if blocks:
        log.info("worker.cached", blocks=len(blocks), sequences=sequences)
        reports.put({"kind": "cached", "sequences": sequences})
    if stop.is_set():
        raise StoppedError(signal.SIGTERM)
    return blocks


def _batches(plan: BlockPlan, mine: range, finished: set[int]) -> Iterator[range]:
    """Yield, for each block to do, the numbers of its sequences among all the sequences of this rank."""
    end = 0
    for block in mine:
        start, end = end, end + len(plan.block_positions(block))
        if block not in finished:
            yield range(start, end)


def load_model(config: ModelConfig, device: torch.device, reports: ReportPipe) -> tuple[PackedEncoder, Tokenizer]:
    """
    Load the run's model onto *device*, and say so.

    Raises:
        WeightsError: The weights are absent or unusable.
        ConfigurationError: The run's rows are computed with an attention kernel that is not this device's.
    """
    started_s = time.monotonic()
    module, function = config.loader.split(":")
    load = getattr(importlib.import_module(module), function)
    model, tokenizer = load(config.weights_path, device, precision=config.precision)
    seconds = round(time.monotonic() - started_s, 3)
    log.info("model.loaded", model=config.model_name, precision=config.precision, seconds=seconds)
    attention = model.attention
    log.info("attention.chosen", kernel=attention.name, reason=attention.reason)
    if config.attention_kernel and attention.name not in config.attention_kernel.split(KERNEL_SEPARATOR):
        raise ConfigurationError(
            f"this run's rows are computed with the attention kernel {config.attention_kernel}, but this device would "
            f"use {attention.name} ({attention.reason}): use the same packages and GPUs, or another output folder"
        )
    reports.put({"kind": "model_loaded", "seconds": seconds, "attention_kernel": attention.name})
    return model, tokenizer


def _write_results(
    todo: list[int],
    results: Iterable[InferenceResult],
    cache: BlockCache,
    plan: BlockPlan,
    layout: RunLayout,
    config: ModelConfig,
    reports: ReportPipe,
) -> None:
    """
    Make results durable as they come, and keep them in the cache.

    Raises:
        StoppedError: We were told to stop: the results ended before the blocks to do.
    """
    blocks = sequences = tokens = 0
    with _PendingBlocks(layout.parts_dir, plan.fingerprint, config.sequences_per_part, cache) as pending:
        for block, result in zip(todo, results, strict=False):
            positions = plan.block_positions(block)
            assert tuple(positions.tolist()) == result.positions
            if result.is_resplit:
                log.warning("block.resplit", block=block, sequences=len(positions), tokens=result.num_tokens)
            origin = BlockOrigin.RESPLIT if result.is_resplit else BlockOrigin.COMPUTED
            pending.add(BlockRows(block, positions, result.sequence_ids, result.embeddings, origin))
            blocks += 1
            sequences += len(positions)
            tokens += result.num_tokens
            reports.put({"kind": "progress", "sequences": sequences, "tokens": tokens})
    if blocks < len(todo):
        raise StoppedError(signal.SIGTERM)
    log.info("worker.embedded", sequences=sequences, tokens=tokens)


class _PendingBlocks:
    """Finished blocks that are not durable yet; they become so in time, and when the work ends, even by an error."""

    def __init__(
        self, folder: Path, plan_fingerprint: str, sequences_per_part: int, cache: BlockCache | None = None
    ) -> None:
        self._folder = folder
        self._plan_fingerprint = plan_fingerprint
        self._sequences_per_part = sequences_per_part
        self._cache = cache
        self._blocks: list[BlockRows] = []
        self._last_s = time.monotonic()

    def add(self, block: BlockRows) -> None:
        self._blocks.append(block)
        sequences = sum(len(item.positions) for item in self._blocks)
        if sequences >= self._sequences_per_part or time.monotonic() - self._last_s > PART_INTERVAL_S:
            self._flush()

    def _flush(self) -> None:
        if self._blocks:
            path = write_part(self._folder, self._blocks, plan_fingerprint=self._plan_fingerprint)
            log.info("part.written", part=path.name, blocks=len(self._blocks))
            if self._cache is not None:
                self._cache.keep(self._blocks)
        self._blocks, self._last_s = [], time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if not isinstance(error, OSError):  # a disk that refused one part will refuse the next
            self._flush()


def _stop_on_sigterm() -> threading.Event:
    stop = threading.Event()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
    return stop


def own_device(config: ModelConfig) -> torch.device:
    """
    Return our device and set the threads; a GPU is always the only one we see.

    Raises:
        ConfigurationError: A GPU was asked for that torch cannot use.
    """
    torch.set_num_threads(config.threads_per_worker)
    token = os.environ.get(VISIBLE_VARIABLE)
    if token and not torch.cuda.is_available():
        raise ConfigurationError(
            f"device {token} was asked for, but torch {torch.__version__} sees no CUDA device: "
            "install a CUDA build of torch, or use --devices cpu"
        )
    return torch.device("cuda:0" if torch.cuda.is_available() and token != CPU_TOKEN else "cpu")
