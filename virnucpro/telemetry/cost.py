"""What a run cost: rows by stage and worker, summed over the starts of a run, as ``run.json`` and Prefect have them."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

from virnucpro.telemetry.snapshot import CostRow

if TYPE_CHECKING:
    from collections.abc import Iterable

OUTSIDE = "run"
"""In place of a stage: what the run's own process does outside of its stages."""
_SUMS = ("cpu_seconds", "gpu_seconds", "tokens", "nucleotides", "restarts")
_PEAKS = ("peak_memory_bytes", "peak_gpu_memory_bytes")


def merged(rows: Iterable[CostRow]) -> tuple[CostRow, ...]:
    """Return one row for each stage, worker, host and device, in the order in which they came."""
    found: dict[tuple[str, int | None, str, str], CostRow] = {}
    for row in rows:
        key = row.stage, row.worker, row.host, row.device
        found[key] = _added(found.get(key) or CostRow(*key), row)
    return tuple(found.values())


def cost_record(rows: Iterable[CostRow]) -> dict[str, Any]:
    """Return what ``run.json`` holds: *total*, of which peaks are those of one process, and *rows*; {} of no rows."""
    if not (all_rows := merged(rows)):
        return {}
    total = reduce(_added, all_rows, CostRow("", None, "", ""))
    total_of = {name: getattr(total, name) for name in (*_SUMS, *_PEAKS)}
    return {"total": total_of, "rows": [asdict(row) for row in all_rows]}


def _added(one: CostRow, other: CostRow) -> CostRow:
    sums: dict[str, Any] = {name: round(getattr(one, name) + getattr(other, name), 3) for name in _SUMS}
    peaks = {name: max(getattr(one, name) or 0, getattr(other, name) or 0) or None for name in _PEAKS}
    return replace(one, **sums, **peaks)
