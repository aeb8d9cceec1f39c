"""
Ray: on this machine for one run, or an existing cluster through the port of its client server.

Each slot has an actor that keeps a ``UnitWorker``. An actor is not restarted by Ray: a call that waits for a restart
holds its unit until the same resources are back, while other nodes are idle. The unit goes to another actor instead,
and a new actor waits for a slot.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from flows.clusters.engine import REST_S, SLOTS_INTERVAL_S, Engine, UnitWorkers, imported, lost_entry
from virnucpro.config import RunLimits
from virnucpro.errors import ConfigurationError, VirNucProError, printable
from virnucpro.pipeline.hardware.device_claim import usable_cores
from virnucpro.pipeline.hosts.unit_worker import UnitWorker
from virnucpro.pipeline.work.units import Unit, UnitRecord
from virnucpro.pipeline.work.work import Work

MESSAGES_INTERVAL_S = 1.0
"""Seconds between two questions for messages."""
CLOSE_S = 60.0
"""Seconds that actors have to end their processes."""


@contextmanager
def ray_engine(address: str, *, workers: int, on_cpus: bool) -> Iterator[Engine]:
    """Start a cluster on this machine, or connect to the client server at *address*; *workers* 0: one a slot."""
    ray = imported("ray", "ray")
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if address:
        options |= {"address": f"ray://{address}"}
    else:
        # "local" starts a cluster even where another runs or RAY_ADDRESS names one
        options |= {"address": "local", "num_cpus": workers or usable_cores(), "include_dashboard": False}
        options |= {"num_gpus": 0} if on_cpus else {}
    try:
        ray.init(**options)
    except Exception as error:
        what = f"ray at {printable(address)}" if address else "ray on this machine"
        raise ConfigurationError(f"no cluster of {what}: {printable(str(error))}") from error
    try:
        yield _RayEngine(ray, workers, on_cpus=on_cpus)
    finally:
        ray.shutdown()


class _RayEngine(Engine):
    name = "ray"

    def __init__(self, ray: Any, workers: int, *, on_cpus: bool) -> None:
        self.ray = ray
        self._is_lost = False
        super().__init__(workers, has_gpus=ray.cluster_resources().get("GPU", 0) >= 1, on_cpus=on_cpus)

    @property
    def slot(self) -> dict[str, int]:
        """Resources of a worker."""
        return {"num_gpus": 1, "num_cpus": 0} if self.has_gpus else {"num_cpus": 1}

    def is_there(self) -> bool:
        # Ray's client reconnects for half a minute; a call after that would start a cluster on this machine
        return not self._is_lost and bool(self.ray.is_initialized())

    def is_lost_by(self, error: Exception) -> bool:
        grpc = sys.modules.get("grpc")  # only Ray's client loads it
        self._is_lost |= isinstance(error, ConnectionError) or (grpc is not None and isinstance(error, grpc.RpcError))
        return self._is_lost

    @contextmanager
    def unit_workers(self, run: Work, limits: RunLimits) -> Iterator[UnitWorkers]:
        workers = _Actors(self, run, limits)
        try:
            yield workers
        finally:
            with suppress(Exception):  # the cluster is lost, and its actors with it
                workers.close()

    def _slots_now(self) -> int:
        return int(self.ray.cluster_resources().get("GPU" if self.has_gpus else "CPU", 0))

    def _call(self, function: Callable[[Any], Any], item: Any) -> Any:
        return self.ray.remote(_called).options(**self.slot, max_retries=-1).remote(function, item)

    def _over(self, calls: list[Any]) -> list[Any]:
        return list(self.ray.wait(calls, num_returns=len(calls), timeout=0)[0]) if calls else []

    def _result_of(self, call: Any) -> Any:
        try:
            return self.ray.get(call)
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, VirNucProError):
                raise error.cause from None
            raise ConfigurationError(f"a task of ray failed: {printable(str(error.cause))}") from error
        except self.ray.exceptions.RayError as error:
            raise ConfigurationError(f"a task of ray was lost: {printable(str(error))}") from error

    def _cancel(self, calls: list[Any]) -> None:
        for call in calls:
            with suppress(Exception):  # the call or its host has ended
                self.ray.cancel(call)


def _called(function: Callable[[Any], Any], item: Any) -> Any:
    return function(item)


class _Actors(UnitWorkers):
    """An actor a slot; those that wait for one have no unit."""

    def __init__(self, engine: _RayEngine, run: Work, limits: RunLimits) -> None:
        self._engine, self._ray = engine, engine.ray
        self._run, self._limits = run, limits
        self._actors: dict[int, Any] = {}
        self._num_made = 0
        self._alive: set[int] = set()
        """Actors that have answered."""
        self._computing: dict[Any, tuple[int, Unit]] = {}
        """Call -> actor and unit."""
        self._asked: dict[Any, int] = {}
        """Call for messages -> actor."""
        self._resting_s: dict[int, float] = {}
        """Refused or failed actor -> when it may be asked again."""
        self._entries: list[dict[str, Any]] = []
        self._slots_s = self._asked_s = 0.0

    def has_room(self) -> bool:
        return self._free() is not None

    def submit(self, unit: Unit) -> None:
        rank = self._free()
        assert rank is not None
        self._resting_s.pop(rank, None)
        self._computing[self._actors[rank].compute.remote(unit)] = rank, unit

    def look(self, timeout_s: float) -> list[tuple[Unit, UnitRecord | Exception]]:
        now_s = time.monotonic()
        if now_s - self._slots_s > SLOTS_INTERVAL_S:
            self._slots_s = now_s
            for _ in range(len(self._actors), self._engine.slots):
                self._make()
        if now_s - self._asked_s > MESSAGES_INTERVAL_S:
            self._asked_s = now_s
            asked = set(self._asked.values())
            self._asked |= {actor.messages.remote(): rank for rank, actor in self._actors.items() if rank not in asked}
        calls = [*self._computing, *self._asked]
        if not calls:
            time.sleep(timeout_s)
            return []
        self._ray.wait(calls, num_returns=1, timeout=timeout_s)
        ready, _ = self._ray.wait(calls, num_returns=len(calls), timeout=0)
        return [ended for call in ready if (ended := self._ended(call)) is not None]

    def messages(self) -> list[dict[str, Any]]:
        entries, self._entries = self._entries, []
        return entries

    def are_refused(self) -> bool:
        return bool(self._actors) and not self._computing and self._actors.keys() == self._resting_s.keys()

    def stop(self) -> None:
        for actor in self._actors.values():
            actor.close.remote(at_once=True)

    def close(self) -> None:
        closing = [actor.close.remote() for rank, actor in self._actors.items() if rank in self._alive]
        if closing:
            self._ray.wait(closing, num_returns=len(closing), timeout=CLOSE_S)
        self._asked = {actor.messages.remote(): rank for rank, actor in self._actors.items() if rank in self._alive}
        if self._asked:
            self.look(1.0)
        for actor in self._actors.values():
            self._ray.kill(actor)

    def _make(self) -> None:
        actor = self._ray.remote(UnitWorker)
        options = {**self._engine.slot, "max_concurrency": 3, "scheduling_strategy": "SPREAD"}
        rank = self._num_made
        self._actors[rank] = actor.options(**options).remote(self._run, rank, self._limits)
        self._num_made += 1

    def _free(self) -> int | None:
        busy, now_s = {rank for rank, _ in self._computing.values()}, time.monotonic()
        usable = self._alive - busy
        return next((rank for rank in sorted(usable) if self._resting_s.get(rank, 0.0) < now_s), None)

    def _ended(self, call: Any) -> tuple[Unit, UnitRecord | Exception] | None:
        """Handle a call that is over; return the unit that it computed, if it did."""
        rank, unit = self._computing.pop(call, (None, None))
        rank = self._asked.pop(call) if rank is None else rank
        try:
            answer = self._ray.get(call)
        except self._ray.exceptions.RayError as error:
            if self._actors.pop(rank, None) is not None:
                self._entries.append(lost_entry(rank))
            self._alive.discard(rank)
            self._resting_s.pop(rank, None)
            return None if unit is None else (unit, error)
        if unit is None:
            self._alive.add(rank)
            self._entries += answer
            return None
        if answer.is_lost:
            self._resting_s[rank] = math.inf if answer.error is None else time.monotonic() + REST_S
        return unit, answer


def show_token() -> None:
    """
    Make Ray's client send the user's token, where there is one; called before Ray is imported.

    ``ray start`` requires a token that it finds, the client sends it only on request, and without it the connection
    times out without a reason. Source: https://docs.ray.io/en/latest/ray-security/token-auth.html
    """
    token = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    if token or (Path.home() / ".ray" / "auth_token").exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
