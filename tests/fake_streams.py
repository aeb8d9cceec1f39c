"""
CUDA's streams and events with vector clocks, on a CPU: what is not ordered is a finding, also where numbers are right.

Operators run at once and on the CPU; noted is which stream they would have run on. A tensor may be read where its
writing is known to be over, and written where its reading is. Freed memory may be given away at once to the next tensor
of the same stream, as PyTorch's allocator does. Copies that do not block need page-locked memory on the host. Lanes are
the streams and the host.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from virnucpro.models.encoders import fused_linear

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

DEVICE = torch.device("cuda", 0)
HOST = 0
_TO_HOST = {torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.cpu}
_LOOKS = {"__get__", "__repr__", "data_ptr", "untyped_storage", "size", "dim", "stride", "__len__", "is_pinned"}

PAGEABLE = "a copy from or to pageable memory makes the host wait"
BLOCKS = "a copy makes the host wait"

Clock = defaultdict[int, int]


@dataclass
class _Memory:
    """What was done with the memory of a tensor."""

    lane: int
    """That it was allocated on."""
    is_on_device: bool
    written: dict[int, int] = field(default_factory=dict)
    read: dict[int, int] = field(default_factory=dict)


class Runtime:
    """A device's streams, and what was found."""

    def __init__(self) -> None:
        self.findings: list[str] = []
        self.freed: list[_Memory] = []
        """What other streams perhaps still used when it was freed."""
        self.memories: dict[int, _Memory] = {}
        self.clocks: defaultdict[int, Clock] = defaultdict(lambda: defaultdict(int))
        self.lanes = count(1)
        self.current = Stream(self)

    def tick(self, lane: int) -> int:
        """Queue something: it is after what the host did before."""
        self.learn(lane, self.clocks[HOST])
        self.clocks[lane][lane] += 1
        return self.clocks[lane][lane]

    def learn(self, lane: int, clock: Clock) -> None:
        for other, at in clock.items():
            self.clocks[lane][other] = max(self.clocks[lane][other], at)

    def allocated(self, tensor: torch.Tensor, lane: int, *, is_on_device: bool) -> torch.Tensor:
        if is_on_device:
            self._given_away(lane)
        storage = tensor.untyped_storage()
        self.memories[storage._cdata] = _Memory(lane, is_on_device)
        weakref.finalize(storage, self._freed, storage._cdata)
        return tensor

    def memory_of(self, tensor: torch.Tensor) -> _Memory | None:
        with torch._C.DisableTorchFunction():
            if tensor.layout is not torch.strided:  # a weight in oneDNN's own form
                return None
            return self.memories.get(tensor.untyped_storage()._cdata)

    def reads(self, what: object, tensor: torch.Tensor, lane: int) -> None:
        if (memory := self.memory_of(tensor)) is not None:
            self._after(memory.written, lane, f"{what} reads what is perhaps not written yet")
            memory.read[lane] = self.clocks[lane][lane]

    def writes(self, what: object, tensor: torch.Tensor, lane: int) -> None:
        if (memory := self.memory_of(tensor)) is not None:
            self._after(memory.written | memory.read, lane, f"{what} writes what is perhaps in use")
            memory.written[lane] = self.clocks[lane][lane]

    def _after(self, done: dict[int, int], lane: int, finding: str) -> None:
        if any(at > self.clocks[lane][other] for other, at in done.items() if other != lane):
            self.findings.append(finding)

    def _freed(self, key: int) -> None:
        memory = self.memories.pop(key, None)
        if memory is not None and memory.is_on_device:
            self.freed.append(memory)

    def _given_away(self, lane: int) -> None:
        """Look at what the allocator may give away on this stream."""
        known = {other: max(self.clocks[lane][other], self.clocks[HOST][other]) for other in list(self.clocks)}
        mine = [memory for memory in self.freed if memory.lane == lane]
        self.freed = [memory for memory in self.freed if memory.lane != lane]
        for memory in mine:
            for other, at in (memory.written | memory.read).items():
                if other != lane and at > known[other]:
                    self.findings.append(f"freed memory is used again while stream {other} perhaps uses it")


class Event:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.clock: Clock = defaultdict(int)
        self.at = 0.0

    def record(self, stream: Stream) -> None:
        self._runtime.tick(stream.lane)
        self.clock = self._runtime.clocks[stream.lane].copy()
        self.at = float(sum(self.clock.values()))

    def synchronize(self) -> None:
        self._runtime.learn(HOST, self.clock)

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


