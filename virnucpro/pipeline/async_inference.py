"""
The loop that feeds a model: batches in, rows out, in order.

On a GPU three things go on at once: a thread gets the next batches ready (reading, tokenising, packing, page-locked
memory), the GPU computes, and copies to and from it run on streams of their own. Events order them; the host only ever
waits for the oldest batch's rows. On a CPU the same loop computes one batch at a time.

A batch that does not fit into the device's memory is computed again in halves, and its result says so.

``AsyncInferenceRunner`` knows tensors and devices. It does not know files, blocks, ranks or what a model is beyond a
call; that is why any packed encoder, and the fakes of the tests, run through it unchanged.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from virnucpro.errors import SequenceError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence
    from threading import Event

    from virnucpro.data.collators import PackedBatch
    from virnucpro.models.attention import AttentionChoice

BATCHES_IN_FLIGHT = 3
"""Batches that a GPU has been given and whose rows are not back yet, at the most: one computed, one waiting, one whose
rows the caller is busy with."""
BATCHES_AHEAD = 2
"""Batches that are made ready for a GPU before it can take them."""


class PackedEncoder(Protocol):
    """A model that embeds packed sequences."""

    hidden_dim: int
    """Width of a row."""
    attention: AttentionChoice
    """The attention kernel in use, with the reason."""

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
    is_resplit: bool = False
    """Whether the batch did not fit into the device's memory and was computed in pieces: its last bits may differ."""


