"""
The work of one worker process: each assigned block is computed and made durable, then its shard is sealed.

Blocks come from the parent whenever the loader needs more; a worker that is called without has one unit, its stride.
The model stays loaded and the device busy from one unit to the next. What is finished or in the cache is sorted out
before; suspects come last.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import structlog

from virnucpro import spans
from virnucpro.data.collators import VarlenCollator, create_async_dataloader
from virnucpro.data.sequence_dataset import IndexBasedDataset
from virnucpro.errors import StoppedError
from virnucpro.pipeline.async_inference import AsyncInferenceRunner
from virnucpro.pipeline.blocks.block_writer import BlockCache, BlockWriter
from virnucpro.pipeline.blocks.finished_blocks import find_finished_blocks, seal_shard
from virnucpro.pipeline.devices import processor_of
from virnucpro.pipeline.work.assignment import AssignedBlocks, AssignedUnit
from virnucpro.telemetry.ranks import durable_messages

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch
    from torch.utils.data import DataLoader

    from virnucpro.arrays import IntArray
    from virnucpro.config import ModelConfig
    from virnucpro.data.collators import PackedBatch, Tokenizer
    from virnucpro.data.packing import BlockPlan
    from virnucpro.data.sequence_index import SequenceIndex
    from virnucpro.pipeline.async_inference import InferenceResult, PackedEncoder
    from virnucpro.pipeline.work.assignment import Assignment
    from virnucpro.pipeline.work.worker_process import ReportPipe
    from virnucpro.run_layout import RunLayout
    from virnucpro.store.parts import BlockRows

log = structlog.get_logger(__name__)

STEP_INTERVAL_S = 1.0
"""Seconds between two messages that work without batches (checking, sealing, waiting) continues."""


@dataclass
class BlockWork:
    index: SequenceIndex
    plan: BlockPlan
    layout: RunLayout
    config: ModelConfig
    assignment: Assignment
    reports: ReportPipe
    stop: threading.Event
    load_model: Callable[[], tuple[PackedEncoder, Tokenizer]]
    """Called once, when there is something to compute."""
    loader_processes: int = 0
    """Beside this one, to read and tokenise ahead."""
    _units: AssignedBlocks = field(init=False)
    _unit: AssignedUnit = field(init=False)
    _left: set[int] = field(default_factory=set)
    """Blocks of our units that are to be computed, and have not been."""
    _suspects: list[int] = field(default_factory=list)
    """Those among them that may have ended a process."""
    _rowless: list[int] = field(default_factory=list)
    """Blocks of which no sequence could be computed, until it is known whether they or this process are the cause."""
    _resumed: int = 0
    """Sequences found finished."""
    _has_reported: bool = False
    """Whether what was found has been reported."""
    _model: tuple[AsyncInferenceRunner, Tokenizer] | None = None
    _last_step_s: float = 0.0
    _started_s: float = field(default_factory=time.monotonic)
    _compute_s: float = 0.0

    def __post_init__(self) -> None:
        self._units = AssignedBlocks(self.assignment, self.reports, self.stop, self._step)
        self._unit = self.assignment.first

    def do(self, rank: int, device: torch.device) -> int:
        """Compute what is not finished, seal the rank's shard, and return the rows; raises StoppedError."""
        config, units = self.config, self._units
        with BlockCache(config, self.index, self.plan, self.reports) as cache:
            writer = self._writer(reports=self.reports, cache=cache, processor=processor_of(device.type))
            while (unit := units.wait()) is not None:
                blocks = self._blocks_to_compute(chain([unit], () if unit.suspects else units.iter_now()), cache)
                first = next(blocks, None)
                if (first is not None or self._suspects) and not self.stop.is_set():
                    self._compute(chain([] if first is None else [first], blocks), device, writer)
                units.mark_durable(self._rowless)  # nothing is left that could prove this process
                self._rowless.clear()
        if self._left or not units.all_done():
            raise StoppedError(signal.SIGTERM)
        rows = writer.sequences if self.assignment.is_on_cluster else self._sealed(rank)
        log.info(
            "shard.finished",
            rows=rows,
            sequences=writer.sequences,
            tokens=writer.tokens,
            seconds=round(time.monotonic() - self._started_s, 3),
            tokens_per_second=round(writer.tokens / self._compute_s) if writer.tokens else 0,
        )
        return rows

    def _sealed(self, rank: int) -> int:
        """Seal the rank's shard, and return its rows."""
        hidden_dim = self.config.hidden_dim if self._model is None else self._model[0].model.hidden_dim
        own = _among(self._units.own_blocks())
        with spans.span(spans.SEALING):
            return seal_shard(rank, own, self.plan, self.layout, hidden_dim=hidden_dim, on_step=self._step)

    # --- what is to be computed; on a GPU this runs in the loader's thread ---

    def _blocks_to_compute(self, units: Iterable[AssignedUnit], cache: BlockCache) -> Iterator[int]:
        """Yield the blocks of *units* to compute; suspects are kept for later."""
        for unit in units:
            self._unit = unit
            todo = self._sorted_out(unit, cache)
            if unit.to_check:
                continue
            self._left.update(todo)
            self._suspects += [block for block in todo if block in unit.suspects]
            yield from [block for block in todo if block not in unit.suspects]
            if self.stop.is_set():
                return

    def _sorted_out(self, unit: AssignedUnit, cache: BlockCache) -> list[int]:
        """Return the blocks of *unit* that are neither finished, nor in the cache, nor quarantined as a whole."""
        blocks = unit.blocks
        finished = set() if unit.is_fresh else self._finished(blocks)
        todo = [block for block in blocks if block not in finished and len(self._positions(block))]
        resumed = sum(len(self._positions(block)) for block in blocks if block in finished)
        self._resumed += resumed
        if not self._has_reported:
            self.reports.put({"kind": "found"})
            log.info(
                "worker.started", blocks=len(blocks), blocks_to_do=len(todo), sequences_resumed=resumed, pid=os.getpid()
            )
        cached = self._write_cached(todo, cache)
        todo = [block for block in todo if block not in cached]
        waiting = {*todo, *cached}
        self._units.mark_durable(block for block in blocks if block not in waiting)
        if resumed or not self._has_reported or not unit.is_fresh:
            self.reports.put({"kind": "resumed", "sequences": self._resumed})
        self._has_reported = True
        return todo

    def _finished(self, blocks: Sequence[int]) -> set[int]:
        """Return those of *blocks* that are durable, and report them."""
        if not blocks:
            return set()
        with spans.span(spans.PREPARING, name="check what is done"):
            found = find_finished_blocks(
                self.layout,
                self.plan,
                among=_among(blocks),
                quarantined=self._unit.quarantined,
                on_step=self._step,
            )
        finished = found.blocks.intersection(blocks)
        self._report_durable(found.positions_of(finished))
        return finished

    def _write_cached(self, todo: list[int], cache: BlockCache) -> set[int]:
        """Make those blocks durable that the cache holds whole; return their numbers."""
        blocks: set[int] = set()
        sequences = 0
        with self._writer() as writer:
            for rows in cache.take(todo):
                writer.add(rows)
                blocks.add(rows.block)
                sequences += len(rows.positions)
                if self.stop.is_set():
                    break
        if blocks:
            log.info("worker.cached", blocks=len(blocks), sequences=sequences)
            self.reports.put({"kind": "cached", "sequences": sequences})
        return blocks

    # --- computing ---

    def _compute(self, plain: Iterable[int], device: torch.device, writer: BlockWriter) -> None:
        """Compute blocks and make them durable as they come, suspects last."""
        if self._model is None:
            model, tokenizer = self.load_model()
            self._model = AsyncInferenceRunner(model, device), tokenizer
        runner, tokenizer = self._model
        started_s = time.monotonic()
        with writer:
            for result in runner.run(self._loader(plain, tokenizer, device), stop=self.stop, on_start=self._announce):
                self._keep(self._block_of(result), result, writer)
            suspicion = self._unit.suspects
            suspects = sorted(self._suspects, key=lambda block: suspicion[block])
            self._suspects.clear()
            if suspects and not self.stop.is_set():
                for block, batch in zip(suspects, self._loader(suspects, tokenizer, device), strict=True):
                    self._keep(block, self._compute_suspect(block, batch, runner), writer)
                    if self.stop.is_set():
                        break
        self._compute_s += time.monotonic() - started_s

    def _keep(self, block: int, result: InferenceResult, writer: BlockWriter) -> None:
        writer.take(block, result)
        self._left.discard(block)
        if not result.positions:
            self._rowless.append(block)
        elif self._rowless:  # this process can compute, so the fault lies with what it could not compute
            self._units.mark_durable(self._rowless)
            self._rowless.clear()

    def _block_of(self, result: InferenceResult) -> int:
        return self.plan.block_of(result.positions[0] if result.positions else result.failed[0].position)

    def _compute_suspect(self, block: int, batch: PackedBatch, runner: AsyncInferenceRunner) -> InferenceResult:
        if not self._unit.computes_singly(block):
            (result,) = runner.run([batch], on_start=self._announce)
        else:
            log.warning("block.apart", block=block, sequences=len(batch.positions))
            result = runner.run_apart(
                batch,
                on_start=self._announce,
                last=self._unit.lone_suspects,
                then_whole=self._unit.may_be_whole(block) and self._is_whole(block),
            )
        return result if self._is_whole(block) else replace(result, is_resplit=True)

    def _loader(self, blocks: Iterable[int], tokenizer: Tokenizer, device: torch.device) -> DataLoader[PackedBatch]:
        """Return the batches of *blocks*, in their order; each block is asked for when its batch is about to be."""
        return create_async_dataloader(
            IndexBasedDataset(self.index),
            VarlenCollator(tokenizer, max_residues=self.config.max_residues, in_windows=self.config.in_windows),
            (self._positions(block).tolist() for block in blocks),
            loader_processes=self.loader_processes,
            pin_memory=device.type == "cuda",
        )

    def _writer(self, **of_computed: Any) -> BlockWriter:
        at_once = 1 if self.assignment.after_failure else self.config.sequences_per_part

        def on_durable(rows: Sequence[BlockRows], written_bytes: int) -> None:
            blocks = ((item.block, item.positions) for item in rows)
            self._report_durable(blocks, written_bytes=written_bytes)
            self._units.mark_durable(item.block for item in rows)

        return BlockWriter(self.layout.parts_dir, self.plan, at_once, on_durable=on_durable, **of_computed)

    def _positions(self, block: int) -> IntArray:
        """Return the index positions of *block* that are to be computed."""
        positions = self.plan.block_positions(block)
        quarantined = self._unit.quarantined
        return positions if not quarantined else positions[[item not in quarantined for item in positions.tolist()]]

    def _is_whole(self, block: int) -> bool:
        """Whether no sequence of *block* is quarantined: then its rows are those of the plan's batch."""
        return len(self._positions(block)) == len(self.plan.block_positions(block))

    # --- messages to the parent ---

    def _report_durable(self, blocks: Iterable[tuple[int, IntArray]], *, written_bytes: int = 0) -> None:
        """Report durable *blocks*, given with the index positions of their rows."""
        whole: list[int] = []
        short: dict[int, int] = {}
        for block, positions in blocks:
            if len(positions) == len(self.plan.block_positions(block)):
                whole.append(block)
            else:
                short[block] = int(self.index.rows_of(positions).sum())
        for message in durable_messages(whole, short=short, written_bytes=written_bytes):
            self.reports.put(message)

    def _announce(self, batch: PackedBatch) -> None:
        """Announce what is computed next: it is suspect if this process ends before the result."""
        if batch.positions:
            block, sequences = self.plan.block_of(batch.positions[0]), len(batch.positions)
            message = {"kind": "start", "block": block, "sequences": sequences, "tokens": int(self.plan.tokens[block])}
            self.reports.put(message if sequences > 1 else {**message, "position": batch.positions[0]})

    def _step(self) -> None:
        """Report that work without batches continues."""
        if time.monotonic() - self._last_step_s > STEP_INTERVAL_S:
            self._last_step_s = time.monotonic()
            self.reports.put({"kind": "step"})


def _among(blocks: Sequence[int]) -> range | frozenset[int]:
    """Return *blocks* for quick look-ups."""
    return blocks if isinstance(blocks, range) else frozenset(blocks)
