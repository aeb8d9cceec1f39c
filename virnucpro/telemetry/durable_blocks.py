"""
Messages about blocks that a worker has claimed, and that have become durable or done.

A worker's blocks are nearly always every n-th of the plan, so that they are sent as runs (first, last, step): a few
numbers for thousands of blocks. What does not fit one message goes into several.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

ITEMS_IN_A_MESSAGE = 64
"""Runs or exceptions in one message: at some 40 characters each, they fit what a pipe takes in one piece."""


def durable_messages(
    blocks: Iterable[int], *, short: Mapping[int, int], written_bytes: int = 0
) -> Iterator[dict[str, Any]]:
    """
    Yield messages that blocks have become durable, or were found so.

    Args:
        blocks: Numbers of those that hold every sequence.
        short: Number of each that lacks sequences -> the rows that it gives, copies included.
        written_bytes: Bytes of the file that was written.
    """
    runs = list(runs_of(sorted(blocks)))
    exceptions = [[block, rows] for block, rows in short.items()]
    yield {"kind": "durable", "bytes": written_bytes, "runs": runs[:ITEMS_IN_A_MESSAGE]}
    for start in range(ITEMS_IN_A_MESSAGE, len(runs), ITEMS_IN_A_MESSAGE):
        yield {"kind": "durable", "runs": runs[start : start + ITEMS_IN_A_MESSAGE]}
    for start in range(0, len(exceptions), ITEMS_IN_A_MESSAGE):
        yield {"kind": "durable", "short": exceptions[start : start + ITEMS_IN_A_MESSAGE]}


def done_messages(blocks: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Yield messages that nothing is left to do for blocks that the parent hands out."""
    yield from _messages("done", blocks)


def claimed_messages(blocks: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Yield messages that blocks were claimed."""
    yield from _messages("claimed", blocks)


def whole_blocks(message: Mapping[str, Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the numbers of the blocks that a message names as whole, int64 (blocks,)."""
    runs = [np.arange(first, last + 1, step, dtype=np.int64) for first, last, step in message.get("runs", ())]
    return np.concatenate([np.empty(0, np.int64), *runs])


def _messages(kind: str, blocks: Iterable[int]) -> Iterator[dict[str, Any]]:
    runs = list(runs_of(sorted(blocks)))
    for start in range(0, len(runs), ITEMS_IN_A_MESSAGE):
        yield {"kind": kind, "runs": runs[start : start + ITEMS_IN_A_MESSAGE]}


def runs_of(numbers: list[int]) -> Iterator[list[int]]:
    """Yield ascending *numbers* as [first, last, step]."""
    start = 0
    while start < len(numbers):
        last = min(start + 1, len(numbers) - 1)
        step = max(1, numbers[last] - numbers[start])
        while last + 1 < len(numbers) and numbers[last + 1] - numbers[last] == step:
            last += 1
        yield [numbers[start], numbers[last], step]
        start = last + 1
