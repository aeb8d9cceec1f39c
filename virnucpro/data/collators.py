"""
From records to tensors: the collator packs a block end to end without padding, the loader brings blocks in order.

Legend: T packed tokens, S sequences in the batch. The collator keeps no state between batches, so any number of
loader processes gives every sequence exactly once and in the same company.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader

from virnucpro.errors import SequenceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

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
class UnreadableSequence:
    """A sequence that the model has no tokens for."""

    position: int
    """Its index position."""
    sequence_id: str
    """Its id."""
    what: str
    """What is wrong with it."""


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
    unreadable: tuple[UnreadableSequence, ...] = ()
    """Sequences of the block that are not in the batch."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.input_ids_T.shape[0])

    def pin_memory(self) -> PackedBatch:
        """Return the batch in page-locked memory, for copies to a GPU that overlap (called by the DataLoader)."""
        return replace(self, input_ids_T=self.input_ids_T.pin_memory(), cu_seqlens=self.cu_seqlens.pin_memory())

    def part(self, first: int, end: int) -> PackedBatch:
        """Return the batch of its sequences *first* to *end* - 1, without the unreadable ones."""
        start, stop = int(self.cu_seqlens[first]), int(self.cu_seqlens[end])
        return PackedBatch(
            self.positions[first:end],
            self.sequence_ids[first:end],
            self.input_ids_T[start:stop],
            self.cu_seqlens[first : end + 1] - start,
            self.lengths[first:end],
        )

    def halves(self) -> tuple[PackedBatch, PackedBatch]:
        """Return the batch in two, cut where the tokens come closest to equal; it must hold two sequences or more."""
        starts = self.cu_seqlens[1:-1]
        cut = int((2 * starts - self.num_tokens).abs().argmin()) + 1
        return self.part(0, cut), self.part(cut, len(self.positions))

    def singles(self) -> list[PackedBatch]:
        """Return one batch for each sequence."""
        return [self.part(number, number + 1) for number in range(len(self.positions))]


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
        """Pack *records* in the order given; those that the model has no tokens for are named in the batch instead."""
        unreadable: tuple[UnreadableSequence, ...] = ()
        try:
            input_ids, lengths = self._encode(records)
        except SequenceError:
            unreadable = tuple(self._unreadable(records))
            wrong = {item.position for item in unreadable}
            records = [record for record in records if record.position not in wrong]
            input_ids, lengths = self._encode(records)
        cu_seqlens = np.zeros(len(lengths) + 1, dtype=np.int32)
        np.cumsum(lengths, out=cu_seqlens[1:])
        return PackedBatch(
            positions=tuple(record.position for record in records),
            sequence_ids=tuple(record.sequence_id for record in records),
            input_ids_T=torch.from_numpy(input_ids),
            cu_seqlens=torch.from_numpy(cu_seqlens),
            lengths=tuple(lengths.tolist()),
            unreadable=unreadable,
        )

    def _encode(
        self, records: Sequence[SequenceRecord]
    ) -> tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.int32]]]:
        if not records:
            return np.empty(0, np.int64), np.empty(0, np.int32)
        return self.tokenizer.encode([record.sequence[: self.max_residues] for record in records])

    def _unreadable(self, records: Sequence[SequenceRecord]) -> Iterator[UnreadableSequence]:
        for record in records:
            try:
                self._encode([record])
            except SequenceError as error:
                yield UnreadableSequence(record.position, record.sequence_id, error.what)


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