class Stream:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self.lane = runtime, next(runtime.lanes)

    def wait_stream(self, other: Stream) -> None:
        self._runtime.tick(self.lane)
        self._runtime.learn(self.lane, self._runtime.clocks[other.lane])

    def wait_event(self, event: Event) -> None:
        self._runtime.tick(self.lane)
        self._runtime.learn(self.lane, event.clock)

    def record_event(self) -> Event:
        event = Event(self._runtime)
        event.record(self)
        return event


class _Operators(TorchFunctionMode):
    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self.runtime = runtime

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, runtime = dict(kwargs or {}), self.runtime
        name = getattr(function, "__name__", "")
        if name in _LOOKS:
            return function(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        known = [memory for x in given if (memory := runtime.memory_of(x)) is not None]
        if function is torch.Tensor.to and torch.device("cuda") in {torch.device(x.type) for x in _devices(args)}:
            return self._to_device(*args, **kwargs)
        if function is torch.Tensor.copy_:
            return self._copied(*args, **kwargs)
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            return self._made(function, *args, **{**kwargs, "device": "cpu"})
        if kwargs.pop("pin_memory", False) or function is torch.Tensor.pin_memory:
            out = args[0].clone() if function is torch.Tensor.pin_memory else function(*args, **kwargs)
            return runtime.allocated(out, HOST, is_on_device=False)
        if function in _TO_HOST:
            if any(memory.is_on_device for memory in known):
                runtime.findings.append(f"{name} makes the host wait")
            runtime.reads(name, args[0], HOST)
            return function(*args, **kwargs)
        out = function(*args, **kwargs)
        if any(memory.is_on_device for memory in known):
            self._computed(name, given, out)
        return out

    def _computed(self, name: str, given: list[torch.Tensor], out: Any) -> None:
        runtime, lane = self.runtime, self.runtime.current.lane
        runtime.tick(lane)
        for x in given:
            runtime.reads(name, x, lane)
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                if runtime.memory_of(x) is None:
                    runtime.allocated(x, lane, is_on_device=True)
                    runtime.writes(name, x, lane)
                elif name.endswith("_") and not name.endswith("__"):
                    runtime.writes(name, x, lane)

    def _made(self, function: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        lane = self.runtime.current.lane
        self.runtime.tick(lane)
        out = self.runtime.allocated(function(*args, **kwargs), lane, is_on_device=True)
        self.runtime.writes(function, out, lane)
        return out

    def _to_device(self, source: torch.Tensor, *_: Any, non_blocking: bool = False) -> torch.Tensor:
        lane = self.runtime.current.lane
        out = self.runtime.allocated(source.clone(), lane, is_on_device=True)
        self._copy(source, out, non_blocking=non_blocking)
        return out

    def _copied(self, out: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            out.copy_(source)
        self._copy(source, out, non_blocking=non_blocking)
        return out

    def _copy(self, source: torch.Tensor, out: torch.Tensor, *, non_blocking: bool) -> None:
        runtime, lane = self.runtime, self.runtime.current.lane
        runtime.tick(lane)
        is_pageable = runtime.memory_of(source) is None or runtime.memory_of(out) is None
        runtime.reads("a copy", source, lane)
        runtime.writes("a copy", out, lane)
        if is_pageable or not non_blocking:
            runtime.findings.append(PAGEABLE if is_pageable else BLOCKS)
            runtime.learn(HOST, runtime.clocks[lane])


class _Generator(torch.Generator):
    """Of whatever device, on the CPU."""

    def __new__(cls, _device: object = None) -> Self:
        return super().__new__(cls)


def _devices(args: tuple[Any, ...]) -> list[torch.device]:
    return [x if isinstance(x, torch.device) else torch.device(x) for x in args if isinstance(x, torch.device | str)]


@contextmanager
def fake_streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    """Let the program use the device ``cuda``; what it did wrong is in the runtime's findings."""
    runtime = Runtime()

    @contextmanager
    def stream(one: Stream) -> Iterator[None]:
        before, runtime.current = runtime.current, one
        try:
            yield
        finally:
            runtime.current = before

    def synchronize(_device: object = None) -> None:
        for clock in list(runtime.clocks.values()):
            runtime.learn(HOST, clock)

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", lambda _device=None: Stream(runtime))
        patch.setattr(torch.cuda, "Event", lambda **_options: Event(runtime))
        patch.setattr(torch.cuda, "stream", stream)
        patch.setattr(torch.cuda, "current_stream", lambda _device=None: runtime.current)
        patch.setattr(torch.cuda, "synchronize", synchronize)
        patch.setattr(torch.cuda, "empty_cache", lambda: None)
        patch.setattr(torch, "Generator", _Generator)
        patch.setattr(fused_linear, "can_pack", lambda _device, _dtype: False)  # as on GPUs, also where a CPU has bf16
        with _Operators(runtime):
            yield runtime
