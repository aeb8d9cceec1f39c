"""
From shards and remaining parts to one result, in the order of the input.

Blocks are taken by number, each once, from any checked file that holds them. Every record without a row is listed by
id.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from virnucpro import durable
from virnucpro.choices import ResultForm
from virnucpro.errors import SourceGoneError
from virnucpro.pipeline.blocks.finished_blocks import find_all_finished
from virnucpro.pipeline.result import disk_space
from virnucpro.pipeline.result.rows import rows_of_parts
from virnucpro.store import schema
from virnucpro.store.results.forms import remove_results, result_of
from virnucpro.store.schema import BlockOrigin

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np

    from virnucpro.data.packing import BlockPlan
    from virnucpro.data.sequence_index import SequenceIndex
    from virnucpro.pipeline.blocks.finished_blocks import FinishedBlocks
    from virnucpro.pipeline.hosts.result_passes import ResultPasses
    from virnucpro.pipeline.result.rows import ResultRows
    from virnucpro.run_layout import RunLayout

    IntArray = np.ndarray[Any, np.dtype[np.int64]]

log = structlog.get_logger(__name__)

FAILED_HEADER = "sequence_id\treason\tattempts\n"


@dataclass(frozen=True, kw_only=True)
class Aggregation:
    """What was written and what is missing."""

    output_path: Path | None
    """The result file, or the folder of its shards; its partial name where rows are missing, None where there is no
    row."""
    files: Mapping[str, str]
    """Hex sha256 of each file of the result, by its name in the run's folder."""
    num_rows: int
    """Rows in it."""
    num_missing: int
    """Records of the input without a row, copies counted."""
    num_truncated: int
    """Rows whose sequence was truncated to the residue limit."""
    missing_positions: IntArray = field(compare=False)
    """int64 (num_missing,): index positions of those records, in the order of the input."""
    num_resplit_blocks: int = 0
    """Blocks whose rows were computed in pieces."""
    num_cached_blocks: int = 0
    """Blocks whose rows came from the embedding cache."""

    @property
    def is_complete(self) -> bool:
        """Whether every record has its row."""
        return self.num_missing == 0


def aggregate_shards(
    layout: RunLayout,
    index: SequenceIndex,
    plan: BlockPlan,
    *,
    max_residues: int,
    hidden_dim: int,
    result_form: ResultForm = ResultForm.SINGLE,
    hosts: ResultPasses | None = None,
) -> Aggregation:
    """
    Write the result from everything that is finished.

    Ranks on hosts that no longer count may still seal shards: where a file vanishes meanwhile, all is read again.

    Args:
        layout: The run's folder.
        index: The input.
        plan: Of the run.
        max_residues: Residues of a sequence that were embedded.
        hidden_dim: Width of a row, used where there is none.
        result_form: Any but ``auto``.
        hosts: Check what exists and write the shards of a sharded result; None for this process.

    Returns:
        What was written and what is missing.

    Raises:
        OutputError: The result cannot be written; the file that proves it whole is absent or as before.
    """
    while True:
        finished = find_all_finished(layout, plan, check=None if hosts is None else hosts.check)
        rows, missing = rows_of_parts(index, finished.sources, hidden_dim=hidden_dim, max_residues=max_residues)
        try:
            return _aggregated(layout, finished, rows, missing, result_form, hosts)
        except SourceGoneError as error:
            log.info("result.begun_again", source=Path(error.path).name)


def _aggregated(
    layout: RunLayout,
    finished: FinishedBlocks,
    rows: ResultRows,
    missing: IntArray,
    result_form: ResultForm,
    hosts: ResultPasses | None,
) -> Aggregation:
    """Write the result; ``SourceGoneError`` where it must be done again."""
    if len(missing):  # an earlier result, found damaged, must not keep the name of a complete one
        remove_results(layout, is_partial=False)
    if len(missing) and not len(rows):
        remove_results(layout, is_partial=True)
        return Aggregation(
            output_path=None,
            files={},
            num_rows=0,
            num_missing=len(missing),
            num_truncated=0,
            missing_positions=missing,
        )
    result = result_of(layout, result_form, is_partial=len(missing) > 0)
    known = result.write(rows, give_way=partial(disk_space.give_way_to_result, layout), hosts=hosts)
    origins = [origin for source in finished.sources for origin in source.blocks[:, 2].tolist()]
    copies = len(rows) - int(rows.starts[-1])
    log.info("result.written", result=result.path.name, rows=len(rows), copies=copies, missing=len(missing))
    return Aggregation(
        output_path=result.path,
        files={result.name_of(file): known.get(file) or durable.sha256_of(file) for file in result.files()},
        num_rows=len(rows),
        num_missing=len(missing),
        num_truncated=int((rows.truncated_from() > 0).sum()),
        missing_positions=missing,
        num_resplit_blocks=origins.count(BlockOrigin.RESPLIT),
        num_cached_blocks=origins.count(BlockOrigin.CACHED),
    )


def write_failed_sequences(
    layout: RunLayout,
    index: SequenceIndex,
    missing: IntArray,
    why: Callable[[int], tuple[str, int]],
) -> None:
    """
    List every record without a row, those skipped at reading first; removes an earlier list where there is none.

    Args:
        layout: The run's folder.
        index: The input.
        missing: int64 (num_missing,): index positions, in the order of the input.
        why: Returns (reason, worker processes that tried) of the computed sequence at an index position.

    Raises:
        OutputError: The list cannot be written.
    """
    if not len(missing) and not index.num_skipped:
        durable.remove(layout.failed_sequences)
        return
    with durable.replacing(layout.failed_sequences) as file:
        file.write(FAILED_HEADER.encode())
        for record in index.skipped():
            file.write(f"{record.sequence_id}\t{record.reason}\t0\n".encode())
        for start in range(0, len(missing), schema.IDS_PER_WRITE):
            positions = missing[start : start + schema.IDS_PER_WRITE]
            computed = index.representatives[positions].tolist()
            named = zip(index.sequence_ids(positions), map(why, computed), strict=True)
            file.write("".join(f"{name}\t{reason}\t{attempts}\n" for name, (reason, attempts) in named).encode())
