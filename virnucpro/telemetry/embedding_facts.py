"""What an embedding run is, and how a process of it ended: the input of telemetry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np

    from virnucpro.run_layout import RunLayout

    IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, kw_only=True)
class EmbeddingFacts:
    """What an embedding run is, once it is planned; B blocks."""

    run_id: str
    """Of this start of the run, as its workers' logs have it."""
    model: str
    """Name of the model."""
    precision: str
    """Number format of the forward pass."""
    token_budget: int
    """Most tokens in one block."""
    devices: tuple[tuple[str, str], ...]
    """Label and token of each rank's device."""
    host: str
    """The host of all of them; empty where each rank reports its own."""
    layout: RunLayout
    """Names of its files."""
    block_tokens: IntArray
    """int64 (B,): planned tokens of each block."""
    block_sequences: IntArray
    """int64 (B,): sequences of each block."""
    block_rows: IntArray
    """int64 (B,): rows that each block gives, copies included."""
    rows_of: Callable[[IntArray], IntArray]
    """Returns how many rows the sequences at some index positions give, copies included."""
    records: int
    """Records of the input, skipped ones included."""
    copies: int
    """Records that take the row of an identical sequence."""
    skipped: int
    """Records that were skipped."""


@dataclass(frozen=True, kw_only=True)
class ProcessEnd:
    """How a process of a rank ended, as its parent judged."""

    state: str
    """complete, failed or stopped."""
    failure: str
    """Failure class; empty where it did not fail."""
    reason: str
    """One sentence."""
    exit_code: int | None
    """Negative for a signal."""
    starts_again: bool
    """Whether another process follows."""
    quarantined: Mapping[int, str]
    """Index position of each sequence that is not computed any more -> failure class."""
