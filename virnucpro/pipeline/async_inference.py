"""
The inference loop: batches in, rows out, in order.

On a GPU a thread prepares the next batches (reading, tokenising, packing, page-locked memory) while the GPU computes
and copies run on streams of their own, ordered by events; the host waits only for the oldest batch's rows. On a CPU the
same loop computes one batch at a time.

A batch that does not fit into memory, or fails twice, is computed in halves, recursively, until the failing sequences
stand alone; its result names them. Errors unrelated to a sequence (files, settings, a lost device) are raised. The
runner knows tensors and devices, not files, blocks or ranks, so any packed encoder runs through it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from virnucpro import spans
from virnucpro.errors import SequenceError, VirNucProError, is_of_memory
from virnucpro.pipeline.failures import FailureClass
from virnucpro.pipeline.hardware.device_clock import DeviceClock
from virnucpro.pipeline.hardware.device_errors import device_failure

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Generator, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from threading import Event

    from virnucpro.arrays import FloatArray
    from virnucpro.data.collators import PackedBatch
    from virnucpro.models.attention import AttentionChoice
    from virnucpro.pipeline.hardware.device_clock import DeviceMarks

log = logging.getLogger(__name__)  # the standard library's: this module also runs where only torch is installed

SYSTEMATIC_FAILURES = 8
"""Failures in succession after which the cause is not in the sequences."""
BATCHES_IN_FLIGHT = 3
"""Most batches on a GPU: one computing, one waiting, one whose rows the caller handles."""
BATCHES_AHEAD = 2
"""Batches prepared for a GPU in advance."""


class PackedEncoder(Protocol):
    hidden_dim: int
    attention: AttentionChoice

    def __call__(self, input_ids_T: torch.Tensor, cu_seqlens: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Return float32 (S, hidden_dim). An encoder may also have ``in_float32``: the same, computed in float32."""
        ...


@dataclass(frozen=True)
class FailedSequence:
    position: int
    sequence_id: str
    failure: FailureClass
    what: str
    """The cause as a sentence."""


@dataclass(frozen=True)
class InferenceResult:
    """The rows of one batch; S sequences succeeded."""

    sequence_ids: tuple[str, ...]
    embeddings: np.ndarray[Any, np.dtype[np.float32]]
    """float32 (S, hidden_dim), in host memory, every number finite."""
    positions: tuple[int, ...]
    """Index positions, (S,)."""
    num_tokens: int
    """Tokens of the batch, special tokens included."""
    is_resplit: bool = False
    """Whether the batch was computed in halves, which may change the last bits."""
    failed: tuple[FailedSequence, ...] = ()
    """The other sequences of the batch."""
    widened: tuple[str, ...] = ()
    """Ids of sequences that overflowed in the model's number format, and were computed in float32."""
    seconds: float = 0.0
    """From the end of the batch before or its own start, whichever is later, to its rows."""
    oom_splits: int = 0
    """Times that the batch, or a half of it, was halved for lack of memory."""


@dataclass(frozen=True)
class _Flight:
    """A batch in flight; keeps its tensors alive until the rows have arrived."""

    batch: PackedBatch
    rows_SD: torch.Tensor
    """On the host; complete once *arrived* is."""
    arrived: torch.cuda.Event | None = None
    on_device: tuple[torch.Tensor, ...] = ()
    marks: DeviceMarks | None = None
    started_s: float = 0.0
    """Clock of ``time.monotonic``."""

    def wait(self) -> None:
        if self.arrived is not None:
            self.arrived.synchronize()


@dataclass(frozen=True)
class _Problem:
    """Why a batch failed; the exception itself would keep the tensors of the attempt alive."""

    failure: FailureClass
    what: str


