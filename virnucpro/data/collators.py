"""
From records to tensors: pack a block end to end without padding; load blocks in order.

The collator keeps no state between batches, so any number of loader processes gives the same batches. Legend: T packed
tokens, S sequences of the batch, W windows of them (S where each sequence is one window).
"""

from __future__ import annotations

import logging
import multiprocessing
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader

from virnucpro.data.packing import count_windows, windows_of
from virnucpro.errors import ConfigurationError, SequenceError
from virnucpro.spans import PACKING, TOKENISING, loader_start, span

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from virnucpro.arrays import FloatArray
    from virnucpro.data.sequence_dataset import IndexBasedDataset
    from virnucpro.data.sequence_index import SequenceRecord


log = logging.getLogger(__name__)  # the standard library's: this module also runs where only torch is installed


@cache  # once for each reason, not for each batch
def _warn_not_page_locked(reason: str) -> None:
    log.warning("batch.not_page_locked: %s", reason)


class Tokenizer(Protocol):
    def encode(self, sequences: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return packed token ids int64 (T,) and tokens of each sequence int32 (S,), special tokens included."""
        ...


@dataclass(frozen=True)
class UnreadableSequence:
    """A sequence that the model has no tokens for."""

    position: int
    sequence_id: str
    what: str


@dataclass(frozen=True)
class PackedBatch:
    positions: tuple[int, ...]
    """Index positions, (S,)."""
    sequence_ids: tuple[str, ...]
    input_ids_T: torch.Tensor
    """int64 (T,): token ids, sequence after sequence."""
    cu_seqlens: torch.Tensor
    """int32 (W + 1,): where each window starts in T."""
    lengths: tuple[int, ...]
    """Tokens of each window, special tokens included, (W,)."""
    unreadable: tuple[UnreadableSequence, ...] = ()
    """Sequences of the block that are not in the batch: the model has no tokens for them."""
    windows: tuple[int, ...] = ()
    """Windows of each sequence, (S,); empty where each is one."""

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids_T.shape[0])

    def pin_memory(self) -> PackedBatch:
        """
        Return the batch in page-locked memory, so that copies to a GPU overlap; the DataLoader calls this.

        Where the host has no such memory, copies wait instead; a lost device also fails at its next call.
        """
        with span(PACKING, self, name="page-locking"):
            try:
                return replace(self, input_ids_T=self.input_ids_T.pin_memory(), cu_seqlens=self.cu_seqlens.pin_memory())
            except RuntimeError as error:
                _warn_not_page_locked(str(error).partition("\n")[0])
                return self

    def one_row_each(self, rows_WD: FloatArray) -> FloatArray:
        """Return float32 (S, D): the mean of each sequence's windows, summed in float64; a lone window's row as is."""
        if not self.windows:
            return rows_WD
        sums_SD = np.add.reduceat(rows_WD.astype(np.float64), self._first_windows()[:-1], axis=0)
        rows_SD: FloatArray = (sums_SD / np.array(self.windows)[:, None]).astype(np.float32)
        return rows_SD

    def _first_windows(self) -> list[int]:
        """First window of each sequence and, last, W."""
        return [0, *accumulate(self.windows or [1] * len(self.positions))]

    def part(self, first: int, end: int) -> PackedBatch:
        """Return a batch of sequences *first* to *end* - 1, without ``unreadable``."""
        first_windows = self._first_windows()
        return replace(
            self._of_windows(first_windows[first], first_windows[end]),
            positions=self.positions[first:end],
            sequence_ids=self.sequence_ids[first:end],
            windows=self.windows[first:end],
        )

    def _of_windows(self, first: int, end: int) -> PackedBatch:
        """Return a batch of windows *first* to *end* - 1; its ``windows`` holds for a single sequence only."""
        start, stop = int(self.cu_seqlens[first]), int(self.cu_seqlens[end])
        return PackedBatch(
            self.positions,
            self.sequence_ids,
            self.input_ids_T[start:stop],
            self.cu_seqlens[first : end + 1] - start,
            self.lengths[first:end],
            windows=(end - first,),
        )

    def window_halves(self) -> tuple[PackedBatch, PackedBatch]:
        (windows,) = self.windows
        return self._of_windows(0, windows // 2), self._of_windows(windows // 2, windows)

    def halves(self) -> tuple[PackedBatch, PackedBatch]:
        """Split a batch of at least two sequences where the tokens come closest to equal."""
        starts = self.cu_seqlens[self._first_windows()[1:-1]]
        cut = int((2 * starts - self.num_tokens).abs().argmin()) + 1
        return self.part(0, cut), self.part(cut, len(self.positions))

    def singles(self) -> list[PackedBatch]:
        return [self.part(number, number + 1) for number in range(len(self.positions))]


class VarlenCollator:
    """
    Turns the records of one block into a ``PackedBatch``.

    Args:
        max_residues: Residues of a sequence that are embedded; longer ones are truncated.
        in_windows: Pack a longer sequence as windows of that length instead.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_residues: int, in_windows: bool = False) -> None:
        self.tokenizer = tokenizer
        self.max_residues = max_residues
        self.in_windows = in_windows

    def __call__(self, records: Sequence[SequenceRecord]) -> PackedBatch:
        """Pack *records* in the given order; those that the model has no tokens for go to ``unreadable``."""
        unreadable: tuple[UnreadableSequence, ...] = ()
        with span(TOKENISING, records):
            try:
                input_ids, lengths = self._encode(records)
            except SequenceError:
                unreadable = tuple(self._unreadable(records))
                wrong = {item.position for item in unreadable}
                records = [record for record in records if record.position not in wrong]
                input_ids, lengths = self._encode(records)
        with span(PACKING, records, tokens=len(input_ids)):
            cu_seqlens = np.zeros(len(lengths) + 1, dtype=np.int32)
            np.cumsum(lengths, out=cu_seqlens[1:])
            return PackedBatch(
                positions=tuple(record.position for record in records),
                sequence_ids=tuple(record.sequence_id for record in records),
                input_ids_T=torch.from_numpy(input_ids),
                cu_seqlens=torch.from_numpy(cu_seqlens),
                lengths=tuple(lengths.tolist()),
                unreadable=unreadable,
                windows=self._windows(records),
            )

    def _windows(self, records: Sequence[SequenceRecord]) -> tuple[int, ...]:
        if not self.in_windows or all(len(record.sequence) <= self.max_residues for record in records):
            return ()
        return tuple(count_windows(np.array([len(record.sequence) for record in records]), self.max_residues).tolist())

    def _encode(self, records: Sequence[SequenceRecord]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        if not records:
            return np.empty(0, np.int64), np.empty(0, np.int32)
        if self.in_windows:
            return self.tokenizer.encode(
                [window for record in records for window in windows_of(record.sequence, self.max_residues)]
            )
        return self.tokenizer.encode([record.sequence[: self.max_residues] for record in records])

    def _unreadable(self, records: Sequence[SequenceRecord]) -> Iterator[UnreadableSequence]:
        for record in records:
            try:
                self._encode([record])
            except SequenceError as error:
                yield UnreadableSequence(record.position, record.sequence_id, error.what)


def check_shared_memory(loaders: int) -> None:
    """Raise ConfigurationError where so many loader processes have no room for their semaphores."""
    try:
        _theirs = [multiprocessing.get_context("spawn").Event() for _ in range(loaders and loaders + 2)]
    except OSError as error:
        raise ConfigurationError(
            f"loader processes need room in /dev/shm ({error.strerror}): enlarge it, or use --loader-processes 0"
        ) from error


def create_async_dataloader(
    dataset: IndexBasedDataset,
    collator: VarlenCollator,
    batches: Iterable[Sequence[int]],
    *,
    loader_processes: int = 0,
    pin_memory: bool = False,
) -> DataLoader[PackedBatch]:
    """
    Load *batches*, numbers in *dataset* iterated lazily, in their order, each as a ``PackedBatch``.

    Args:
        loader_processes: Processes that read and tokenise ahead; 0 loads in this process.
        pin_memory: Return page-locked tensors (GPUs only).
    """
    check_shared_memory(loader_processes)
    return DataLoader(
        dataset,  # type: ignore[arg-type]  # map-style by protocol: `data` imports torch here only
        batch_sampler=batches,  # type: ignore[arg-type]  # it takes any sequences of numbers, not only lists
        collate_fn=collator,
        num_workers=loader_processes,
        multiprocessing_context="spawn" if loader_processes else None,
        pin_memory=pin_memory,
        worker_init_fn=loader_start(),
    )
