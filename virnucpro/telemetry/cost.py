"""What a run cost: rows by stage and worker, summed over the starts of a run, as ``run.json`` and Prefect have them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

OUTSIDE = "run"
"""In place of a stage: what the run's own process does outside of its stages."""
_SUMS = ("cpu_seconds", "gpu_seconds", "tokens", "nucleotides", "restarts")
_PEAKS = ("peak_memory_bytes", "peak_gpu_memory_bytes")


@dataclass(frozen=True)
class CostRow:
    stage: str
    """With those that it is within, as in ``dna/embed``."""
    worker: int | None
    """Rank; None for the run's own process."""
    host: str
    device: str
    cpu_seconds: float = 0.0
    gpu_seconds: float = 0.0
    tokens: int = 0
    nucleotides: int = 0
    restarts: int = 0
    peak_memory_bytes: int = 0
    peak_gpu_memory_bytes: int = 0
    """Most of one process; 0 where that is not known."""

    def __add__(self, other: CostRow) -> CostRow:
        sums: dict[str, Any] = {name: round(getattr(self, name) + getattr(other, name), 3) for name in _SUMS}
        return replace(self, **sums, **{name: max(getattr(self, name), getattr(other, name)) for name in _PEAKS})


def merged(rows: Iterable[CostRow]) -> list[CostRow]:
    """Return one row for each stage, worker, host and device, in the order in which they came."""
    found: dict[tuple[str, int | None, str, str], CostRow] = {}
    for row in rows:
        key = row.stage, row.worker, row.host, row.device
        found[key] = found.get(key, CostRow(*key)) + row
    return list(found.values())


def cost_record(rows: Iterable[CostRow]) -> dict[str, Any]:
    """Return what ``run.json`` holds: *total*, whose peaks are those of one process, and *rows*; {} of no rows."""
    by_worker = merged(rows)
    total = asdict(sum(by_worker, CostRow("", None, "", "")))
    total_of = {name: total[name] for name in (*_SUMS, *_PEAKS)}
    return {"total": total_of, "rows": [asdict(row) for row in by_worker]} if by_worker else {}