class AsyncInferenceRunner:
    """Runs *model*, a packed encoder that is already on *device*, over a loader's batches."""

    def __init__(self, model: PackedEncoder, device: torch.device | str) -> None:
        self.model = model
        self.device = torch.device(device)
        self._is_gpu = self.device.type == "cuda"
        self._failed_in_a_row = 0
        self._landed_s = 0.0
        if self._is_gpu:
            # sums within a product stay in float32 even where cuBLAS splits them (torch allows halves by default)
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
            # and float32 is float32, also where the environment asks for TF32, as NVIDIA's containers do
            torch.set_float32_matmul_precision("highest")
            self._copies_in = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._copies_out = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._clock = DeviceClock(self.device) if self._is_gpu and spans.is_enabled() else None

    def run(
        self,
        dataloader: Iterable[PackedBatch],
        *,
        stop: Event | None = None,
        on_start: Callable[[PackedBatch], None] = lambda _: None,
        one_at_a_time: bool = False,
    ) -> Iterator[InferenceResult]:
        """
        Yield one result for each batch, in the loader's order.

        Args:
            stop: Once set, no further batch starts; those in flight are still yielded.
            on_start: Called with each batch before it goes to the device.
            one_at_a_time: Start a batch only when the rows of the one before have arrived.

        Raises:
            SequenceError: ``SYSTEMATIC_FAILURES`` sequences failed in succession: the cause is not in them.
        """
        in_flight: deque[_Flight] = deque()
        most = BATCHES_IN_FLIGHT - 1 if self._is_gpu and not one_at_a_time else 0
        batches = _made_ahead(dataloader) if self._is_gpu else (batch for batch in dataloader)
        try:
            while not (stop is not None and stop.is_set()):
                try:
                    batch = next(batches, None)
                    if batch is None:
                        break
                    on_start(batch)
                    flight = self._try(batch)
                except Exception:  # the batches before it are good
                    yield from self._landed(in_flight, still_flying=0)
                    raise
                if isinstance(flight, _Problem):  # the tensors of the failed attempt are freed
                    yield from self._landed(in_flight, still_flying=0)
                    yield self._again(batch, flight)
                    continue
                in_flight.append(flight)
                yield from self._landed(in_flight, still_flying=most)
            yield from self._landed(in_flight, still_flying=0)
        finally:
            for flight in in_flight:  # the device may still read and write their tensors
                with suppress(RuntimeError):  # the device is lost anyway
                    flight.wait()
            batches.close()

    def run_apart(
        self,
        batch: PackedBatch,
        *,
        on_start: Callable[[PackedBatch], None],
        last: Container[int] = frozenset(),
        then_whole: bool = True,
    ) -> InferenceResult:
        """
        Compute each sequence alone, to identify one that kills the process, then the whole batch.

        Args:
            on_start: Called with each sequence as a batch of its own, then with the whole batch.
            last: Index positions of sequences to compute last.
            then_whole: When every sequence succeeded alone, compute the whole batch and return its rows.

        Raises:
            SequenceError: ``SYSTEMATIC_FAILURES`` sequences failed in succession: the cause is not in them.
        """
        alone: dict[int, InferenceResult] = {}
        shortest_first = reversed(batch.singles())  # a long one is the likelier cause; a success before it tells more
        for single in sorted(shortest_first, key=lambda single: single.positions[0] in last):
            on_start(single)
            alone[single.positions[0]] = self._piece(single)
        joined = _joined(batch, [alone[position] for position in batch.positions])
        if joined.failed or not then_whole:
            return joined
        on_start(batch)
        return self._piece(batch)

    def _landed(self, in_flight: deque[_Flight], *, still_flying: int) -> Iterator[InferenceResult]:
        """Yield the oldest results until at most *still_flying* batches are in flight."""
        while len(in_flight) > still_flying:
            yield self._finish(in_flight.popleft())

    def _try(self, batch: PackedBatch) -> _Flight | _Problem:
        """Start *batch* on the device, or return why the batch itself seems to be the cause."""
        started_s = time.monotonic()
        if not batch.positions:
            return _Flight(batch, torch.empty(0, self.model.hidden_dim), started_s=started_s)
        try:
            if not self._is_gpu:
                return replace(self._compute(batch), started_s=started_s)
            with spans.span(spans.LAUNCHING, batch):
                return replace(self._start_on_gpu(batch), started_s=started_s)
        except (OSError, VirNucProError):
            raise
        except Exception as error:
            failure = device_failure(error) or (FailureClass.HOST_OUT_OF_MEMORY if is_of_memory(error) else None)
            if failure in {FailureClass.DEVICE_OUT_OF_MEMORY, FailureClass.HOST_OUT_OF_MEMORY}:
                whose = self.device if failure is FailureClass.DEVICE_OUT_OF_MEMORY else "this machine"
                what = f"does not fit into the memory of {whose} even alone ({batch.num_tokens} tokens)"
                return _Problem(failure, what)
            if failure is not None:
                raise
            log.warning("batch.failed: %s sequences, %s tokens", len(batch.positions), batch.num_tokens, exc_info=True)
            return _Problem(FailureClass.APPLICATION_ERROR, f"{type(error).__name__}: {error}")

    @torch.inference_mode()
    def _compute(self, batch: PackedBatch) -> _Flight:
        with spans.span(spans.COMPUTE, batch):
            return _Flight(batch, self.model(batch.input_ids_T, batch.cu_seqlens, batch.lengths).float())

    @torch.inference_mode()
    def _start_on_gpu(self, batch: PackedBatch) -> _Flight:
        """Queue the copies and the computation of *batch* on the device's streams without waiting."""
        compute = torch.cuda.current_stream(self.device)
        marks = None if self._clock is None else self._clock.marks()
        with torch.cuda.stream(self._copies_in), _marked(marks, spans.HOST_TO_DEVICE, self._copies_in):
            input_ids_T = batch.input_ids_T.to(self.device, non_blocking=True)
            cu_seqlens = batch.cu_seqlens.to(self.device, non_blocking=True)
        compute.wait_stream(self._copies_in)
        with _marked(marks, spans.COMPUTE, compute):
            embeddings_SD = self.model(input_ids_T, cu_seqlens, batch.lengths).float()
        self._copies_out.wait_stream(compute)
        rows_SD = torch.empty(embeddings_SD.shape, dtype=torch.float32, pin_memory=True)
        with torch.cuda.stream(self._copies_out):
            with _marked(marks, spans.DEVICE_TO_HOST, self._copies_out):
                rows_SD.copy_(embeddings_SD, non_blocking=True)
            arrived = self._copies_out.record_event()
        return _Flight(batch, rows_SD, arrived, (input_ids_T, cu_seqlens, embeddings_SD), marks)

    def _finish(self, flight: _Flight) -> InferenceResult:
        """Wait for the rows of a batch, and fail those that are not finite."""
        flight.wait()
        now_s = time.monotonic()
        seconds, self._landed_s = now_s - max(flight.started_s, self._landed_s), now_s
        batch = flight.batch
        if flight.marks is not None:
            flight.marks.record(batch)
        # a result may be kept long, and must not hold page-locked memory
        rows_WD = flight.rows_SD.numpy().copy() if self._is_gpu else flight.rows_SD.numpy()
        embeddings_SD = batch.one_row_each(rows_WD)
        assert embeddings_SD.shape == (len(batch.sequence_ids), self.model.hidden_dim)
        widened = []
        for number in np.flatnonzero(~np.isfinite(embeddings_SD).all(axis=1)).tolist():
            row_1D = self._in_float32(batch.part(number, number + 1))
            if row_1D is not None:
                embeddings_SD[number] = row_1D
                widened.append(batch.sequence_ids[number])
        finite_S = np.isfinite(embeddings_SD).all(axis=1)
        what = "the model gave a number that is not finite"
        failed = _unreadable(batch) + [
            FailedSequence(batch.positions[number], batch.sequence_ids[number], FailureClass.NOT_FINITE, what)
            for number in np.flatnonzero(~finite_S).tolist()
        ]
        self._note(succeeded=bool(finite_S.any()), failed=failed)
        kept = np.flatnonzero(finite_S).tolist()
        return InferenceResult(
            tuple(batch.sequence_ids[number] for number in kept),
            embeddings_SD if finite_S.all() else embeddings_SD[finite_S],
            tuple(batch.positions[number] for number in kept),
            batch.num_tokens,
            failed=tuple(failed),
            widened=tuple(widened),
            seconds=seconds,
        )

    def _in_float32(self, batch: PackedBatch) -> FloatArray | None:
        """Return the row of a lone sequence computed in float32, (1, D), where the encoder can and it is finite."""
        compute = getattr(self.model, "in_float32", None)
        if compute is None:
            return None
        try:
            rows_WD = compute(batch.input_ids_T.to(self.device), batch.cu_seqlens.to(self.device), batch.lengths)
        except (RuntimeError, MemoryError) as error:
            if device_failure(error) not in {None, FailureClass.DEVICE_OUT_OF_MEMORY}:
                raise
            return None
        row_1D = batch.one_row_each(rows_WD.cpu().numpy())
        return row_1D if np.isfinite(row_1D).all() else None

    def _piece(self, batch: PackedBatch) -> InferenceResult:
        """Compute *batch* and wait for it."""
        flight = self._try(batch)
        return self._again(batch, flight) if isinstance(flight, _Problem) else self._finish(flight)

    def _again(self, batch: PackedBatch, problem: _Problem) -> InferenceResult:
        """Retry a failed batch: whole after an application error, else in halves."""
        if self._is_gpu:
            torch.cuda.synchronize(self.device)  # work queued before the memory ran out still uses its tensors
            torch.cuda.empty_cache()
        if problem.failure is FailureClass.APPLICATION_ERROR:
            flight = self._try(batch)
            if isinstance(flight, _Flight):
                return self._finish(flight)
            problem = flight
        is_too_large = problem.failure is not FailureClass.APPLICATION_ERROR
        if len(batch.positions) > 1:
            return _joined(batch, [self._piece(half) for half in batch.halves()], oom_splits=int(is_too_large))
        if is_too_large and sum(batch.windows) > 1:
            pieces = [self._piece(half) for half in batch.window_halves()]
            failed_piece = next((piece for piece in pieces if piece.failed), None)
            return _with_costs(failed_piece or _mean_of_windows(batch, pieces), pieces, oom_splits=1)
        failed = FailedSequence(batch.positions[0], batch.sequence_ids[0], problem.failure, problem.what)
        self._note(succeeded=False, failed=[failed])
        nothing = np.empty((0, self.model.hidden_dim), np.float32)
        return InferenceResult((), nothing, (), batch.num_tokens, failed=(failed,))

    def _note(self, *, succeeded: bool, failed: Sequence[FailedSequence]) -> None:
        """Count failures in succession; a failure for lack of memory does not count."""
        if succeeded:
            self._failed_in_a_row = 0
            return
        counted = [item for item in failed if item.failure in {FailureClass.APPLICATION_ERROR, FailureClass.NOT_FINITE}]
        self._failed_in_a_row += len(counted)
        if self._failed_in_a_row >= SYSTEMATIC_FAILURES:
            what = f"{counted[-1].what} (as did {self._failed_in_a_row - 1} sequences before it, and none succeeded)"
            raise SequenceError(counted[-1].sequence_id, what)


