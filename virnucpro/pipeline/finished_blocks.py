"""
What is already done: the one place that decides whether a block's rows on disk may be used.

A block is finished when a part or shard holds it that was computed by the same plan, whose every byte matches its
seal, and whose positions are the plan's. Anything else on disk is worthless and is computed again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import structlog

from virnucpro.errors import ResultError
from virnucpro.store.parts import SealedBlocks, part_paths, read_block_numbers, write_shard

if TYPE_CHECKING:
    from collections.abc import Container
    from pathlib import Path

    from virnucpro.data.packing import BlockPlan
    from virnucpro.run_layout import RunLayout

log = structlog.get_logger(__name__)


@dataclass
class FinishedBlocks:
    """Checked parts and shards, and the blocks that they hold between them."""

    sources: list[SealedBlocks] = field(default_factory=list)
    """Shards first; one block may be in several."""
    blocks: set[int] = field(default_factory=set)
    """Numbers of the finished blocks."""
    rejected: list[Path] = field(default_factory=list)
    """Files that exist and cannot be used: another plan's, damaged, or cut short."""


def find_finished_blocks(
    layout: RunLayout, plan: BlockPlan, *, among: Container[int] | None = None, always: Path | None = None
) -> FinishedBlocks:
    """
    Check the parts and shards of a run.

    Args:
        layout: The run's folder.
        plan: The plan that blocks must have been computed by.
        among: Only files that hold one of these blocks are read; None reads all.
        always: A file that is read whatever it holds.

    Returns:
        What may be used.
    """
    found = FinishedBlocks()
    for path in [*layout.shards(), *part_paths(layout.parts_dir)]:
        try:
            if among is not None and path != always and not any(b in among for b in read_block_numbers(path).tolist()):
                continue
            source = SealedBlocks.open(path)
            _check_plan(source, plan)
            source.check()
        except ResultError as error:
            log.warning("part.rejected", part=path.name, reason=error.what)
            found.rejected.append(path)
        except FileNotFoundError:  # its rank sealed it into a shard just now
            continue
        except OSError as error:
            log.warning("part.rejected", part=path.name, reason=error.strerror or str(error))
            found.rejected.append(path)
        else:
            found.sources.append(source)
            found.blocks.update(source.blocks[:, 0].tolist())
    return found


def seal_shard(rank: int, mine: range, plan: BlockPlan, layout: RunLayout, *, hidden_dim: int) -> int:
    """
    Put everything that is finished of *mine* into the rank's shard, and remove the parts that are now in it.

    Parts of which only some blocks belong to this rank (left by a run with another number of ranks) stay where they
    are: aggregation reads them there.

    Args:
        rank: Whose shard.
        mine: The rank's blocks.
        plan: Of the run.
        layout: The run's folder.
        hidden_dim: Width of a row, where there is none.

    Returns:
        Rows of the shard.

    Raises:
        OutputError: The shard cannot be written.
        ResultError: The shard did not come out whole.
    """
    shard = layout.shard(rank)
    finished = find_finished_blocks(layout, plan, among=mine, always=shard)
    chosen = [source for source in finished.sources if source.path == shard]
    is_sealed = bool(chosen)
    covered = {block for source in chosen for block in source.blocks[:, 0].tolist()}
    sealed_parts = []
    for source in finished.sources:
        blocks = set(source.blocks[:, 0].tolist())
        if source.path.parent != layout.parts_dir or not all(block in mine for block in blocks):
            continue
        if not blocks & covered:
            chosen.append(source)
            covered |= blocks
        if blocks <= covered:
            sealed_parts.append(source.path)
    if sealed_parts or not is_sealed:
        write_shard(shard, chosen, plan_fingerprint=plan.fingerprint, hidden_dim=hidden_dim)
    sealed = SealedBlocks.open(shard)
    _check_plan(sealed, plan)
    sealed.check()
    for path in sealed_parts:
        path.unlink(missing_ok=True)
    log.info("shard.sealed", shard=shard.name, sequences=len(sealed.positions))
    return len(sealed.positions)


def _check_plan(source: SealedBlocks, plan: BlockPlan) -> None:
    """Raise ``ResultError`` when *source* was not computed by *plan*."""
    if source.plan_fingerprint != plan.fingerprint:
        raise ResultError(source.path, "computed from another input, model or setting")
    numbers = source.blocks[:, 0].tolist()
    if any(not 0 <= number < len(plan) for number in numbers) or len(set(numbers)) < len(numbers):
        raise ResultError(source.path, "names blocks that the plan does not have")
    expected = [plan.block_positions(number) for number in numbers]
    sizes = [len(positions) for positions in expected]
    if sizes != source.blocks[:, 1].tolist() or not np.array_equal(
        np.concatenate([np.empty(0, np.int64), *expected]), source.positions
    ):
        raise ResultError(source.path, "its rows are not the plan's sequences")
