"""
From records to tensors: the collator packs a block end to end without padding, the loader brings blocks in order.

Legend: T packed tokens, S sequences in the batch. The collator keeps no state between batches, so any number of
loader processes gives every sequence exactly once and in the same company.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader

from virnucpro.errors import SequenceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from virnucpro.data.sequence_dataset import IndexBasedDataset
    from virnucpro.data.sequence_index import SequenceRecord


class Tokenizer(Protocol):
    """What the collator needs of a model's tokenizer."""

    def encode(
        self, sequences: Sequence[str]
    ) -> tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.int32]]]:
        """Return packed token ids int64 (T,) and tokens of each sequence int32 (S,), special tokens included."""
        ...


@dataclass(frozen=True)
class PackedBatch:
    """One block, ready for a forward pass."""

    positions: tuple[int, ...]
    """Index positions, (S,)."""
    sequence_ids: tuple[str, ...]
    """Ids, (S,)."""
    input_ids_T: torch.Tensor
    """int64 (T,): token ids, sequence after sequence."""
    cu_seqlens: torch.Tensor
    """int32 (S + 1,): where each sequence starts in T."""
    lengths: tuple[int, ...]
    """Tokens of each sequence, special tokens included, (S,)."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.input_ids_T.shape[0])

    def pin_memory(self) -> PackedBatch:
        """Return the batch in page-locked memory, for copies to a GPU that overlap (called by the DataLoader)."""
        pinned = self.input_ids_T.pin_memory(), self.cu_seqlens.pin_memory()
        return PackedBatch(self.positions, self.sequence_ids, *pinned, self.lengths)

    def halves(self) -> tuple[PackedBatch, PackedBatch]:
        """Return the batch in two, cut where the tokens come closest to equal; it must hold two sequences or more."""
        starts = self.cu_seqlens[1:-1]
        cut = int((2 * starts - self.num_tokens).abs().argmin()) + 1
        token = int(self.cu_seqlens[cut])
        first, second = slice(None, cut), slice(cut, None)
        return (
            PackedBatch(
                self.positions[first],
                self.sequence_ids[first],
                self.input_ids_T[:token],
                self.cu_seqlens[: cut + 1],
                self.lengths[first],
            ),
            PackedBatch(
                self.positions[second],
                self.sequence_ids[second],
                self.input_ids_T[token:],
                self.cu_seqlens[cut:] - token,
                self.lengths[second],
            ),
        )


class VarlenCollator:
    """
    Turns the records of one block into a ``PackedBatch``.

    Args:
        tokenizer: The model's.
        max_residues: Residues of a sequence that are kept; the rest is cut off.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_residues: int) -> None:
        self.tokenizer = tokenizer
        self.max_residues = max_residues

    def __call__(self, records: Sequence[SequenceRecord]) -> PackedBatch:
        """
        Pack *records* in the order given.

        Raises:
            SequenceError: A sequence has a letter that the model has no token for; names it.
        """
        sequences = [record.sequence[: self.max_residues] for record in records]
        try:
            input_ids, lengths = self.tokenizer.encode(sequences)
        except SequenceError:
            self._name_the_wrong_one(records)
            raise
        cu_seqlens = np.zeros(len(lengths) + 1, dtype=np.int32)
        np.cumsum(lengths, out=cu_seqlens[1:])
        return PackedBatch(
            positions=tuple(record.position for record in records),
            sequence_ids=tuple(record.sequence_id for record in records),
            input_ids_T=torch.from_numpy(input_ids),
            cu_seqlens=torch.from_numpy(cu_seqlens),
            lengths=tuple(lengths.tolist()),
        )

    def _name_the_wrong_one(self, records: Sequence[SequenceRecord]) -> None:
        """Raise for the first record that has no tokens, by its id: a tokenizer knows numbers only."""
        for record in records:
            try:
                self.tokenizer.encode([record.sequence[: self.max_residues]])
            except SequenceError as error:
                raise SequenceError(record.sequence_id, error.what) from error


def create_async_dataloader(
    dataset: IndexBasedDataset,
    collator: VarlenCollator,
    batches: Iterable[Sequence[int]],
    *,
    loader_workers: int = 0,
    pin_memory: bool = False,
) -> DataLoader[PackedBatch]:
    """
    Bring *batches* of *dataset* in order.

    Args:
        dataset: Sequences by number.
        collator: Packs one batch.
        batches: Numbers in *dataset* of each batch's sequences.
        loader_workers: Processes that read and tokenise ahead; 0 does it in this process.
        pin_memory: Hand out page-locked tensors (GPUs only).

    Returns:
        An iterable of ``PackedBatch``, one for each item of *batches*, in their order.
    """
    return DataLoader(
        dataset,  # type: ignore[arg-type]  # map-style by protocol: `data` imports torch here only
        batch_sampler=list(batches),  # type: ignore[arg-type]  # ranges stay ranges: memory by blocks, not by sequences
        collate_fn=collator,
        num_workers=loader_workers,
        multiprocessing_context="spawn" if loader_workers else None,
        pin_memory=pin_memory,
    )