def _marked(marks: DeviceMarks | None, lane: str, stream: torch.cuda.Stream) -> AbstractContextManager[None]:
    """Time what the block queues on *stream*, when spans are recorded."""
    return nullcontext() if marks is None else marks.around(lane, stream)


def _joined(batch: PackedBatch, pieces: Sequence[InferenceResult], *, oom_splits: int = 0) -> InferenceResult:
    """Return the result of *batch* from the results of its parts, in its order."""
    joined = InferenceResult(
        tuple(name for piece in pieces for name in piece.sequence_ids),
        np.concatenate([piece.embeddings for piece in pieces]),
        tuple(position for piece in pieces for position in piece.positions),
        batch.num_tokens,
        is_resplit=True,
        failed=(*_unreadable(batch), *(item for piece in pieces for item in piece.failed)),
        widened=tuple(name for piece in pieces for name in piece.widened),
    )
    return _with_costs(joined, pieces, oom_splits=oom_splits)


def _with_costs(result: InferenceResult, pieces: Sequence[InferenceResult], *, oom_splits: int) -> InferenceResult:
    return replace(
        result,
        seconds=sum(piece.seconds for piece in pieces),
        oom_splits=oom_splits + sum(piece.oom_splits for piece in pieces),
    )


def _unreadable(batch: PackedBatch) -> list[FailedSequence]:
    return [
        FailedSequence(item.position, item.sequence_id, FailureClass.APPLICATION_ERROR, item.what)
        for item in batch.unreadable
    ]


def _mean_of_windows(batch: PackedBatch, halves: Sequence[InferenceResult]) -> InferenceResult:
    """Return the result of a lone sequence from those of its ``window_halves``."""
    windows = [sum(half.windows) for half in batch.window_halves()]
    row = np.average([half.embeddings for half in halves], axis=0, weights=windows).astype(np.float32)
    widened = batch.sequence_ids if any(half.widened for half in halves) else ()
    return InferenceResult(batch.sequence_ids, row, batch.positions, batch.num_tokens, is_resplit=True, widened=widened)


def _made_ahead(dataloader: Iterable[PackedBatch]) -> Generator[PackedBatch, None, None]:
    """Yield the loader's batches, fetched a few ahead by a thread."""
    batches = iter(dataloader)
    thread = ThreadPoolExecutor(1, thread_name_prefix="batches-ahead")
    try:
        waiting = deque(thread.submit(next, batches, None) for _ in range(BATCHES_AHEAD))
        while (batch := waiting.popleft().result()) is not None:
            waiting.append(thread.submit(next, batches, None))
            yield batch
    finally:
        thread.shutdown(cancel_futures=True)
