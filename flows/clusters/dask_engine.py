"""
Dask: on this machine for one run, an existing cluster, or workers started by SLURM.

A worker plugin keeps the ``UnitWorker`` of each slot; units are tasks. The scheduler runs a task again whose worker was
lost, and gives tasks to workers that come later. Workers' messages are Dask's events.
"""

import importlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from flows.clusters.dask_plugin import Plugin, compute_unit, end_units
from flows.clusters.engine import REST_S, SLOTS_INTERVAL_S, Engine, UnitWorkers, imported, lost_entry
from flows.clusters.slurm import slurm_cluster, wait_for_worker
from virnucpro.config import RunLimits
from virnucpro.errors import ConfigurationError, VirNucProError, printable
from virnucpro.host_gpus import host_tokens
from virnucpro.pipeline.hardware.device_claim import usable_cores
from virnucpro.pipeline.work.units import Unit, UnitRecord
from virnucpro.pipeline.work.work import Work

START_S = 60
"""Seconds for the first worker to appear."""
ANSWER_S = 10.0
"""Seconds for the scheduler to list its workers."""
AHEAD = 2
"""Units at the scheduler for each slot: one that waits keeps a later run from taking the slot in between."""


@contextmanager
def dask_engine(address: str, *, workers: int, on_cpus: bool) -> Iterator[Engine]:
    """
    Start a cluster on this machine, or connect to the scheduler at *address*.

    *address*: ``HOST:PORT``, ``slurm`` for workers started by SLURM; empty starts a cluster. *workers*: at most; 0 for
    as many as there are slots.
    """
    distributed, dask = imported("distributed", "dask"), imported("dask", "dask")
    logging.getLogger("distributed").setLevel(logging.WARNING)
    if address == "slurm":
        with slurm_cluster(workers or 1) as jobs, distributed.Client(jobs) as client:
            wait_for_worker(jobs)
            yield _DaskEngine(client, workers or 1, on_cpus=on_cpus, is_elastic=True)
        return
    gpus = 0 if on_cpus or address else len(host_tokens())
    one_a_slot = {"n_workers": workers or gpus or usable_cores(), "threads_per_worker": 1}
    slot = {"resources": {"GPU": 1}} if gpus else {}
    own = {**one_a_slot, **slot, "dashboard_address": None, "host": "127.0.0.1", "silence_logs": logging.ERROR}
    # workers start our processes, so are no daemons; the profiler, every 10 ms, takes 5 % of a core each
    settings = {"distributed.worker.daemon": False, "distributed.worker.profile.enabled": False}
    with dask.config.set(settings):
        try:
            client = distributed.Client(f"tcp://{address}") if address else distributed.Client(**own)
            client.wait_for_workers(1, timeout=START_S)
        except Exception as error:
            what = f"dask at {printable(address)}" if address else "dask on this machine"
            raise ConfigurationError(f"no cluster of {what}: {printable(str(error))}") from error
        with client:
            try:
                yield _DaskEngine(client, workers, on_cpus=on_cpus)
            finally:
                logging.getLogger("distributed.client").setLevel(logging.CRITICAL)  # at the end a loss is normal


class _DaskEngine(Engine):
    name = "dask"

    def __init__(self, client: Any, workers: int, *, on_cpus: bool, is_elastic: bool = False) -> None:
        self.client = client
        self._is_elastic = is_elastic
        super().__init__(workers, has_gpus=any(gpus for _, gpus in self.workers().values()), on_cpus=on_cpus)

    @property
    def slot(self) -> dict[str, Any]:
        """Resources of a task."""
        return {"resources": {"GPU": 1}} if self.has_gpus else {}

    def workers(self) -> dict[str, tuple[str, int]]:
        """Return address -> host and GPUs of each worker."""
        ask = self.client.scheduler.identity
        found = self.client.sync(ask, n_workers=-1, callback_timeout=ANSWER_S)["workers"].items()
        return {address: (about["host"], int(about["resources"].get("GPU", 0))) for address, about in found}

    def is_there(self) -> bool:
        # a client that lost its connection has lost its tasks, even if it reconnects
        return bool(self.client.status == "running")

    @contextmanager
    def unit_workers(self, run: Work, limits: RunLimits) -> Iterator[UnitWorkers]:
        workers = _Tasks(self, run, limits)
        try:
            yield workers
        finally:
            with suppress(Exception):  # the cluster is lost
                workers.close()

    def _slots_now(self) -> int:
        if self._is_elastic:
            return self._most  # more jobs start as there are more units
        return sum(gpus if self.has_gpus else 1 for _, gpus in self.workers().values())

    def _call(self, function: Callable[[Any], Any], item: Any) -> Any:
        return self.client.submit(function, item, pure=False, **self.slot)

    def _over(self, calls: list[Any]) -> list[Any]:
        return [call for call in calls if call.done()]

    def _result_of(self, call: Any) -> Any:
        try:
            return call.result()
        except VirNucProError:
            raise
        except Exception as error:
            raise ConfigurationError(f"a task of dask failed: {printable(str(error))}") from error

    def _cancel(self, calls: list[Any]) -> None:
        for call in calls:
            with suppress(Exception):  # the call or its host has ended
                call.cancel()


