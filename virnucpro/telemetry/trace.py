"""
The timeline of a profiled run in Chrome's trace event format, for Perfetto.

The events of each worker process, as ``virnucpro.spans`` wrote them, and the run's stages. Times are CLOCK_MONOTONIC;
Unix times of stages are converted by the offset at import. Memory does not grow with the length of the spans.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import orjson

from virnucpro import durable, run_folders
from virnucpro.spans import LANES_APART, named

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from virnucpro.telemetry.snapshot import StageSnapshot

_MONOTONIC_LESS_UNIX_S = time.monotonic() - time.time()
_READ_BYTES = 1 << 20
_RUN = 1
"""Process number of the run itself; some viewers take 0 for the kernel."""


def merge_trace(folders: Sequence[Path], stages: Sequence[StageSnapshot], path: Path) -> bool:
    """Write the timeline atomically and remove the spans; return False when nothing was recorded."""
    files = [file for folder in folders for file in sorted(folder.glob("process_*.jsonl"))]
    if not files:
        return False
    zero = datetime.fromtimestamp(-_MONOTONIC_LESS_UNIX_S, UTC).isoformat()
    with durable.replacing(path) as file:
        file.write(b'{"displayTimeUnit":"ms","otherData":{"zero":"%s"},"traceEvents":[\n' % zero.encode())
        file.write(b",\n".join(map(orjson.dumps, _of_run(stages))))
        for one in files:
            with open(one, "rb", opener=run_folders.only_regular) as spans:
                while lines := spans.readlines(_READ_BYTES):
                    whole = [line[:-1] for line in lines if line.endswith(b"\n")]  # a kill may have cut the last one
                    file.write(b"".join(b",\n" + line for line in whole))
        file.write(b"\n]}\n")
    for folder in folders:
        durable.remove_tree(folder)
    return True


def _of_run(stages: Sequence[StageSnapshot]) -> Iterator[dict[str, Any]]:
    """Yield the events of the stages; nested ones get a lane of their own."""
    yield from named("process", {"pid": _RUN, "tid": _RUN * LANES_APART}, "run", 0)
    ends_us: dict[int, float] = {}
    for stage in stages:
        lane = stage.depth
        place = {"pid": _RUN, "tid": _RUN * LANES_APART + lane}
        title = "stages within" if lane else "stages"
        if lane not in ends_us:
            yield from named("thread", place, title, lane)
        begin_us = max(_on_our_clock(stage.started), ends_us.get(lane, 0.0))  # the clock may have been set back
        ends_us[lane] = max(begin_us, _on_our_clock(stage.started + stage.elapsed))
        times = {"ts": begin_us, "dur": ends_us[lane] - begin_us}
        details = {"args": {"model": stage.model}} if stage.model else {}
        yield {"ph": "X", "cat": title, "name": stage.name, **times, **place, **details}


def _on_our_clock(unix_s: float) -> float:
    return (unix_s + _MONOTONIC_LESS_UNIX_S) * 1e6
