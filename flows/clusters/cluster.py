"""
A cluster of Ray or Dask as a run uses it: slots for device tasks, and calls on hosts.

The engines' packages are imported only when used.
"""

import importlib
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar, cast

from prefect import Task
from prefect.futures import PrefectFuture
from prefect.logging import get_run_logger
from prefect.task_runners import TaskRunner

from virnucpro.errors import ClusterLostError, ConfigurationError, printable

Result = TypeVar("Result")

_LOOK_S = 0.1
"""Seconds between two polls of calls on hosts."""
NOTICE_S = 10.0
"""Seconds after which a wait for a GPU or a slot is logged."""


class Cluster(ABC):
    """
    A started runner, and the resources of its hosts.

    A device task takes one slot: a declared GPU (resource ``GPU`` of Ray's nodes or Dask's workers), or without any a
    CPU of Ray or a worker of Dask.

    Args:
        runner: Prefect's task runner, started.
        slots: Device tasks that run at once.
        has_gpus: Slots are GPUs.
    """

    engine: str
    """``ray`` or ``dask``."""

    def __init__(self, runner: TaskRunner[Any], slots: int, *, has_gpus: bool, on_cpus: bool) -> None:
        self.slots = slots
        self.device_type = "cuda" if has_gpus and not on_cpus else "cpu"
        self._runner = runner
        self._has_gpus = has_gpus

    def submit(self, task: Task[Any, Any], parameters: dict[str, Any]) -> PrefectFuture[Any]:
        """
        Submit a device task; it begins once a slot is free.

        Raises:
            ClusterLostError: The scheduler is lost.
        """
        with self._asking(), self._resources():
            future: PrefectFuture[Any] = self._runner.submit(task, parameters)
        return future

    def has_ended(self, future: PrefectFuture[Any]) -> bool:
        """Whether a device task has ended with a known state; False once the cluster is lost."""
        try:
            with self._asking():
                return self._is_over(cast("Any", future).wrapped_future)
        except ClusterLostError:
            return False

    def result(self, future: PrefectFuture[Any]) -> Any:
        """Return the result of an ended device task, or the error that ended it."""
        try:
            with self._asking():
                return self._result(future)
        except Exception as error:  # noqa: BLE001  # its state was never reported
            return error

    def has_begun(self, _future: PrefectFuture[Any]) -> bool:
        """Whether a device task has its slot; True where the engine does not tell."""
        return True

    def drop(self, future: PrefectFuture[Any]) -> None:
        """Cancel a device task that has not begun."""
        self._take_back([cast("Any", future).wrapped_future])

    def is_there(self) -> bool:
        """Whether the scheduler can be reached; without it no task returns."""
        return True

    def look(self) -> None:
        """
        Check the cluster; called repeatedly while tasks run.

        Raises:
            ClusterLostError: The scheduler is lost.
        """
        self._must_be_there()

    def on_every_host(self, function: Callable[..., Result], *args: Any, timeout_s: float) -> list[Result]:
        """
        Call a function once on every host that can compute, busy ones included.

        Raises:
            ClusterLostError: The scheduler is lost.
        """
        with self._asking():
            calls = self._call_hosts(function, args, gpus=0)
        try:
            return self._answers(calls, timeout_s)
        except BaseException:
            self._take_back(calls.values())
            raise

    def _answers(self, calls: dict[str, Any], timeout_s: float) -> list[Any]:
        """Return the answers of all hosts; the first error is raised at once."""
        deadline_s = time.monotonic() + timeout_s
        found: dict[str, Any] = {}
        while late := [host for host in calls if host not in found]:
            if time.monotonic() > deadline_s:
                raise ConfigurationError(f"the host at {printable(late[0])} did not answer for {timeout_s:g} s")
            with self._asking():
                found |= {host: self._answer(calls[host], host) for host in late if self._is_over(calls[host])}
            if len(found) < len(calls):
                time.sleep(_LOOK_S)
        return [found[host] for host in calls]

    def on_a_gpu_of_every_host(self, function: Callable[..., Result], *args: Any, timeout_s: float) -> list[Result]:
        """
        Call a function on one GPU of every host; wait without limit for the first, as other runs may hold all GPUs.

        A host without an answer *timeout_s* after the first is skipped. Errors of the function are raised as they are.

        Raises:
            ClusterLostError: The scheduler is lost.
        """
        with self._asking():
            calls = self._call_hosts(function, args, gpus=1)
        if len(self._wait_for(calls, min(NOTICE_S, timeout_s), least=1)) == len(calls):
            get_run_logger().warning("waiting for a GPU: no host of the cluster has a free one yet")
            self._wait_for(calls, float("inf"), least=1)
        late = self._wait_for(calls, timeout_s)
        for host in late:
            get_run_logger().warning("the host at %s has no free GPU yet: the run is planned without it", host)
        self._take_back([calls[host] for host in late])
        with self._asking():
            return [self._answer(call, host) for host, call in calls.items() if host not in late]

    def _wait_for(self, calls: dict[str, Any], timeout_s: float, *, least: int | None = None) -> list[str]:
        """Wait until *least* calls, or all, are done; return the hosts of the others."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._asking():
                late = [host for host, call in calls.items() if not self._is_over(call)]
            if len(calls) - len(late) >= (len(calls) if least is None else least) or time.monotonic() > deadline_s:
                return late
            time.sleep(_LOOK_S)

    def _take_back(self, calls: Iterable[Any]) -> None:
        if self.is_there():  # otherwise there is no scheduler to cancel at
            for call in calls:
                self._cancel(call)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """
        Guard a request to the engine: a failure because the engine is lost is raised as such.

        Raises:
            ClusterLostError: It is lost.
        """
        self._must_be_there()
        try:
            yield
        except Exception as error:
            self._must_be_there(error)
            raise

    def _must_be_there(self, error: Exception | None = None) -> None:
        """Raise ``ClusterLostError`` when the scheduler is lost, as *error* may show."""
        if not self.is_there():
            raise ClusterLostError(self.engine) from error

    def _result(self, future: PrefectFuture[Any]) -> Any:
        """Return what an ended task returned or raised."""
        future.wait()
        return future.state.result(raise_on_failure=False)

    @abstractmethod
    def _call_hosts(self, function: Callable[..., Any], args: tuple[Any, ...], *, gpus: int) -> dict[str, Any]:
        """Call a function on every host that can compute; return the engine's futures by host address."""

    @abstractmethod
    def _is_over(self, call: Any) -> bool:
        """Whether the engine's future is done."""

    @abstractmethod
    def _answer(self, call: Any, host: str) -> Any:
        """Return or raise the outcome of a finished call."""

    @abstractmethod
    def _cancel(self, call: Any) -> None:
        """Cancel a call that has not begun."""

    @abstractmethod
    def _resources(self) -> AbstractContextManager[Any]:
        """Return a context in which a submission requests a slot."""


@contextmanager
def connected(
    task_runner: AbstractContextManager[TaskRunner[Any]], what: str, *, ready: Callable[[], object] = lambda: None
) -> Iterator[TaskRunner[Any]]:
    """
    Start a task runner, and stop it at the end.

    Args:
        task_runner: Starts its cluster, or connects to it.
        what: Name of the cluster for messages.
        ready: Waits until it is usable.
    """
    with ExitStack() as stack:
        try:
            started = stack.enter_context(task_runner)
            ready()
        except Exception as error:
            raise ConfigurationError(f"no cluster of {what}: {printable(str(error))}") from error
        yield started


def imported(package: str, engine: str) -> Any:
    """Import a package of an engine."""
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigurationError(
            f"the runner {engine} needs the package {package.replace('_', '-')}: pip install 'virnucpro[{engine}]'"
        ) from error
    finally:
        if (
            signal.getsignal(signal.SIGINT) is not on_ctrl_c
        ):  # dask-jobqueue's handler ends the process with exit code 0
            signal.signal(signal.SIGINT, on_ctrl_c)
