"""
What is already done: the one place that decides whether a block's rows on disk may be used.

A part or shard may be used when it was computed by the same plan, every byte of it matches its seal, and the rows of
each of its blocks are the plan's. Anything else on disk is worthless and is computed again. A block may lack the rows
of sequences that could not be computed: it counts as finished only while those sequences are quarantined, and where two
files hold a block, the one with more of its rows is used.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import structlog

from virnucpro import durable
from virnucpro.errors import ResultError, SourceGoneError
from virnucpro.store.parts import SealedBlocks, first_block, part_paths, read_block_numbers, write_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
    from pathlib import Path

    from virnucpro.arrays import IntArray
    from virnucpro.data.packing import BlockPlan
    from virnucpro.run_layout import RunLayout

log = structlog.get_logger(__name__)

NO_SEALS: Mapping[Path, bytes] = MappingProxyType({})
"""No file was checked elsewhere."""


@dataclass
class FinishedBlocks:
    """Checked parts and shards, and the blocks that they hold between them."""

    sources: list[SealedBlocks] = field(default_factory=list)
    """What is used of each file, shards first; no block is in two of them."""
    blocks: set[int] = field(default_factory=set)
    rejected: list[Path] = field(default_factory=list)
    """Files that exist and cannot be used: another plan's, damaged, or cut short."""
    contents: dict[Path, set[int]] = field(default_factory=dict)
    """Every file that can be used -> the blocks in it, also those that another file has as well."""

    def positions_of(self, blocks: Container[int]) -> Iterator[tuple[int, IntArray]]:
        """Yield each of *blocks* that is in a source, with the index positions of its rows, int64 (rows,)."""
        for source in self.sources:
            yield from (found for found in _positions_by_block(source) if found[0] in blocks)


def find_finished_blocks(
    layout: RunLayout,
    plan: BlockPlan,
    *,
    among: Container[int] | None = None,
    always: Path | None = None,
    parts: Sequence[Path] | None = None,
    quarantined: Container[int] = frozenset(),
    seals: Mapping[Path, bytes] = NO_SEALS,
    on_step: Callable[[], None] = lambda: None,
) -> FinishedBlocks:
    """
    Check the parts and shards of a run.

    Args:
        among: Only files that hold one of these blocks are read; None reads all.
        always: A file that is read whatever it holds.
        parts: Parts that are looked at, beside every shard; None looks at all of the folder.
        quarantined: Index positions of sequences that a finished block may lack.
        seals: Of files that other hosts have just checked whole.
    """
    found = FinishedBlocks()
    checked: list[SealedBlocks] = []
    for path in [*layout.shards(), *(part_paths(layout.parts_dir) if parts is None else parts)]:
        on_step()
        try:
            if among is not None and path != always and not any(b in among for b in read_block_numbers(path).tolist()):
                continue
            source = SealedBlocks.open(path, checked=seals.get(path))
            _check_plan(source, plan)
            if path not in seals:
                source.check()
        except (FileNotFoundError, SourceGoneError):  # its rank sealed it into a shard just now
            continue
        except (ResultError, OSError) as error:
            reason = error.what if isinstance(error, ResultError) else error.strerror or str(error)
            log.warning("part.rejected", part=path.name, reason=reason)
            found.rejected.append(path)
        else:
            checked.append(source)
            found.contents[path] = set(source.blocks[:, 0].tolist())
    for source in _disjoint(checked):
        found.sources.append(source)
        found.blocks.update(_finished(source, plan, quarantined))
    return found


class BlockUnits:
    """The blocks of a run, as they are assigned to hosts; *sizes*: tokens of each, int64 (B,)."""

    def __init__(self, layout: RunLayout, plan: BlockPlan) -> None:
        self._layout, self._plan = layout, plan
        self.sizes = plan.tokens

    def durable(self, blocks: Collection[int], quarantined: Collection[int] = ()) -> set[int]:
        """Return those of *blocks* whose rows are on disk but for *quarantined*; no part holds blocks of two units."""
        wanted = frozenset(blocks)
        among = wanted if len(wanted) < len(self.sizes) else None
        parts = [path for path in part_paths(self._layout.parts_dir) if first_block(path) in wanted]
        found = find_finished_blocks(self._layout, self._plan, among=among, parts=parts, quarantined=quarantined)
        return found.blocks & wanted


def find_all_finished(
    layout: RunLayout, plan: BlockPlan, *, check: Callable[[list[Path]], Mapping[Path, bytes]] | None = None
) -> FinishedBlocks:
    """
    Check the parts and shards of a run while other processes may seal them; look again where that hid a block.

    Every finished block that was on disk at the start is found. *check* has files checked by several hosts, every byte
    and number, and returns the seals of the intact ones.
    """
    while True:
        before = _listed(layout)
        seals = NO_SEALS if check is None else check(list(before))
        found = find_finished_blocks(layout, plan, seals=seals)
        if len(found.blocks) == len(plan) or _listed(layout) == before:
            return found
        log.info("blocks.looked_for_again", finished=len(found.blocks), blocks=len(plan))


