"""What a trace of a GPU or a file of spans shows: which copies and computations ran, in what order, and at a time."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from virnucpro import spans

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

TIE_ERROR_NS = 1_000_000
"""Nanoseconds that the GPU's times may be off on the host's clock: far more than waiting for one event takes."""


def copies_and_kernels(
    events: Sequence[dict[str, Any]], way: str
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return (start, end) in microseconds of the copies one *way* (HtoD, DtoH) and of the kernels of a Chrome trace."""
    copies, computations = [], []
    for event in events:
        if event.get("ph") == "X" and "dur" in event:
            span = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
            if event.get("cat") == "gpu_memcpy" and way in event["name"]:
                copies.append(span)
            elif event.get("cat") == "kernel":
                computations.append(span)
    return copies, computations


def share_overlapped(copies: Sequence[tuple[float, float]], computations: Sequence[tuple[float, float]]) -> float:
    """
    Return the share of the copies' time in which something was computed.

    Args:
        copies: (start, end) of each.
        computations: (start, end) of each, in the same unit; they may overlap one another.
    """
    busy: list[list[float]] = []
    for start, end in sorted(computations):
        if busy and start <= busy[-1][1]:
            busy[-1][1] = max(busy[-1][1], end)
        else:
            busy.append([start, end])
    both = sum(max(0.0, min(end, stop) - max(start, begin)) for start, end in copies for begin, stop in busy)
    total = sum(end - start for start, end in copies)
    return both / total if total else 0.0


def spans_by_lane(path: Path) -> dict[str, list[tuple[int, int, int]]]:
    """Return (begin, end, block) of every span about a block in a file of spans, nanoseconds, by lane, by time."""
    lanes: dict[str, list[tuple[int, int, int]]] = {}
    for event in map(json.loads, path.read_text().splitlines()):
        if "block" in event.get("args", {}):
            begin_ns, end_ns = (round(1000 * at_us) for at_us in (event["ts"], event["ts"] + event["dur"]))
            lanes.setdefault(event["cat"], []).append((begin_ns, end_ns, event["args"]["block"]))
    return {lane: sorted(found) for lane, found in lanes.items()}


def overlapping(lanes: dict[str, list[tuple[int, int, int]]]) -> int:
    """Return how many spans begin before the one before them in their lane has ended."""
    return sum(after[0] < before[1] for found in lanes.values() for before, after in pairwise(found))


def out_of_order(lanes: dict[str, list[tuple[int, int, int]]]) -> int:
    """Return for how many batches launching, copying in, computing and copying out did not follow one another."""
    named = [lanes[name] for name in (spans.HOST_TO_DEVICE, spans.COMPUTE, spans.DEVICE_TO_HOST)]
    wrong = sum(
        len({block for _, _, block in batch}) > 1 or any(after[0] < before[1] for before, after in pairwise(batch))
        for batch in zip(*named, strict=True)
    )
    launched = zip(lanes[spans.LAUNCHING], named[0], strict=True)
    return wrong + sum(copied[0] < launch[0] - TIE_ERROR_NS for launch, copied in launched)
