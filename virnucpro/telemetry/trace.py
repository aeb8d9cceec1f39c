"""
The timeline of a profiled run in Chrome's trace event format, for Perfetto.

Complete events (``X``, microseconds) of the run's stages and of each worker process, one thread for each lane. Times
are CLOCK_MONOTONIC; Unix times of stages are converted by the offset at import. Memory grows with the number of span
files, not with their length.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import orjson

from virnucpro import durable, run_folders
from virnucpro.spans import LANES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from virnucpro.telemetry.snapshot import StageSnapshot

_MONOTONIC_LESS_UNIX_NS = time.monotonic_ns() - time.time_ns()
_RUN = 1
"""Process number of the run itself; some viewers take 0 for the kernel."""
_LANES_APART = 100
"""Thread numbers reserved for each process: viewers need them unique."""
_WRITE_BYTES = 1 << 20


def merge_trace(spans_dirs: Sequence[tuple[str, Path]], stages: Sequence[StageSnapshot], path: Path) -> bool:
    """Write the timeline atomically and remove the spans; return False when nothing was recorded."""
    processes = sorted(process for label, folder in spans_dirs for process in _processes(label, folder))
    if not processes:
        return False
    begins_ns = [process.begin_ns for process in processes] + [_on_our_clock(stage.started) for stage in stages]
    timeline = _Timeline(begin_ns=min(begins_ns))
    began = datetime.fromtimestamp((min(begins_ns) - _MONOTONIC_LESS_UNIX_NS) / 1e9, UTC).isoformat()
    with durable.replacing(path) as file:
        buffer = bytearray(b'{"displayTimeUnit":"ms","otherData":{"began":"%s"},"traceEvents":[' % began.encode())
        separator = b"\n"
        for event in timeline.events(processes, stages):
            buffer += separator + orjson.dumps(event)
            separator = b",\n"
            if len(buffer) > _WRITE_BYTES:
                file.write(bytes(buffer))
                buffer.clear()
        file.write(bytes(buffer) + b"\n]}\n")
    for _, folder in spans_dirs:
        durable.remove_tree(folder)
    return True


@dataclass(frozen=True, order=True)
class _Process:
    label: str
    rank: int
    begin_ns: int
    loader: int
    """Number of a loader process; -1 for the worker itself."""
    attempt: int
    pid: int
    device: str
    path: Path

    @property
    def name(self) -> str:
        parts = [self.label, f"rank {self.rank}", self.device]
        parts.append(f"attempt {self.attempt}" if self.attempt > 1 else "")
        parts.append(f"loader {self.loader}" if self.loader >= 0 else "")
        return ", ".join([part for part in parts if part]) + f" (pid {self.pid})"

    def lines(self) -> Iterator[Any]:
        """Yield the spans, without lines that a kill or a full disk truncated."""
        with open(self.path, "rb", opener=run_folders.only_regular) as file:
            next(file)
            for line in file:
                try:
                    yield orjson.loads(line)
                except orjson.JSONDecodeError:
                    continue


def _processes(label: str, folder: Path) -> Iterator[_Process]:
    for path in folder.glob("process_*.jsonl"):
        with open(path, "rb", opener=run_folders.only_regular) as file:
            first = file.readline()
        if first.endswith(b"\n"):  # else the process was killed at its start
            head = orjson.loads(first)
            loader = -1 if head["loader"] is None else head["loader"]
            numbers = head["rank"], head["begin_ns"], loader, head["attempt"], head["pid"]
            yield _Process(label, *numbers, head["device"], path)


def _on_our_clock(unix_s: float) -> int:
    return round(unix_s * 1e9) + _MONOTONIC_LESS_UNIX_NS


class _Timeline:
    """Makes events; *begin_ns* is time 0."""

    def __init__(self, *, begin_ns: int) -> None:
        self._begin_ns = begin_ns
        self._named: set[int] = set()

    def events(self, processes: Sequence[_Process], stages: Sequence[StageSnapshot]) -> Iterator[dict[str, Any]]:
        yield from self._name_process(_RUN, "run")
        yield from self._stages(stages)
        for number, process in enumerate(processes, _RUN + 1):
            yield from self._name_process(number, process.name)
            for line in process.lines():
                if isinstance(line, list):
                    lane, name, begin_ns, duration_ns, details = line
                    yield from self._span(number, LANES.index(lane), lane, name, begin_ns, duration_ns, details)
                else:
                    thread = {"pid": number, "tid": number * _LANES_APART}
                    end = {"ph": "i", "s": "p", "name": "recording ends", "ts": self._us(line["ended_ns"])}
                    yield {**end, **thread, "args": {"why": line["why"]}}

    def _stages(self, stages: Sequence[StageSnapshot]) -> Iterator[dict[str, Any]]:
        """Yield the stages; nested ones get a lane of their own."""
        ends_ns: dict[int, int] = {}
        for stage in stages:
            lane = stage.depth
            begin_ns = max(_on_our_clock(stage.started), ends_ns.get(lane, 0))  # the clock may have been set back
            end_ns = max(begin_ns, _on_our_clock(stage.started + stage.elapsed))
            ends_ns[lane] = end_ns
            lane_name = "stages within" if lane else "stages"
            details = {"model": stage.model} if stage.model else {}
            yield from self._span(_RUN, lane, lane_name, stage.name, begin_ns, end_ns - begin_ns, details)

    def _name_process(self, process: int, name: str) -> Iterator[dict[str, Any]]:
        for what, args in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": process})):
            yield {"ph": "M", "name": what, "pid": process, "tid": process * _LANES_APART, "args": args}

    def _span(
        self,
        process: int,
        lane: int,
        lane_name: str,
        name: str,
        begin_ns: int,
        duration_ns: int,
        details: dict[str, Any],
    ) -> Iterator[dict[str, Any]]:
        thread = {"pid": process, "tid": process * _LANES_APART + lane}
        if thread["tid"] not in self._named:  # unnamed, hence hidden, while it is empty
            self._named.add(thread["tid"])
            yield {"ph": "M", "name": "thread_name", **thread, "args": {"name": lane_name}}
            yield {"ph": "M", "name": "thread_sort_index", **thread, "args": {"sort_index": lane}}
        times = {"ts": self._us(begin_ns), "dur": duration_ns / 1000}
        yield {"ph": "X", "cat": lane_name, "name": name, **times, **thread, **({"args": details} if details else {})}

    def _us(self, at_ns: int) -> float:
        return (at_ns - self._begin_ns) / 1000
