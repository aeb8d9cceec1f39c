"""
Blocks that need not be computed because the embedding cache holds the rows of all their sequences.

A block is taken from the cache whole or not at all: a block of which one row is missing is computed whole, in the
company that the plan gives it. The cache is a convenience: a failure of it is reported once, in the worker's
log and to the parent, and from then on everything is computed.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import structlog

from virnucpro.errors import CacheError
from virnucpro.spans import WRITING, span
from virnucpro.store.embedding_cache import EmbeddingCache
from virnucpro.store.parts import BlockRows
from virnucpro.store.schema import BlockOrigin

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from virnucpro.config import ModelConfig
    from virnucpro.data.packing import BlockPlan
    from virnucpro.data.sequence_index import SequenceIndex
    from virnucpro.pipeline.work.worker_process import ReportPipe

log = structlog.get_logger(__name__)


class BlockCache:
    """
    The embedding cache as one worker uses it; without a folder for it, it holds nothing and keeps nothing.

    Use it as a context manager; safe from any thread.

    Args:
        config: Where the cache is, how large it may be, and what rows are keyed by.
        index: The input.
        plan: Of the run.
        reports: Takes the reason if the cache cannot be used.
    """

    def __init__(self, config: ModelConfig, index: SequenceIndex, plan: BlockPlan, reports: ReportPipe) -> None:
        self._index = index
        self._plan = plan
        self._reports = reports
        self._lock = threading.RLock()
        self._cache: EmbeddingCache | None = None
        if config.settings.cache.cache_dir:
            try:
                self._cache = EmbeddingCache(
                    Path(config.settings.cache.cache_dir),
                    config.cache_space(),
                    max_bytes=int(config.settings.cache.cache_gib * 2**30),
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
        """Put the rows of *blocks* into the cache."""
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
        """Close the cache; from now on it holds nothing."""
        if self._cache is not None:
            self._cache.close()
            self._cache = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
