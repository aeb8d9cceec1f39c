"""
Where the tasks of an embedding run, one for each device: threads of this process, or a cluster of Ray or of Dask.

A runner is named by one setting: ``threads``; ``ray`` or ``dask``, a small cluster on this machine for the time of the
run; ``ray://HOST:PORT`` or ``dask://HOST:PORT``, a cluster that stands; ``dask://slurm``, workers that SLURM starts as
dask-jobqueue's configuration says. The engines are existing ones, imported only when they are asked for.
"""

import importlib
import logging
import os
import re
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from prefect import Task
from prefect.futures import PrefectFuture
from prefect.logging import get_run_logger
from prefect.task_runners import TaskRunner

from flows.slurm import SlurmJobs
from virnucpro.config import RUNNERS
from virnucpro.errors import ClusterLostError, ConfigurationError, VirNucProError, printable
from virnucpro.pipeline.devices import count_gpus

Result = TypeVar("Result")

_START_S = 60
"""Seconds that workers of a standing cluster have to appear."""
_LOOK_S = 0.1
"""Seconds between two looks at calls on hosts."""


@dataclass(frozen=True)
class Runner:
    """A runner by its name, not started."""

    engine: Literal["threads", "ray", "dask"]
    address: str = ""
    """Where the cluster is; empty for one of our own on this machine, and ``slurm`` for workers that SLURM starts."""

    @property
    def is_local(self) -> bool:
        """Whether the cluster is made for this run, on this machine."""
        return not self.address


