"""
A cluster of Ray or Dask as a run uses it: workers that compute units, calls on hosts, and items done by any host.

What a run needs of an engine is here; each engine has a file of its own. Their packages are imported only when used.
"""

import importlib
import math
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, TypeVar

from prefect.logging import get_run_logger

from virnucpro.config import RunLimits
from virnucpro.errors import ClusterLostError, ConfigurationError, VirNucProError, printable
from virnucpro.pipeline.work.units import Unit, UnitRecord
from virnucpro.pipeline.work.work import Work

Answer = TypeVar("Answer")
Item = TypeVar("Item")

NOTICE_S = 10.0
"""Seconds after which a wait for a GPU or a slot is logged."""
SLOTS_INTERVAL_S = 2.0
"""Seconds between two looks at the slots."""
REST_S = 60.0
"""Seconds after which a worker on a refused host is asked again."""
_LOOK_S = 0.1


class UnitWorkers(ABC):
    """The workers of one run, as many as the cluster has slots at any time."""

    @abstractmethod
    def has_room(self) -> bool: ...

    @abstractmethod
    def submit(self, unit: Unit) -> None: ...

    @abstractmethod
    def look(self, timeout_s: float) -> list[tuple[Unit, UnitRecord | Exception]]:
        """
        Return the units that have ended, waiting a little for the first; an error for one lost with its worker.

        Slots that have come or gone since the last look are noticed here.
        """

    @abstractmethod
    def messages(self) -> list[dict[str, Any]]:
        """Return the messages of workers since the last call."""

    @abstractmethod
    def are_refused(self) -> bool:
        """Whether every worker of the cluster is refused or has failed."""

    @abstractmethod
    def stop(self) -> None:
        """Stop computing at the next batch boundary."""


class Engine(ABC):
    """
    A connected cluster; *most* workers at a time, 0 for as many as there are slots.

    A worker takes one slot: a declared GPU (resource ``GPU`` of Ray's nodes or Dask's workers), or without any a CPU of
    Ray or a worker of Dask.
    """

    name: ClassVar[str]

    def __init__(self, most: int, *, has_gpus: bool, on_cpus: bool) -> None:
        self.has_gpus = has_gpus
        self.device_type = "cuda" if has_gpus and not on_cpus else "cpu"
        self._most = most

    @property
    def slots(self) -> int:
        """Slots that there are now, or more where the cluster starts them on demand."""
        now = self._slots_now()
        return min(now, self._most or now)

    def look(self) -> None:
        """Check the cluster; ClusterLostError where the scheduler is lost."""
        if not self.is_there():
            raise ClusterLostError(self.name)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Guard requests to the engine; ClusterLostError where one failed because the engine is lost."""
        self.look()
        try:
            yield
        except Exception as error:
            if self.is_lost_by(error) or not self.is_there():
                raise ClusterLostError(self.name) from error
            raise

    def is_lost_by(self, _error: Exception) -> bool:
        """Whether an error shows that the connection is lost."""
        return False

    def map(self, function: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
        """
        Call a function once for each item, in any free slot; return the answers in the order of the items.

        An item that the cluster cannot do is done here. ClusterLostError where the scheduler is lost.
        """
        calls = self._calls(function, items)
        self._wait_for(calls, least=len(calls))
        return [self._answer(function, item, call) for item, call in zip(items, calls, strict=True)]

    def ask_slots(self, function: Callable[[int], Answer], *, patience_s: float) -> list[Answer]:
        """
        Call a function in every slot, with its number; wait for the first without limit, as other runs may hold all.

        Slots that are not free *patience_s* after that are skipped.
        """
        calls = self._calls(function, range(max(1, self.slots)))
        if not self._wait_for(calls, least=1, limit_s=NOTICE_S):
            get_run_logger().warning("waiting for a slot of the cluster: none is free yet")
            self._wait_for(calls, least=1)
        over = self._wait_for(calls, least=len(calls), limit_s=patience_s)
        with self.asking():
            self._cancel([call for call in calls if call not in over])
            return [self._result_of(call) for call in over]

    def _calls(self, function: Callable[[Item], Answer], items: Sequence[Item]) -> list[Any]:
        with self.asking():
            return [self._call(function, item) for item in items]

    def _wait_for(self, calls: list[Any], *, least: int, limit_s: float = math.inf) -> list[Any]:
        """Wait until *least* calls are over, or for *limit_s*; return the calls that are over."""
        deadline_s = time.monotonic() + limit_s
        try:
            while True:
                with self.asking():
                    over = self._over(calls)
                if len(over) >= least or time.monotonic() > deadline_s:
                    return over
                time.sleep(_LOOK_S)
        except BaseException:
            if self.is_there():
                self._cancel(calls)
            raise

    def _answer(self, function: Callable[[Item], Answer], item: Item, call: Any) -> Answer:
        try:
            with self.asking():
                answer: Answer = self._result_of(call)
        except ClusterLostError:
            raise
        except VirNucProError as error:
            get_run_logger().warning("%s: it is done here", printable(str(error)))
            answer = function(item)
        return answer

    @abstractmethod
    def is_there(self) -> bool:
        """Whether the scheduler can be reached; without it nothing returns."""

    @abstractmethod
    def unit_workers(self, run: Work, limits: RunLimits) -> AbstractContextManager[UnitWorkers]:
        """Return a context with the workers of a run; all have ended at its end."""

    @abstractmethod
    def _slots_now(self) -> int: ...

    @abstractmethod
    def _call(self, function: Callable[[Any], Any], item: Any) -> Any:
        """Call a function on any host, in a slot; return the engine's future."""

    @abstractmethod
    def _over(self, calls: list[Any]) -> list[Any]:
        """Return those of the engine's futures that are done."""

    @abstractmethod
    def _result_of(self, call: Any) -> Any:
        """Return or raise the outcome of a finished call; ConfigurationError where the engine lost it."""

    @abstractmethod
    def _cancel(self, calls: list[Any]) -> None:
        """Cancel calls that have not begun."""


def lost_entry(rank: int) -> dict[str, Any]:
    """Return the entry of a worker that was lost with its host."""
    end = {"state": "failed", "failure": "died", "reason": "it was lost with its host", "exit_code": None}
    return {"rank": rank, "ended": {**end, "starts_again": False, "quarantined": []}}


def imported(package: str, engine: str) -> Any:
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigurationError(
            f"the runner {engine} needs the package {package.replace('_', '-')}: pip install 'virnucpro[{engine}]'"
        ) from error
    finally:
        if signal.getsignal(signal.SIGINT) is not on_ctrl_c:  # dask-jobqueue's handler ends the process with code 0
            signal.signal(signal.SIGINT, on_ctrl_c)
