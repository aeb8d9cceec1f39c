"""
The loop that feeds a model: batches in, rows out, in order.

``AsyncInferenceRunner`` knows tensors and devices. It does not know files, blocks, ranks or what a model is beyond a
call; that is why any packed encoder, and the fakes of the tests, run through it unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from virnucpro.errors import SequenceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from virnucpro.data.collators import PackedBatch


class PackedEncoder(Protocol):
    """A model that embeds packed sequences."""

    hidden_dim: int

    def __call__(self, input_ids_T: torch.Tensor, cu_seqlens: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Return float32 (S, hidden_dim)."""
        ...


@dataclass(frozen=True)
class InferenceResult:
    """The rows of one batch."""

    sequence_ids: tuple[str, ...]
    """Ids, (S,)."""
    embeddings: np.ndarray[Any, np.dtype[np.float32]]
    """float32 (S, hidden_dim), in host memory."""
    positions: tuple[int, ...]
    """Index positions, (S,)."""
    num_tokens: int
    """Tokens computed, special tokens included."""


class AsyncInferenceRunner:
    """
    Runs *model* over a loader's batches.

    Args:
        model: A packed encoder, already on *device*.
        device: Where its inputs must be.
    """

    def __init__(self, model: PackedEncoder, device: torch.device | str) -> None:
        self.model = model
        self.device = torch.device(device)

    def run(self, dataloader: Iterable[PackedBatch]) -> Iterator[InferenceResult]:
        """
        Yield one result a batch, in the loader's order.

        Raises:
            SequenceError: A row is not finite; names its sequence.
        """
        for batch in dataloader:
            yield self._embed(batch)

    @torch.inference_mode()
    def _embed(self, batch: PackedBatch) -> InferenceResult:
        input_ids_T = batch.input_ids_T.to(self.device, non_blocking=True)
        cu_seqlens = batch.cu_seqlens.to(self.device, non_blocking=True)
        embeddings_SD = self.model(input_ids_T, cu_seqlens, batch.lengths).float().cpu().numpy()
        assert embeddings_SD.shape == (len(batch.sequence_ids), self.model.hidden_dim)
        finite_S = np.isfinite(embeddings_SD).all(axis=1)
        if not finite_S.all():
            first = int(np.argmin(finite_S))
            raise SequenceError(batch.sequence_ids[first], "the model gave a number that is not finite")
        return InferenceResult(batch.sequence_ids, embeddings_SD, batch.positions, batch.num_tokens)