def _listed(layout: RunLayout) -> dict[Path, tuple[int, int]]:
    """Return inode and last change of each part and shard."""
    listed = {}
    for path in [*layout.shards(), *part_paths(layout.parts_dir)]:
        with suppress(FileNotFoundError):  # it went just now
            file = path.stat()
            listed[path] = (file.st_ino, file.st_mtime_ns)
    return listed


def _disjoint(sources: list[SealedBlocks]) -> Iterator[SealedBlocks]:
    """Yield views of *sources* in which each block stands once: with the most rows, in the first that has them."""
    most_rows: dict[int, tuple[int, int]] = {}
    for number, source in enumerate(sources):
        for block, rows, _ in source.blocks.tolist():
            if rows > most_rows.get(block, (0, 0))[0]:
                most_rows[block] = (rows, number)
    best: list[set[int]] = [set() for _ in sources]
    for block, (_, number) in most_rows.items():
        best[number].add(block)
    for source, blocks in zip(sources, best, strict=True):
        used = source.only(blocks)
        if len(used.blocks) or not len(source.blocks):
            yield used


def seal_shard(
    rank: int,
    mine: Container[int],
    plan: BlockPlan,
    layout: RunLayout,
    *,
    hidden_dim: int,
    on_step: Callable[[], None] = lambda: None,
) -> int:
    """
    Put the finished blocks of *mine* into the rank's shard, remove the parts that are now in it, return its rows.

    Parts that also hold blocks of another rank (left by a run with another number of ranks) stay where they are:
    aggregation reads them there. Parts that begin with another rank's block are not opened: a thousand ranks that each
    read every part would keep the file system busy for longer than their work. A part that another rank seals meanwhile
    stays in that rank's shard.

    Raises:
        OutputError: The shard cannot be written.
        ResultError: The written shard is not intact.
    """
    shard = layout.shard(rank)
    begun = [path for path in part_paths(layout.parts_dir) if first_block(path) in mine]
    found = find_finished_blocks(layout, plan, among=mine, always=shard, parts=begun, on_step=on_step)
    parts = {
        path
        for path, blocks in found.contents.items()
        if path.parent == layout.parts_dir and all(block in mine for block in blocks)
    }
    fresh = [source for source in found.sources if source.path in parts and len(source.blocks)]
    if fresh or shard not in found.contents:
        sealed_before = [source for source in found.sources if source.path == shard]
        try:
            write_shard(
                shard,
                [*sealed_before, *fresh],
                plan_fingerprint=plan.fingerprint,
                hidden_dim=hidden_dim,
                on_step=on_step,
            )
        except (FileNotFoundError, SourceGoneError):
            if all(source.path.exists() for source in fresh):
                raise
            # a restarted rank found a block of this rank finished, and has just sealed it
            return seal_shard(rank, mine, plan, layout, hidden_dim=hidden_dim, on_step=on_step)
    sealed = SealedBlocks.open(shard)
    _check_plan(sealed, plan)
    sealed.check()
    for path in parts:
        durable.remove(path)
    log.info("shard.sealed", shard=shard.name, sequences=len(sealed.positions))
    return len(sealed.positions)


def _positions_by_block(source: SealedBlocks) -> Iterator[tuple[int, IntArray]]:
    """Yield each block of *source* with the index positions of its rows."""
    end = 0
    for block, rows in source.blocks[:, :2].tolist():
        start, end = end, end + rows
        yield block, source.positions[start:end]


def _finished(source: SealedBlocks, plan: BlockPlan, quarantined: Container[int]) -> set[int]:
    """Return those blocks of *source* that lack no sequence, or only quarantined ones."""
    finished = set()
    for block, positions in _positions_by_block(source):
        wanted = plan.block_positions(block)
        if len(positions) == len(wanted):
            finished.add(block)
        elif len(positions):
            missing = np.setdiff1d(wanted, positions, assume_unique=True)
            if all(position in quarantined for position in missing.tolist()):
                finished.add(block)
    return finished


def _check_plan(source: SealedBlocks, plan: BlockPlan) -> None:
    """Raise ``ResultError`` when *source* was not computed by *plan*."""
    if source.plan_fingerprint != plan.fingerprint:
        raise ResultError(source.path, "computed from another input, model or setting")
    numbers = source.blocks[:, 0].tolist()
    if any(not 0 <= number < len(plan) for number in numbers) or len(set(numbers)) < len(numbers):
        raise ResultError(source.path, "names blocks that the plan does not have")
    for number, positions in _positions_by_block(source):
        wanted = plan.block_positions(number)
        if not np.array_equal(positions, wanted) and (
            (np.diff(positions) <= 0).any() or not np.isin(positions, wanted).all()
        ):
            raise ResultError(source.path, "its rows are not the plan's sequences")
