"""What a run cost: rows by stage and worker, summed over its starts, as ``run.json``, metrics and Prefect have them."""

from __future__ import annotations

from dataclasses import dataclass, replace
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

    def __add__(self, other: CostRow) -> CostRow:
        sums: dict[str, Any] = {name: round(getattr(self, name) + getattr(other, name), 3) for name in _SUMS}
        return replace(self, **sums, **{name: max(getattr(self, name), getattr(other, name)) for name in _PEAKS})


@dataclass(frozen=True)
class Cost:
    total: CostRow = CostRow("sum", None, "", "")
    rows: tuple[CostRow, ...] = ()
    """One for each stage, worker, host and device."""

    @classmethod
    def of(cls, rows: Iterable[CostRow]) -> Cost:
        """Return the cost that *rows* sum up to, in their order."""
        found: dict[tuple[str, int | None, str, str], CostRow] = {}
        for row in rows:
            key = row.stage, row.worker, row.host, row.device
            found[key] = found.get(key, CostRow(*key)) + row
        return cls(sum(found.values(), cls.total), tuple(found.values()))
