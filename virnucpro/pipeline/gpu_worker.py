"""
The worker: load the model, embed those of its blocks that are not finished yet, make them durable, seal the shard.

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
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog
import torch

from virnucpro import spans
from virnucpro.config import KERNEL_SEPARATOR
from virnucpro.data.collators import VarlenCollator, create_async_dataloader
from virnucpro.data.packing import make_plan
from virnucpro.data.sequence_dataset import IndexBasedDataset
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.errors import ConfigurationError, StoppedError
from virnucpro.pipeline.async_inference import DEVICE_ERROR, AsyncInferenceRunner
from virnucpro.pipeline.block_writer import BlockWriter
from virnucpro.pipeline.cached_blocks import BlockCache
from virnucpro.pipeline.devices import CPU_TOKEN, VISIBLE_VARIABLE, Device
from virnucpro.pipeline.failures import FailureClass, classify_error, exit_code_of
from virnucpro.pipeline.finished_blocks import find_finished_blocks, seal_shard
from virnucpro.pipeline.recovery import Assignment
from virnucpro.pipeline.worker_process import error_sentence
from virnucpro.run_layout import RunLayout
from virnucpro.store.worker_lock import hold_worker_lock
from virnucpro.telemetry.durable_blocks import durable_messages
from virnucpro.telemetry.worker_logging import setup_worker_logging

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch.utils.data import DataLoader

    from virnucpro.config import ModelConfig
    from virnucpro.data.collators import PackedBatch, Tokenizer
    from virnucpro.data.packing import BlockPlan
    from virnucpro.pipeline.async_inference import InferenceResult, PackedEncoder
    from virnucpro.pipeline.worker_process import ReportPipe
    from virnucpro.store.parts import BlockRows

    IntArray = np.ndarray[Any, np.dtype[np.int64]]

log = structlog.get_logger(__name__)

STEP_INTERVAL_S = 1.0
"""Seconds between two signs that work without batches (checking, sealing) goes on."""


def gpu_worker(
    rank: int,
    world_size: int,
    results_queue: ReportPipe,
    index_path: str | Path,
    output_dir: str | Path,
    model_config: ModelConfig,
    assignment: Assignment | None = None,
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
        assignment: Which blocks, and what is known of earlier failures; by default the rank's share of the plan.

    Raises:
        SystemExit: The work failed; its code tells the class of the failure, the report tells the reason.
    """
    layout = RunLayout(Path(output_dir))
    begin_logging(rank, layout, model_config, results_queue, assignment)
    with failure_reported(rank, results_queue):
        hold_worker_lock(layout.output_dir, rank)
        stop = _stop_on_sigterm()
        device = own_device(model_config)
        index = SequenceIndex.open(Path(index_path))
        plan = make_plan(index, model_config, device_type=device.type)
        assignment = assignment or Assignment(blocks=plan.rank_blocks(rank, world_size))
        if model_config.profile:
            process: dict[str, int | str] = {"rank": rank, "device": _own_label(), "attempt": assignment.attempt}
            spans.enable(layout.spans_dir, process, block_of=plan.block_of)
        work = _Work(index, plan, layout, model_config, assignment, results_queue, stop)
        num_sequences = work.do(rank, device)
    shard_path = str(layout.shard(rank))
    results_queue.put({"rank": rank, "status": "complete", "shard_path": shard_path, "num_sequences": num_sequences})


def begin_logging(
    rank: int, layout: RunLayout, config: ModelConfig, reports: ReportPipe, assignment: Assignment | None = None
) -> None:
    """Send what this process logs to the rank's file, bound with what it belongs to; warnings to the parent as well."""
    bound: dict[str, object] = {"device": _own_label()}
    if assignment is not None:
        bound |= {"run_id": assignment.run_id, "attempt": assignment.attempt}
        bound |= {"task": assignment.task} if assignment.task else {}
    setup_worker_logging(rank, layout.log_dir, level=config.log_level, reports=reports, **bound)


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
        failure = classify_error(error, device_memory_error=torch.OutOfMemoryError, device_error=DEVICE_ERROR)
        if failure is FailureClass.STOPPED:
            log.info("worker.stopped")
        else:
            log.exception("worker.failed", failure=failure.value)
        reports.put({"rank": rank, "status": "failed", "error": error_sentence(error), "failure": failure.value})
        raise SystemExit(int(exit_code_of(failure))) from error


