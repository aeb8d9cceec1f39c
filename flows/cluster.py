"""
What a cluster of Ray or of Dask is to a run: slots for its device tasks, and hosts that can be asked.

The engines' packages are imported when a cluster of them is asked for, and never otherwise.
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
"""Seconds between two looks at calls on hosts."""
SAY_S = 10.0
"""Seconds after which a person is told that a GPU, or a slot, is waited for."""


class Cluster(ABC):
    """
    A started runner, and what its hosts have.

    A device task takes one slot of the cluster: a GPU that it declares (``GPU`` among the resources of Ray's nodes or
    of Dask's workers) or, where it declares none, a CPU of Ray or a worker of Dask.

    Args:
        runner: Prefect's task runner, started.
        slots: Device tasks that run at the same time.
        has_gpus: Whether slots are GPUs.
        on_cpus: Whether the tasks compute on CPUs all the same.
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
        Submit a device task; it begins once there is a slot for it.

        Raises:
            ClusterLostError: The cluster's scheduler is gone.
        """
        with self._asking(), self._resources():
            future: PrefectFuture[Any] = self._runner.submit(task, parameters)
        return future

    def has_ended(self, future: PrefectFuture[Any]) -> bool:
        """Whether a device task has ended, so that its state is at hand; of a cluster that is gone, none has."""
        try:
            with self._asking():
                return self._is_over(cast("Any", future).wrapped_future)
        except ClusterLostError:
            return False

    def result(self, future: PrefectFuture[Any]) -> Any:
        """Return what a device task that has ended returned, or the error that ended it."""
        try:
            with self._asking():
                return self._result(future)
        except Exception as error:  # noqa: BLE001  # its state was never told
            return error

    def has_begun(self, _future: PrefectFuture[Any]) -> bool:
        """Whether a device task has found its slot; True as well where the engine does not say."""
        return True

    def drop(self, future: PrefectFuture[Any]) -> None:
        """Take back a device task, if it has not begun."""
        self._take_back([cast("Any", future).wrapped_future])

    def is_there(self) -> bool:
        """Whether its scheduler can be reached; without it no task comes back."""
        return True

    def look(self) -> None:
        """
        See to the cluster; called again and again while tasks run.

        Raises:
            ClusterLostError: Its scheduler is gone.
            ConfigurationError: No host of it is left.
        """
        self._must_be_there()

    def on_every_host(self, function: Callable[..., Result], *args: Any, timeout_s: float) -> list[Result]:
        """
        Call a function once on every host that can compute.

        Hosts that compute for other runs answer as well.

        Raises:
            ConfigurationError: A host did not answer in time; what the function raised on a host is raised as it is.
            ClusterLostError: The cluster's scheduler is gone.
        """
        with self._asking():
            calls = self._call_hosts(function, args, gpus=0)
        try:
            return self._answers(calls, timeout_s)
        except BaseException:
            self._take_back(calls.values())
            raise

    def _answers(self, calls: dict[str, Any], timeout_s: float) -> list[Any]:
        """Return what all hosts answer; the first that refuses is told at once, whoever else is still thinking."""
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
        Call a function on one GPU of every host; wait until the first has answered, as others may have taken them all.

        A host that does not answer *timeout_s* after the first is left out. What the function raises on a host is
        raised as it is.

        Raises:
            ClusterLostError: The cluster's scheduler is gone.
        """
        with self._asking():
            calls = self._call_hosts(function, args, gpus=1)
        if len(self._wait_for(calls, min(SAY_S, timeout_s), least=1)) == len(calls):
            get_run_logger().warning("waiting for a GPU: no host of the cluster has a free one yet")
            self._wait_for(calls, float("inf"), least=1)
        late = self._wait_for(calls, timeout_s)
        for host in late:
            get_run_logger().warning("the host at %s has no free GPU yet: the run is planned without it", host)
        self._take_back([calls[host] for host in late])
        with self._asking():
            return [self._answer(call, host) for host, call in calls.items() if host not in late]

    def _wait_for(self, calls: dict[str, Any], timeout_s: float, *, least: int | None = None) -> list[str]:
        """Wait until *least* calls, or all, are over; return the hosts whose are not."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._asking():
                late = [host for host, call in calls.items() if not self._is_over(call)]
            if len(calls) - len(late) >= (len(calls) if least is None else least) or time.monotonic() > deadline_s:
                return late
            time.sleep(_LOOK_S)

    def _take_back(self, calls: Iterable[Any]) -> None:
        if self.is_there():  # else there is nobody to be told
            for call in calls:
                self._cancel(call)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """
        Ask the engine something, unless it is gone; what fails because it goes meanwhile is told as such.

        Raises:
            ClusterLostError: It is gone.
        """
        self._must_be_there()
        try:
            yield
        except Exception as error:
            self._must_be_there(error)
            raise

    def _must_be_there(self, error: Exception | None = None) -> None:
        """Raise ``ClusterLostError`` where the scheduler is gone, as *error* may tell."""
        if not self.is_there():
            raise ClusterLostError(self.engine) from error

    def _result(self, future: PrefectFuture[Any]) -> Any:
        """Return what a task that has ended returned or raised."""
        future.wait()
        return future.state.result(raise_on_failure=False)

    @abstractmethod
    def _call_hosts(self, function: Callable[..., Any], args: tuple[Any, ...], *, gpus: int) -> dict[str, Any]:
        """Call a function on every host that can compute; return the engine's futures by the hosts' addresses."""

    @abstractmethod
    def _is_over(self, call: Any) -> bool:
        """Whether a future of the engine is done."""

    @abstractmethod
    def _answer(self, call: Any, host: str) -> Any:
        """Return what a call that is over returned, or raise what it raised."""

    @abstractmethod
    def _cancel(self, call: Any) -> None:
        """Take back a call, if it has not begun."""

    @abstractmethod
    def _resources(self) -> AbstractContextManager[Any]:
        """Return a context in which what is submitted asks for a slot."""


@contextmanager
def connected(
    task_runner: AbstractContextManager[TaskRunner[Any]], what: str, *, ready: Callable[[], object] = lambda: None
) -> Iterator[TaskRunner[Any]]:
    """
    Start a task runner, and stop it at the end.

    Args:
        task_runner: Starts its cluster, or connects to it.
        what: The cluster, in words.
        ready: Waits until it can be used.

    Raises:
        ConfigurationError: One of both failed.
    """
    with ExitStack() as stack:
        try:
            started = stack.enter_context(task_runner)
            ready()
        except Exception as error:
            raise ConfigurationError(f"no cluster of {what}: {printable(str(error))}") from error
        yield started


def imported(package: str, engine: str) -> Any:
    """
    Import a package of an engine.

    Raises:
        ConfigurationError: It is not installed; names the extra that it belongs to.
    """
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigurationError(
            f"the runner {engine} needs the package {package.replace('_', '-')}: pip install 'virnucpro[{engine}]'"
        ) from error
    finally:
        if signal.getsignal(signal.SIGINT) is not on_ctrl_c:  # dask-jobqueue would end the process, and with 0
            signal.signal(signal.SIGINT, on_ctrl_c)
