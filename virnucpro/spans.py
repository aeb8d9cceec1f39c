"""
Spans of time of this process, in lanes, each appended to a file as it ends.

Disabled until ``enable``; until then ``with span(...)`` costs a fraction of a microsecond. Memory does not grow, and
written spans survive the process. The clock is CLOCK_MONOTONIC, shared by the processes of a host.
Recording never fails a run: it ends with a warning instead.

A line of a file is an event of Chrome's trace event format: ``virnucpro.telemetry.trace`` only joins them. A span is a
complete event (``X``, microseconds) in the thread of its lane. If recording ended early, a last event says why.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

log = logging.getLogger(__name__)  # the standard library's: instrumented code also runs where little is installed

PREPARING = "preparing"
READING = "reading"
TOKENISING = "tokenising"
PACKING = "packing"
LAUNCHING = "launching"
"""The host queues a batch on a GPU."""
HOST_TO_DEVICE = "host-to-device"
COMPUTE = "compute"
DEVICE_TO_HOST = "device-to-host"
WRITING = "writing"
SEALING = "sealing"
LANES = (
    PREPARING,
    READING,
    TOKENISING,
    PACKING,
    LAUNCHING,
    HOST_TO_DEVICE,
    COMPUTE,
    DEVICE_TO_HOST,
    WRITING,
    SEALING,
)
"""Steps of a worker, in the order of a batch. Spans in one lane of a process never overlap."""

LANES_APART = 100
"""Thread numbers reserved for each process: viewers need them unique."""
_MOST_PROCESSES = 40_000_000
"""So that the numbers of their threads have 32 bits."""
MOST_SPANS = 250_000
"""Most spans of a process, about 30 MB: more than viewers handle well."""


class Batch(Protocol):
    """A batch as a span describes it."""

    @property
    def positions(self) -> Sequence[int]: ...

    @property
    def num_tokens(self) -> int: ...


class Record(Protocol):
    """A sequence as a span describes it."""

    @property
    def position(self) -> int: ...


def span(
    lane: str, about: Batch | Sequence[Record] | None = None, *, name: str = "", **details: int
) -> AbstractContextManager[None]:
    """
    Time the block of a ``with`` statement.

    Args:
        lane: One of ``LANES``.
        about: A batch or its records, read when the span ends: gives block, sequences and tokens.
        name: Shown; by default the lane's name.
        details: Numbers shown with it.
    """
    return _NO_SPAN if _recorder is None else _timed(_recorder, lane, about, name, details)


def add(
    lane: str,
    begin_ns: int,
    end_ns: int,
    about: Batch | Sequence[Record] | None = None,
    *,
    name: str = "",
    **details: int | str,
) -> None:
    """Record a span timed by the caller with ``time.monotonic_ns``; otherwise as ``span``."""
    if _recorder is not None:
        _recorder.add(lane, begin_ns, end_ns, about, name, details)


def is_enabled() -> bool:
    return _recorder is not None


def enable(
    folder: Path, process: Mapping[str, int | str], block_of: Callable[[int], int], loader: int | None = None
) -> None:
    """
    Record the spans of this process, its start included, in a new file.

    Args:
        folder: For the files of a run; made when absent.
        process: The worker's ``model``, ``rank``, ``device`` and ``attempt``.
        block_of: Returns the block of an index position; picklable, for loader processes.
        loader: Number of the loader process; None in the worker itself.
    """
    global _recorder  # noqa: PLW0603  one for each process
    disable()
    now_ns = time.monotonic_ns()
    begin_ns = _process_begin_ns()
    try:
        _recorder = _Recorder(folder / f"process_{os.getpid()}_{now_ns}.jsonl", process, block_of, loader)
    except OSError as error:
        log.warning("spans.unwritable: %s: %s", folder, error.strerror or error)
        return
    if loader is None:
        add(PREPARING, begin_ns, now_ns, name="start process")


def disable() -> None:
    global _recorder  # noqa: PLW0603  as in enable
    if _recorder is not None:
        _recorder.close()
    _recorder = None


def loader_start() -> Callable[[int], None] | None:
    """Return what each loader process calls with its number to record as well; None while disabled."""
    return None if _recorder is None else _recorder.loader_start()


@contextmanager
def _timed(
    recorder: _Recorder,
    lane: str,
    about: Batch | Sequence[Record] | None,
    name: str,
    details: Mapping[str, int],
) -> Iterator[None]:
    begin_ns = time.monotonic_ns()
    failed = {}
    try:
        yield
    except BaseException as error:
        failed = {"failed": type(error).__name__}
        raise
    finally:
        recorder.add(lane, begin_ns, time.monotonic_ns(), about, name, {**details, **failed})


def named(what: str, place: Mapping[str, int], name: str, order: int) -> list[dict[str, Any]]:
    """Return the events that name a ``process`` or ``thread`` of the timeline, and say where it stands."""
    about = (("name", "name", name), ("sort_index", "sort_index", order))
    return [{"ph": "M", "name": f"{what}_{end}", **place, "args": {key: value}} for end, key, value in about]


class _Recorder:
    def __init__(
        self, path: Path, process: Mapping[str, Any], block_of: Callable[[int], int], loader: int | None
    ) -> None:
        self._process = process
        self._block_of = block_of
        self._path = path
        self._left = MOST_SPANS
        self._lock = threading.Lock()
        self._number = 2 + secrets.randbelow(_MOST_PROCESSES)  # hosts of a cluster may share numbers of processes
        self._lanes: set[int] = set()
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor: int | None = os.open(path, flags, 0o666)  # minus the umask
        model, rank, device, attempt = (process[name] for name in ("model", "rank", "device", "attempt"))
        parts = [model, f"rank {rank}", device, *([f"attempt {attempt}"] if attempt > 1 else [])]
        parts += [] if loader is None else [f"loader {loader}"]
        order = 1 + 1000 * rank + 10 * attempt + (0 if loader is None else 1 + loader)
        self._append(*named("process", self._place(0), f"{', '.join(parts)} (pid {os.getpid()})", order))

    def add(
        self,
        lane: str,
        begin_ns: int,
        end_ns: int,
        about: Batch | Sequence[Record] | None,
        name: str,
        details: dict[str, int | str],
    ) -> None:
        with self._lock:
            if self._descriptor is None:
                return
            if self._left == 0:
                self._end(f"{MOST_SPANS:,} spans of this process are recorded, the limit", at_ns=begin_ns)
                return
            self._left -= 1
            number = LANES.index(lane)
            if number not in self._lanes:  # a lane without a name is hidden
                self._lanes.add(number)
                self._append(*named("thread", self._place(number), lane, number))
            times = {"ts": begin_ns / 1000, "dur": (end_ns - begin_ns) / 1000}
            facts = {**self._facts_of(about), **details}
            event = {"ph": "X", "cat": lane, "name": name or lane, **times, **self._place(number)}
            self._append({**event, "args": facts} if facts else event)

    def _facts_of(self, about: Batch | Sequence[Record] | None) -> dict[str, int]:
        """Return block, sequences and tokens, as far as known."""
        if about is None:
            return {}
        if isinstance(about, Sequence):
            positions, tokens = [record.position for record in about], {}
        else:
            positions, tokens = list(about.positions), {"tokens": about.num_tokens}
        block = {"block": self._block_of(positions[0])} if positions else {}
        return {**block, "sequences": len(positions), **tokens}

    def _place(self, lane: int) -> dict[str, int]:
        return {"pid": self._number, "tid": self._number * LANES_APART + lane}

    def _append(self, *events: dict[str, Any]) -> None:
        if self._descriptor is None:
            return
        lines = b"".join(_LINES.encode(event).encode() + b"\n" for event in events)
        refused = "the disk took a line in part"  # which nothing may follow
        try:
            if os.write(self._descriptor, lines) == len(lines):
                return
        except OSError as error:  # a missing timeline must not fail the run
            refused = error.strerror or str(error)
        log.warning("spans.unwritable: %s: %s", self._path, refused)
        self.close()

    def _end(self, why: str, *, at_ns: int) -> None:
        log.warning("spans.ended: %s", why)
        at = {"s": "p", "name": "recording ends", "ts": at_ns / 1000}
        self._append({"ph": "i", **at, **self._place(0), "args": {"why": why}})
        self.close()

    def loader_start(self) -> Callable[[int], None]:
        return partial(enable, self._path.parent, dict(self._process), self._block_of)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None


def _process_begin_ns() -> int:
    """Return the start of this process, to 10 ms, on the clock of ``time.monotonic_ns``; Linux counts from boot."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:  # noqa: PTH123  no import for one line
        ticks = int(file.read().rpartition(")")[2].split()[19])  # field 22 of proc(5): the second may hold spaces
    since_boot_ns = ticks * 10**9 // os.sysconf("SC_CLK_TCK")
    return since_boot_ns - (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns())


_LINES = json.JSONEncoder(separators=(",", ":"), default=int)  # numpy's integers are integers
_NO_SPAN = nullcontext()
_recorder: _Recorder | None = None