def runner_of(name: str) -> Runner:
    """
    Return the runner of that name.

    Raises:
        ConfigurationError: There is none, or its packages are not installed.
    """
    if not re.match(RUNNERS, name):
        raise ConfigurationError(
            f"no runner is called {printable(name)}: threads, ray, ray://HOST:PORT, dask, dask://HOST:PORT or dask://slurm"
        )
    engine, _, address = name.partition("://")
    if engine == "threads":
        return Runner("threads")
    if engine == "ray" and address:
        _show_ray_token()
    for package in ("prefect_ray", "ray") if engine == "ray" else ("prefect_dask", "distributed"):
        _imported(package, engine)
    if address == "slurm":
        _imported("dask_jobqueue", engine)
    return Runner("ray" if engine == "ray" else "dask", address)


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
        """Submit a device task; it begins once there is a slot for it."""
        with self._resources():
            future: PrefectFuture[Any] = self._runner.submit(task, parameters)
        return future

    def has_ended(self, future: PrefectFuture[Any]) -> bool:
        """Whether a device task has ended, so that its state is at hand."""
        return self._is_over(cast("Any", future).wrapped_future)

    def has_begun(self, _future: PrefectFuture[Any]) -> bool:
        """Whether a device task has found its slot; True as well where the engine does not say."""
        return True

    def drop(self, future: PrefectFuture[Any]) -> None:
        """Take back a device task, if it has not begun."""
        self._cancel(cast("Any", future).wrapped_future)

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
        if not self.is_there():
            raise ClusterLostError(self.engine)

    def on_every_host(self, function: Callable[..., Result], *args: Any, timeout_s: float) -> list[Result]:
        """
        Call a function once on every host that can compute.

        Raises:
            ConfigurationError: A host did not answer in time; what the function raised on a host is raised as it is.
        """
        calls = self._call_hosts(function, args, gpus=0)
        late = self._wait_for(calls, timeout_s)
        for host in late:
            self._cancel(calls[host])
        found = [self._answer(call, host) for host, call in calls.items() if host not in late]
        if late:
            raise ConfigurationError(f"the host at {printable(late[0])} did not answer for {timeout_s:g} s")
        return found

    def on_a_gpu_of_every_host(self, function: Callable[..., Result], *args: Any, timeout_s: float) -> list[Result]:
        """
        Call a function on one GPU of every host; wait until the first has answered, as others may have taken them all.

        A host that does not answer *timeout_s* after the first is left out. What the function raises on a host is
        raised as it is.
        """
        calls = self._call_hosts(function, args, gpus=1)
        if len(self._wait_for(calls, timeout_s, least=1)) == len(calls):
            get_run_logger().warning("waiting for a GPU: no host of the cluster has a free one yet")
            self._wait_for(calls, float("inf"), least=1)
        late = self._wait_for(calls, timeout_s)
        for host in late:
            get_run_logger().warning("the host at %s has no free GPU yet: the run is planned without it", host)
            self._cancel(calls[host])
        return [self._answer(call, host) for host, call in calls.items() if host not in late]

    def _wait_for(self, calls: dict[str, Any], timeout_s: float, *, least: int | None = None) -> list[str]:
        """Wait until *least* calls, or all, are over; return the hosts whose are not."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            late = [host for host, call in calls.items() if not self._is_over(call)]
            if len(calls) - len(late) >= (len(calls) if least is None else least) or time.monotonic() > deadline_s:
                return late
            time.sleep(_LOOK_S)

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
def started(runner: Runner, *, workers: int, on_cpus: bool = False) -> Iterator[Cluster]:
    """
    Start a runner, or connect to its cluster.

    Args:
        runner: Which; not ``threads``.
        workers: Device tasks wanted; 0 for one a slot of the cluster.
        on_cpus: Compute on CPUs, also where slots are GPUs.

    Raises:
        ConfigurationError: The cluster cannot be reached, or has nothing to compute with.
    """
    start = _ray if runner.engine == "ray" else _slurm if runner.address == "slurm" else _dask
    with start(runner, workers, on_cpus) as cluster:
        if cluster.slots < 1:
            raise ConfigurationError(f"the cluster of {runner.engine} has no worker that computes: start some")
        yield cluster


class _RayCluster(Cluster):
    engine = "ray"

    def __init__(self, runner: TaskRunner[Any], workers: int, *, on_cpus: bool) -> None:
        self._ray = _imported("ray", "ray")
        found = self._ray.cluster_resources()
        gpus = int(found.get("GPU", 0))
        available = gpus or int(found.get("CPU", 0))
        super().__init__(runner, min(available, workers or available), has_gpus=gpus > 0, on_cpus=on_cpus)

    def _call_hosts(self, function: Callable[..., Any], args: tuple[Any, ...], *, gpus: int) -> dict[str, Any]:
        affinity = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        wanted = "GPU" if self._has_gpus else "CPU"
        call = self._ray.remote(function).options
        options = {"num_cpus": 0, "num_gpus": gpus, "max_retries": 0}
        return {
            node["NodeManagerAddress"]: call(
                **options, scheduling_strategy=affinity(node["NodeID"], soft=False)
            ).remote(*args)
            for node in self._ray.nodes()
            if node["Alive"] and node["Resources"].get(wanted)
        }

    def _is_over(self, call: Any) -> bool:
        ended, _ = self._ray.wait([call], timeout=0)
        return bool(ended)

    def _answer(self, call: Any, host: str) -> Any:
        try:
            return self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except self._ray.exceptions.RayError as error:
            raise ConfigurationError(
                f"the host at {printable(host)} did not answer: {printable(str(error))}"
            ) from error

    def _cancel(self, call: Any) -> None:
        with suppress(Exception):  # it has ended, or its host has
            self._ray.cancel(call)

    def _resources(self) -> AbstractContextManager[Any]:
        slot = {"num_gpus": 1, "num_cpus": 0} if self._has_gpus else {"num_cpus": 1}
        # where a host dies its task runs again, on whichever has room, or on one that comes back
        options = {**slot, "max_retries": -1}
        remote_options = _imported("prefect_ray.context", "ray").remote_options
        return cast("AbstractContextManager[Any]", remote_options(**options))


class _DaskCluster(Cluster):
    engine = "dask"

    def __init__(self, runner: TaskRunner[Any], workers: int, *, on_cpus: bool, jobs: SlurmJobs | None = None) -> None:
        self._client = cast("Any", runner).client
        found = self._client.scheduler_info(n_workers=-1)["workers"].values()
        gpus = int(sum(worker["resources"].get("GPU", 0) for worker in found))
        available = gpus or len(found)
        slots = workers if jobs is not None else min(available, workers or available)  # others come later
        super().__init__(runner, slots, has_gpus=gpus > 0, on_cpus=on_cpus)
        self._jobs = jobs

    def look(self) -> None:
        super().look()
        if self._jobs is not None:
            self._jobs.look()

    def is_there(self) -> bool:
        # whoever lost the connection has lost its tasks as well, though it may connect again
        return bool(self._client.status == "running")

    def has_begun(self, future: PrefectFuture[Any]) -> bool:
        key = cast("Any", future).wrapped_future.key
        return any(key in keys for keys in self._client.processing().values())

    def _call_hosts(self, function: Callable[..., Any], args: tuple[Any, ...], *, gpus: int) -> dict[str, Any]:
        wanted = {"GPU": gpus} if gpus else None
        submit = self._client.submit
        return {
            host: submit(function, *args, workers=[worker], resources=wanted, allow_other_workers=False, pure=False)
            for host, worker in self._one_worker_a_host().items()
        }

    def _one_worker_a_host(self) -> dict[str, str]:
        found = self._client.scheduler_info(n_workers=-1)["workers"].items()
        return {
            worker["host"]: address for address, worker in found if worker["resources"].get("GPU") or not self._has_gpus
        }

    def _is_over(self, call: Any) -> bool:
        return bool(call.done())

    def _answer(self, call: Any, host: str) -> Any:
        try:
            return call.result()
        except VirNucProError:
            raise
        except Exception as error:
            raise ConfigurationError(
                f"the host at {printable(host)} did not answer: {printable(str(error))}"
            ) from error

    def _cancel(self, call: Any) -> None:
        with suppress(Exception):  # it has ended, or its host has
            call.cancel()

    def _resources(self) -> AbstractContextManager[Any]:
        if not self._has_gpus:
            return nullcontext()
        return cast("AbstractContextManager[Any]", _imported("dask", "dask").annotate(resources={"GPU": 1}))


@contextmanager
def _ray(runner: Runner, workers: int, on_cpus: bool) -> Iterator[Cluster]:
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if runner.is_local:
        options |= {"num_cpus": workers or os.cpu_count() or 1, "include_dashboard": False}
        options |= {"num_gpus": 0} if on_cpus else {}
    address = None if runner.is_local else f"ray://{runner.address}"
    task_runner = _imported("prefect_ray", "ray").RayTaskRunner(address=address, init_kwargs=options)
    with _connected("ray", runner, task_runner):
        yield _RayCluster(task_runner, workers, on_cpus=on_cpus)


@contextmanager
def _dask(runner: Runner, workers: int, on_cpus: bool) -> Iterator[Cluster]:
    prefect_dask, dask = _imported("prefect_dask", "dask"), _imported("dask", "dask")
    if runner.is_local:
        gpus = 0 if on_cpus else count_gpus()
        one_a_slot = {"n_workers": workers or gpus or os.cpu_count() or 1, "threads_per_worker": 1}
        slot = {"resources": {"GPU": 1}} if gpus else {}
        own = {**one_a_slot, **slot, "dashboard_address": None, "host": "127.0.0.1", "silence_logs": "ERROR"}
        task_runner = prefect_dask.DaskTaskRunner(cluster_kwargs=own)
    else:
        task_runner = prefect_dask.DaskTaskRunner(address=f"tcp://{runner.address}")
    logging.getLogger("distributed").setLevel(logging.WARNING)
    # workers of Dask start processes of their own: ours
    with dask.config.set({"distributed.worker.daemon": False}), _connected("dask", runner, task_runner):
        yield _DaskCluster(task_runner, workers, on_cpus=on_cpus)


@contextmanager
def _slurm(_runner: Runner, workers: int, on_cpus: bool) -> Iterator[Cluster]:
    logging.getLogger("distributed").setLevel(logging.WARNING)
    prefect_dask = _imported("prefect_dask", "dask")
    with SlurmJobs(workers or 1) as jobs, prefect_dask.DaskTaskRunner(cluster=jobs.cluster) as task_runner:
        jobs.wait_for_worker()
        yield _DaskCluster(task_runner, workers or 1, on_cpus=on_cpus, jobs=jobs)


@contextmanager
def _connected(engine: str, runner: Runner, task_runner: TaskRunner[Any]) -> Iterator[None]:
    """Start a task runner and stop it again; what fails before it runs is the configuration's fault."""
    where = f"at {runner.address}" if runner.address else "on this machine"
    try:
        task_runner.__enter__()
        if engine == "dask":
            task_runner.client.wait_for_workers(1, timeout=_START_S)  # type: ignore[attr-defined]  # it connects here
    except Exception as error:
        raise ConfigurationError(f"no cluster of {engine} {printable(where)}: {printable(str(error))}") from error
    try:
        yield
    finally:
        # a run that ends minds no lost connection
        logging.getLogger("distributed.client").setLevel(logging.CRITICAL)
        task_runner.__exit__(None, None, None)


def _show_ray_token() -> None:
    """
    Have Ray's client show the token of this user, where there is one; before Ray is imported.

    ``ray start`` asks for it by itself where it finds one, the client shows it only when it is told to, and without it
    the connection times out without a reason. Source: https://docs.ray.io/en/latest/ray-security/token-auth.html
    """
    token = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    if token or (Path.home() / ".ray" / "auth_token").exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def _imported(package: str, engine: str) -> Any:
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