@dataclass
class _Work:
    """The work of one process."""

    index: SequenceIndex
    plan: BlockPlan
    layout: RunLayout
    config: ModelConfig
    assignment: Assignment
    reports: ReportPipe
    stop: threading.Event
    _last_step_s: float = 0.0
    _started_s: float = field(default_factory=time.monotonic)
    _sequences: int = 0
    """Computed by this process, as the tokens are."""
    _tokens: int = 0
    _compute_s: float = 0.0

    def do(self, rank: int, device: torch.device) -> int:
        """
        Compute what is not finished, seal the rank's shard, and return its rows.

        Raises:
            StoppedError: We were told to stop.
        """
        plan, config = self.plan, self.config
        mine = self.assignment.blocks
        among = mine if isinstance(mine, range) else frozenset(mine)
        with spans.span(spans.PREPARING, name="check what is done"):
            found = find_finished_blocks(
                self.layout, plan, among=among, excused=self.assignment.excused, on_step=self._step
            )
        finished = found.blocks.intersection(mine)
        self._say_durable(found.positions_of(finished))
        self.reports.put({"kind": "found"})
        todo = [block for block in mine if block not in finished and len(self._positions(block))]
        resumed = sum(len(self._positions(block)) for block in mine if block in finished)
        log.info("worker.started", blocks=len(mine), blocks_to_do=len(todo), sequences_resumed=resumed, pid=os.getpid())
        hidden_dim = config.hidden_dim
        with BlockCache(config, self.index, plan, self.reports) as cache:
            cached = self._write_cached(todo, cache)
            todo = [block for block in todo if block not in cached]
            self.reports.put({"kind": "resumed", "sequences": resumed, "tokens_to_do": int(plan.tokens[todo].sum())})
            if todo:
                model, tokenizer = load_model(config, device, self.reports)
                self._compute(todo, AsyncInferenceRunner(model, device), tokenizer, cache)
                hidden_dim = model.hidden_dim
        with spans.span(spans.SEALING):
            rows = seal_shard(rank, among, plan, self.layout, hidden_dim=hidden_dim, on_step=self._step)
        log.info(
            "shard.finished",
            rows=rows,
            sequences=self._sequences,
            tokens=self._tokens,
            seconds=round(time.monotonic() - self._started_s, 3),
            tokens_per_second=round(self._tokens / self._compute_s) if self._tokens else 0,
            **peak_memory(device),
        )
        return rows

    def _write_cached(self, todo: list[int], cache: BlockCache) -> set[int]:
        """Make those blocks durable that the cache holds whole; return their numbers."""
        blocks: set[int] = set()
        sequences = 0
        with self._writer(is_cached=True) as writer:
            for rows in cache.take(todo):
                writer.add(rows)
                blocks.add(rows.block)
                sequences += len(rows.positions)
                if self.stop.is_set():
                    break
        if blocks:
            log.info("worker.cached", blocks=len(blocks), sequences=sequences)
            self.reports.put({"kind": "cached", "sequences": sequences})
        if self.stop.is_set():
            raise StoppedError(signal.SIGTERM)
        return blocks

    def _compute(self, todo: list[int], runner: AsyncInferenceRunner, tokenizer: Tokenizer, cache: BlockCache) -> None:
        """Compute blocks and make them durable as they come, those under suspicion last."""
        suspicion = self.assignment.suspects
        plain = [block for block in todo if block not in suspicion]
        suspects = sorted((block for block in todo if block in suspicion), key=lambda block: suspicion[block])
        started_s = time.monotonic()
        with self._writer(reports=self.reports, cache=cache) as writer:
            plain_results = runner.run(
                self._loader(plain, tokenizer, runner.device), stop=self.stop, on_start=self._say
            )
            for block, result in zip(plain, plain_results, strict=False):
                writer.take(block, result)
            if suspects and not self.stop.is_set():
                for block, batch in zip(suspects, self._loader(suspects, tokenizer, runner.device), strict=True):
                    writer.take(block, self._compute_suspect(block, batch, runner))
                    if self.stop.is_set():
                        break
        if writer.blocks < len(todo):
            raise StoppedError(signal.SIGTERM)
        self._sequences, self._tokens = writer.sequences, writer.tokens
        self._compute_s = time.monotonic() - started_s

    def _compute_suspect(self, block: int, batch: PackedBatch, runner: AsyncInferenceRunner) -> InferenceResult:
        if not self.assignment.is_apart(block):
            (result,) = runner.run([batch], on_start=self._say)
        else:
            log.warning("block.apart", block=block, sequences=len(batch.positions))
            result = runner.run_apart(
                batch,
                on_start=self._say,
                last=self.assignment.lone_suspects,
                then_whole=self.assignment.may_be_whole(block) and self._is_whole(block),
            )
        return result if self._is_whole(block) else replace(result, is_resplit=True)

    def _writer(
        self, *, reports: ReportPipe | None = None, cache: BlockCache | None = None, is_cached: bool = False
    ) -> BlockWriter:
        at_once = 1 if self.assignment.after_failure else self.config.sequences_per_part

        def on_durable(rows: Sequence[BlockRows], written_bytes: int) -> None:
            blocks = ((item.block, item.positions) for item in rows)
            cached = sum(len(item.positions) for item in rows) if is_cached else 0
            self._say_durable(blocks, written_bytes=written_bytes, cached=cached)

        return BlockWriter(
            self.layout.parts_dir,
            self.plan.fingerprint,
            at_once,
            reports=reports,
            cache=cache,
            on_durable=on_durable,
        )

    def _say_durable(self, blocks: Iterable[tuple[int, IntArray]], *, written_bytes: int = 0, cached: int = 0) -> None:
        """Tell the parent which blocks are durable, given with the index positions of their rows."""
        whole: list[int] = []
        short: dict[int, int] = {}
        for block, positions in blocks:
            if len(positions) == len(self.plan.block_positions(block)):
                whole.append(block)
            else:
                short[block] = int(self.index.rows_of(positions).sum())
        for message in durable_messages(whole, short=short, written_bytes=written_bytes, cached=cached):
            self.reports.put(message)

    def _loader(self, blocks: list[int], tokenizer: Tokenizer, device: torch.device) -> DataLoader[PackedBatch]:
        """Return the batches of *blocks*, in their order."""
        positions = [self._positions(block) for block in blocks]
        ends = np.cumsum([0, *map(len, positions)]).tolist()
        return create_async_dataloader(
            IndexBasedDataset(self.index, np.concatenate([np.empty(0, np.int64), *positions])),
            VarlenCollator(tokenizer, max_residues=self.config.max_residues, in_windows=self.config.in_windows),
            (range(start, end) for start, end in pairwise(ends)),
            loader_workers=self.config.loader_workers,
            pin_memory=device.type == "cuda",
        )

    def _positions(self, block: int) -> IntArray:
        """Return the index positions of *block* that are to be computed."""
        positions = self.plan.block_positions(block)
        excused = self.assignment.excused
        return positions if not excused else positions[[item not in excused for item in positions.tolist()]]

    def _is_whole(self, block: int) -> bool:
        """Whether no sequence of *block* is excused: then its rows are those of the plan's batch."""
        return len(self._positions(block)) == len(self.plan.block_positions(block))

    def _say(self, batch: PackedBatch) -> None:
        """Tell the parent what is computed next, so that it knows if we do not live to tell the result."""
        if batch.positions:
            message = {"kind": "start", "block": self.plan.block_of(batch.positions[0])}
            self.reports.put(message if len(batch.positions) > 1 else {**message, "position": batch.positions[0]})

    def _step(self) -> None:
        """Tell the parent that work goes on that has no batches."""
        if time.monotonic() - self._last_step_s > STEP_INTERVAL_S:
            self._last_step_s = time.monotonic()
            self.reports.put({"kind": "step"})


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
    with spans.span(spans.PREPARING, name="load model"):
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
    loaded = {"kind": "model_loaded", "seconds": seconds, "attention_kernel": attention.name}
    reports.put(loaded | ({"gpu_uuid": gpu_uuid(device)} if device.type == "cuda" else {}))
    return model, tokenizer


def _own_label() -> str:
    return Device(os.environ.get(VISIBLE_VARIABLE, CPU_TOKEN)).label


def gpu_uuid(device: torch.device) -> str:
    """Return what the driver calls the GPU that we see: numbers of CUDA need not be those of the driver."""
    token = os.environ.get(VISIBLE_VARIABLE, "")
    return token if token.startswith("MIG-") else f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _stop_on_sigterm() -> threading.Event:
    stop = threading.Event()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
    return stop


def peak_memory(device: torch.device) -> dict[str, int]:
    """Return the MiB that this process had at the most: resident, and on a GPU those of torch's tensors there."""
    lines = Path("/proc/self/status").read_text().splitlines()  # getrusage counts in what our parent had when it forked
    found = [int(line.split()[1]) >> 10 for line in lines if line.startswith("VmHWM:")]
    peak = {"peak_resident_mib": found[0]} if found else {}  # a sandbox's kernel may not tell
    if device.type == "cuda":
        peak["peak_gpu_mib"] = torch.cuda.max_memory_allocated(device) >> 20
    return peak


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