@dataclass(frozen=True)
class _Flight:
    """A batch that the device has been given. It holds every tensor until its rows are here, so none is used again."""

    batch: PackedBatch
    rows_SD: torch.Tensor
    """On the host; of a GPU's batch complete once *arrived* is."""
    arrived: torch.cuda.Event | None = None
    on_device: tuple[torch.Tensor, ...] = ()

    def wait(self) -> None:
        """Return when the device is done with the batch and its rows are on the host."""
        if self.arrived is not None:
            self.arrived.synchronize()


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
        self._is_gpu = self.device.type == "cuda"
        if self._is_gpu:
            # sums within a product stay in float32 even where cuBLAS splits them (torch allows halves by default)
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
            # and float32 is float32, also where the environment asks for TF32, as NVIDIA's containers do
            torch.set_float32_matmul_precision("highest")
            self._copies_in = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._copies_out = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def run(self, dataloader: Iterable[PackedBatch], *, stop: Event | None = None) -> Iterator[InferenceResult]:
        """
        Yield one result a batch, in the loader's order.

        Args:
            dataloader: Batches; on a GPU another thread asks for them, a few ahead.
            stop: Once it is set, no further batch is started; what the device has been given is still yielded.

        Raises:
            SequenceError: A row is not finite, or a sequence alone does not fit into the device's memory; names it.
        """
        in_flight: deque[_Flight] = deque()
        batches = _made_ahead(dataloader) if self._is_gpu else (batch for batch in dataloader)
        try:
            while not (stop is not None and stop.is_set()):
                try:
                    batch = next(batches, None)
                    flight = None if batch is None else self._start(batch)
                except Exception:  # what came before it is good
                    yield from self._landed(in_flight, still_flying=0)
                    raise
                if batch is None:
                    break
                if flight is None:  # here the failed attempt's tensors are gone
                    yield from self._landed(in_flight, still_flying=0)
                    yield self._in_halves(batch)
                    continue
                in_flight.append(flight)
                yield from self._landed(in_flight, still_flying=BATCHES_IN_FLIGHT - 1 if self._is_gpu else 0)
            yield from self._landed(in_flight, still_flying=0)
        finally:
            for flight in in_flight:  # the device may still read and write their tensors
                flight.wait()
            batches.close()

    def _landed(self, in_flight: deque[_Flight], *, still_flying: int) -> Iterator[InferenceResult]:
        """Yield the oldest results until no more than *still_flying* batches are under way."""
        while len(in_flight) > still_flying:
            yield self._finish(in_flight.popleft())

    def _start(self, batch: PackedBatch) -> _Flight | None:
        """Give the device *batch*; None when it does not fit into its memory."""
        try:
            return self._start_on_gpu(batch) if self._is_gpu else self._compute(batch)
        except torch.OutOfMemoryError:
            return None

    @torch.inference_mode()
    def _compute(self, batch: PackedBatch) -> _Flight:
        return _Flight(batch, self.model(batch.input_ids_T, batch.cu_seqlens, batch.lengths).float())

    @torch.inference_mode()
    def _start_on_gpu(self, batch: PackedBatch) -> _Flight:
        """Put the copies and the computation of *batch* into the device's queues, and return at once."""
        compute = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._copies_in):
            input_ids_T = batch.input_ids_T.to(self.device, non_blocking=True)
            cu_seqlens = batch.cu_seqlens.to(self.device, non_blocking=True)
        compute.wait_stream(self._copies_in)
        embeddings_SD = self.model(input_ids_T, cu_seqlens, batch.lengths).float()
        self._copies_out.wait_stream(compute)
        rows_SD = torch.empty(embeddings_SD.shape, dtype=torch.float32, pin_memory=True)
        with torch.cuda.stream(self._copies_out):
            rows_SD.copy_(embeddings_SD, non_blocking=True)
            arrived = self._copies_out.record_event()
        return _Flight(batch, rows_SD, arrived, (input_ids_T, cu_seqlens, embeddings_SD))

    def _finish(self, flight: _Flight) -> InferenceResult:
        """Wait for the rows of a batch, and check them."""
        flight.wait()
        batch = flight.batch
        # page-locked memory goes back to its pool; a result may be kept for long
        embeddings_SD = flight.rows_SD.numpy().copy() if self._is_gpu else flight.rows_SD.numpy()
        assert embeddings_SD.shape == (len(batch.sequence_ids), self.model.hidden_dim)
        finite_S = np.isfinite(embeddings_SD).all(axis=1)
        if not finite_S.all():
            first = int(np.argmin(finite_S))
            raise SequenceError(batch.sequence_ids[first], "the model gave a number that is not finite")
        return InferenceResult(batch.sequence_ids, embeddings_SD, batch.positions, batch.num_tokens)

    def _in_halves(self, batch: PackedBatch) -> InferenceResult:
        """
        Compute a batch that did not fit in two pieces, and those again in two where they do not fit.

        Raises:
            SequenceError: A sequence alone does not fit.
        """
        if self._is_gpu:
            torch.cuda.synchronize(self.device)  # what was queued before the memory ran out still uses its tensors
            torch.cuda.empty_cache()
        if len(batch.sequence_ids) == 1:
            what = f"does not fit into the memory of {self.device} even alone ({batch.num_tokens} tokens)"
            raise SequenceError(batch.sequence_ids[0], f"{what}: lower --max-residues, or use a larger device")
        pieces = []
        for half in batch.halves():
            flight = self._start(half)
            pieces.append(self._in_halves(half) if flight is None else self._finish(flight))
        embeddings_SD = np.concatenate([piece.embeddings for piece in pieces])
        return InferenceResult(batch.sequence_ids, embeddings_SD, batch.positions, batch.num_tokens, is_resplit=True)


def _made_ahead(dataloader: Iterable[PackedBatch]) -> Generator[PackedBatch, None, None]:
    """Yield the loader's batches, which a thread of its own gets from it, a few ahead."""
    batches = iter(dataloader)
    thread = ThreadPoolExecutor(1, thread_name_prefix="batches-ahead")
    try:
        waiting = deque(thread.submit(next, batches, None) for _ in range(BATCHES_AHEAD))
        while (batch := waiting.popleft().result()) is not None:
            waiting.append(thread.submit(next, batches, None))
            yield batch
    finally:
        thread.shutdown(cancel_futures=True)
