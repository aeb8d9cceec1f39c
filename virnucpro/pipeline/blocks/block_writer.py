"""
From results to durable blocks: a worker's one way to keep rows, and to report what it kept and what failed.

The embedding cache keeps rows as well, and gives a block back whole or not at all: a block with a missing row is
computed whole, in the plan's batch. The cache is a convenience: a failure of it is reported once, in the worker's log
and to the parent, and from then on everything is computed.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import structlog

from virnucpro.errors import CacheError
from virnucpro.spans import WRITING, span
from virnucpro.store.embedding_cache import EmbeddingCache
from virnucpro.store.parts import BlockRows, write_part
from virnucpro.store.schema import BlockOrigin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from virnucpro.config import ModelConfig
    from virnucpro.data.packing import BlockPlan
    from virnucpro.data.sequence_index import SequenceIndex
    from virnucpro.pipeline.async_inference import InferenceResult
    from virnucpro.pipeline.work.worker_process import ReportPipe

log = structlog.get_logger(__name__)

PART_INTERVAL_S = 60.0
"""Seconds after which finished blocks are made durable even if they are few: what a crash can cost."""


class BlockWriter:
    """
    Gathers finished blocks into parts; what is pending becomes durable when the context ends, even by an error.

    Args:
        sequences_per_part: Sequences after which a part is written; 1 makes every block durable at once.
        reports: Takes progress and failed sequences; None reports nothing.
        processor: Computes the rows; empty where none does.
        on_durable: Called with blocks that have become durable, and the bytes of the part that holds them.
    """

    def __init__(
        self,
        folder: Path,
        plan: BlockPlan,
        sequences_per_part: int,
        *,
        reports: ReportPipe | None = None,
        cache: BlockCache | None = None,
        processor: str = "",
        on_durable: Callable[[Sequence[BlockRows], int], None] = lambda *_: None,
    ) -> None:
        self.blocks = self.sequences = self.tokens = 0
        self._folder = folder
        self._plan = plan
        self._sequences_per_part = sequences_per_part
        self._reports = reports
        self._cache = cache
        self._computed_by = {"plan_fingerprint": plan.fingerprint, "processor": processor}
        self._on_durable = on_durable
        self._pending: list[BlockRows] = []
        self._last_s = time.monotonic()

    def take(self, block: int, result: InferenceResult) -> None:
        """Keep the rows of *block*, and report them and what failed in it; ``OutputError`` where the disk refuses."""
        if result.is_resplit:
            log.warning("block.resplit", block=block, sequences=len(result.positions), tokens=result.num_tokens)
        if result.widened:
            advice = "these overflowed and were computed in fp32: where many do, use --precision bf16"
            log.warning("block.widened", block=block, sequences=len(result.widened), advice=advice)
        for name in result.widened:
            log.info("sequence.widened", block=block, sequence_id=name)
        for item in result.failed:
            log.error(
                "sequence.failed", block=block, sequence_id=item.sequence_id, failure=item.failure, reason=item.what
            )
            failed = {"kind": "sequence_failed", "block": block, "position": item.position}
            self._report({**failed, "failure": item.failure.value})
        if result.positions:
            origin = BlockOrigin.WIDENED if result.widened else BlockOrigin.COMPUTED
            origin = BlockOrigin.RESPLIT if result.is_resplit else origin
            positions = np.array(result.positions, dtype=np.int64)
            self.add(BlockRows(block, positions, result.sequence_ids, result.embeddings, origin))
        self.blocks += 1
        self.sequences += len(result.positions)
        self.tokens += result.num_tokens
        self._report(
            {
                "kind": "progress",
                "block": block,
                "rows": len(result.positions),
                "sequences": self.sequences,
                "tokens": self.tokens,
                "batch_tokens": result.num_tokens,
                "planned_tokens": int(self._plan.tokens[block]),
                "packing": round(min(1.0, result.num_tokens / self._plan.token_budget), 6),
                "seconds": round(result.seconds, 6),
                "oom_splits": result.oom_splits,
            }
        )

    def add(self, rows: BlockRows) -> None:
        """Keep rows without a report; ``OutputError`` where the disk refuses."""
        self._pending.append(rows)
        sequences = sum(len(item.positions) for item in self._pending)
        if sequences >= self._sequences_per_part or time.monotonic() - self._last_s > PART_INTERVAL_S:
            self._flush()

    def _flush(self) -> None:
        if self._pending:
            path = write_part(self._folder, self._pending, **self._computed_by)
            log.info("part.written", part=path.name, blocks=len(self._pending))
            self._on_durable(self._pending, path.stat().st_size)
            if self._cache is not None:
                self._cache.keep(self._pending)
        self._pending, self._last_s = [], time.monotonic()

    def _report(self, message: dict[str, object]) -> None:
        if self._reports is not None:
            self._reports.put(message)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if not isinstance(error, OSError):  # a disk that refused one part will refuse the next
            self._flush()


class BlockCache:
    """The embedding cache of one worker, safe from any thread; without a folder it holds and keeps nothing."""

    def __init__(self, config: ModelConfig, index: SequenceIndex, plan: BlockPlan, reports: ReportPipe) -> None:
        self._index = index
        self._plan = plan
        self._reports = reports
        self._lock = threading.RLock()
        self._cache: EmbeddingCache | None = None
        settings = config.settings.cache
        if settings.cache_dir:
            try:
                self._cache = EmbeddingCache(
                    Path(settings.cache_dir), config.cache_space(), max_bytes=int(settings.cache_gib * 2**30)
                )
            except CacheError as error:
                self._give_up(error)

    def take(self, blocks: Iterable[int]) -> Iterator[BlockRows]:
        """Yield the rows of those of *blocks* that are in the cache whole, in their order."""
        for block in blocks:
            positions = self._plan.block_positions(block)
            with self._lock:
                if self._cache is None:
                    return
                try:
                    rows = self._cache.get(self._index.sequence_hashes[positions])
                except CacheError as error:
                    self._give_up(error)
                    return
            if rows is not None:
                yield BlockRows(block, positions, self._index.sequence_ids(positions), rows, BlockOrigin.CACHED)

    def keep(self, blocks: Sequence[BlockRows]) -> None:
        hashes = self._index.sequence_hashes[np.concatenate([item.positions for item in blocks])]
        with self._lock:
            if self._cache is None:
                return
            try:
                with span(WRITING, name="cache", blocks=len(blocks)):
                    self._cache.put(hashes, np.concatenate([item.embeddings for item in blocks]))
            except CacheError as error:
                self._give_up(error)

    def _give_up(self, error: CacheError) -> None:
        log.warning("cache.unusable", cache=error.path, reason=error.what)
        self._reports.put({"kind": "cache_unusable", "reason": str(error)[:600]})
        self.close()

    def close(self) -> None:
        if self._cache is not None:
            self._cache.close()
            self._cache = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