class _Tasks(UnitWorkers):
    def __init__(self, engine: _DaskEngine, run: Work, limits: RunLimits) -> None:
        self._engine, self._client, self._limits = engine, engine.client, limits
        self._distributed = importlib.import_module("distributed")
        self._name = f"virnucpro {run.output_dir}"  # of a dead start in this folder: replaced, which ends its processes
        self._events: deque[tuple[str, list[dict[str, Any]]]] = deque()
        """Worker of Dask, and what it has sent."""
        self._computing: dict[Any, Unit] = {}
        self._resting_s: dict[str, float] = {}
        """Worker whose host was refused, or whose device failed -> when it may be asked again."""
        self._ranks: dict[int, str] = {}
        """Rank -> its worker of Dask."""
        self._slots_s, self._slots = 0.0, 0
        self._priority = -time.time()  # the run that began first goes first
        self._distributed.Variable(self._name, client=self._client).set(0)
        self._client.subscribe_topic(self._name, lambda event: self._events.append(event[1]))
        plugin = type("Plugin", (Plugin, self._distributed.WorkerPlugin), {})
        self._client.register_plugin(plugin(self._name, run, limits), name=self._name)

    def has_room(self) -> bool:
        return len(self._computing) < self._slots * AHEAD

    def submit(self, unit: Unit) -> None:
        resting = self._resting()
        usable = {"workers": [one for one in self._engine.workers() if one not in resting]} if resting else {}
        options = {**self._engine.slot, **usable, "pure": False, "priority": self._priority}
        self._computing[self._client.submit(compute_unit, self._name, unit, **options)] = unit

    def look(self, timeout_s: float) -> list[tuple[Unit, UnitRecord | Exception]]:
        if time.monotonic() - self._slots_s > SLOTS_INTERVAL_S:
            self._slots_s = time.monotonic()
            self._slots = max(0, self._engine.slots - len(self._resting()))
            there = self._engine.workers()
            for rank in [rank for rank, address in self._ranks.items() if address not in there]:
                del self._ranks[rank]
                self._events.append(("", [lost_entry(rank)]))
        if self._computing:
            with suppress(TimeoutError, self._distributed.CancelledError):
                self._distributed.wait(list(self._computing), timeout=timeout_s, return_when="FIRST_COMPLETED")
        else:
            time.sleep(timeout_s)
        return [self._ended(future) for future in list(self._computing) if future.done()]

    def messages(self) -> list[dict[str, Any]]:
        events = [self._events.popleft() for _ in range(len(self._events))]
        self._ranks |= {entry["rank"]: address for address, entries in events if address for entry in entries}
        return [entry for _, entries in events for entry in entries]

    def are_refused(self) -> bool:
        workers = self._engine.workers().keys()
        return bool(workers) and not self._computing and workers <= self._resting()

    def stop(self) -> None:
        self._client.cancel(list(self._computing))
        self._client.unregister_worker_plugin(self._name)

    def close(self) -> None:
        if self._client.status == "running" and not self._computing:
            with suppress(Exception):  # a worker is lost
                self._client.run(end_units, self._name, on_error="ignore")
                time.sleep(0.2)  # for their last events
            with suppress(Exception):
                self._client.unregister_worker_plugin(self._name)
        self._client.unsubscribe_topic(self._name)

    def _resting(self) -> set[str]:
        now_s = time.monotonic()
        return {one for one, until_s in self._resting_s.items() if until_s > now_s}

    def _ended(self, future: Any) -> tuple[Unit, UnitRecord | Exception]:
        unit = self._computing.pop(future)
        if future.status != "finished":
            return unit, future.exception() if future.status == "error" else RuntimeError(future.status)
        address, record = future.result()
        if record.is_lost:
            self._resting_s[address] = math.inf if record.error is None else time.monotonic() + REST_S
        return unit, record
