"""
When a GPU did what, on the host's clock; used only while spans are recorded.

CUDA events tell how long after one another the device reached them, not when. An event that the host waits for ties
them to CLOCK_MONOTONIC. The two clocks drift, and distances between events are float32 milliseconds, so the tie is
made anew every few seconds, on a stream of its own: waiting for it is not waiting for the work.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from virnucpro import spans

if TYPE_CHECKING:
    from collections.abc import Iterator

TIE_INTERVAL_S = 10.0
"""Seconds that a tie is used; at this distance float32 milliseconds resolve 1 us."""
TIE_ATTEMPTS = 3
"""Events recorded per calibration; the one with the shortest host wait is kept."""


@dataclass(frozen=True)
class _Tie:
    event: torch.cuda.Event
    at_ns: int
    """When the device reached it."""
    wait_ns: int
    """How long the host waited for it: *at_ns* is at most half of that off."""

    def at(self, event: torch.cuda.Event) -> int:
        """Return when the device reached a completed event, on the host's clock."""
        milliseconds: float = self.event.elapsed_time(event)
        return self.at_ns + round(milliseconds * 1e6)


class DeviceClock:
    """Makes the marks of the batches of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._tie = self._tied()
        self._last_ns: dict[str, int] = {}

    def marks(self) -> DeviceMarks:
        """Return marks for when the device works on one batch."""
        if time.monotonic_ns() - self._tie.at_ns > TIE_INTERVAL_S * 1e9:
            self._tie = self._tied()
        return DeviceMarks(self._tie, self._last_ns)

    def _tied(self) -> _Tie:
        ties = []
        for _ in range(TIE_ATTEMPTS):
            before_ns = time.monotonic_ns()
            event = _reached(self._stream)
            event.synchronize()
            after_ns = time.monotonic_ns()
            ties.append(_Tie(event, (before_ns + after_ns) // 2, after_ns - before_ns))
        return min(ties, key=lambda tie: tie.wait_ns)


class DeviceMarks:
    """Events around what is done with one batch; made by ``DeviceClock``."""

    def __init__(self, tie: _Tie, last_ns: dict[str, int]) -> None:
        self._tie = tie
        self._last_ns = last_ns
        self._marked: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def around(self, lane: str, stream: torch.cuda.Stream) -> Iterator[None]:
        """Mark what the block puts into *stream*."""
        begin = _reached(stream)
        yield
        self._marked.append((lane, begin, _reached(stream)))

    def record(self, batch: spans.Batch) -> None:
        """Record the spans; the device must have completed the batch."""
        for lane, begin, end in self._marked:
            # work in a stream does not overlap: microseconds between two ties are corrected
            begin_ns = max(self._tie.at(begin), self._last_ns.get(lane, 0))
            self._last_ns[lane] = max(self._tie.at(end), begin_ns)
            spans.add(lane, begin_ns, self._last_ns[lane], batch)


def _reached(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Return an event that the device reaches once it has done what is in *stream* now."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
