"""What runs in Dask's workers: a plugin that keeps the unit workers of a run, and the task that gives them a unit."""

import importlib
import threading
from typing import Any

from virnucpro.config import RunLimits
from virnucpro.pipeline.hosts.unit_worker import UnitWorker
from virnucpro.pipeline.work.units import Unit, UnitRecord
from virnucpro.pipeline.work.work import Work

MESSAGES_INTERVAL_S = 1.0
"""Seconds between two events of a worker."""


class Plugin:
    """Keeps the unit workers of one run on one of Dask's workers; *name*: its own, and the run's at the scheduler."""

    def __init__(self, name: str, run: Work, limits: RunLimits) -> None:
        self.name, self._run, self._limits = name, run, limits

    def setup(self, worker: Any) -> None:
        self._dask_worker = worker
        self._lock, self._is_over = threading.Lock(), threading.Event()
        self._all: list[UnitWorker] = []
        self._free: list[UnitWorker] = []
        threading.Thread(target=self._speak, name="unit-messages", daemon=True).start()

    def teardown(self, worker: Any) -> None:
        del worker
        threading.Thread(target=self.end, kwargs={"at_once": True}, name="unit-end").start()  # this is the event loop

    def compute(self, unit: Unit) -> tuple[str, UnitRecord]:
        """Compute a unit with a unit worker that is free; return our address as well."""
        with self._lock:
            one = self._free.pop() if self._free else None
        if one is None:
            for other in self._dask_worker.plugins.values():  # of other runs
                if isinstance(other, Plugin) and other is not self:
                    other.end_idle()
            one = UnitWorker(self._run, self._next_rank(), self._limits)
            with self._lock:
                self._all.append(one)
        try:
            return self._dask_worker.address, one.compute(unit)
        finally:
            with self._lock:
                self._free.append(one)
            self._send()

    def end(self, *, at_once: bool = False) -> None:
        for one in list(self._all):
            one.close(at_once=at_once)
        self._send()
        self._is_over.set()

    def end_idle(self) -> None:
        """End the processes that wait for a unit: another run has their slots now."""
        with self._lock:
            for one in self._free:
                one.close()

    def _next_rank(self) -> int:
        distributed = importlib.import_module("distributed")
        number = distributed.Variable(self.name, client=distributed.get_client())
        with distributed.Lock(self.name):
            rank = int(number.get())
            number.set(rank + 1)
        return rank

    def _speak(self) -> None:
        while not self._is_over.wait(MESSAGES_INTERVAL_S):
            self._send()

    def _send(self) -> None:
        for one in list(self._all):
            if entries := one.messages():
                self._dask_worker.log_event(self.name, [self._dask_worker.address, entries])


def compute_unit(name: str, unit: Unit) -> tuple[str, UnitRecord]:
    found: tuple[str, UnitRecord] = importlib.import_module("distributed").get_worker().plugins[name].compute(unit)
    return found


def end_units(name: str, dask_worker: Any) -> None:
    dask_worker.plugins[name].end()
