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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

from prefect import Task
from prefect.futures import PrefectFuture
from prefect.task_runners import TaskRunner

from virnucpro.config import RUNNERS
from virnucpro.errors import ConfigurationError, printable

Result = TypeVar("Result")

_START_S = 60
"""Seconds that workers of a standing cluster have to appear."""


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
    for package in ("prefect_ray", "ray") if engine == "ray" else ("prefect_dask", "distributed"):
        _imported(package, engine)
    if address == "slurm":
        _imported("dask_jobqueue", engine)
    return Runner("ray" if engine == "ray" else "dask", address)


class Cluster(ABC):
    """
    A started runner, and what its hosts have.

    Args:
        runner: Prefect's task runner, started.
        slots: Device tasks that run at the same time.
        device_type: ``cpu`` or ``cuda``: what each of them computes on.
    """

    def __init__(self, runner: TaskRunner[Any], slots: int, device_type: str) -> None:
        self.slots = slots
        self.device_type = device_type
        self._runner = runner

    def submit(self, task: Task[Any, Any], parameters: dict[str, Any]) -> PrefectFuture[Any]:
        """Submit a device task; it begins once there is a device for it."""
        with self._resources():
            future: PrefectFuture[Any] = self._runner.submit(task, parameters)
        return future

    @abstractmethod
    def has_ended(self, future: PrefectFuture[Any]) -> bool:
        """Whether a device task has ended, so that its state is at hand."""

    @abstractmethod
    def drop(self, future: PrefectFuture[Any]) -> None:
        """Take back a device task, if it has not begun."""

    @abstractmethod
    def on_every_host(self, function: Callable[..., Result], *args: Any, timeout_s: float) -> list[Result]:
        """
        Call a function once on every host that can compute, with one of its GPUs where the cluster has any.

        Raises:
            ConfigurationError: A host did not answer in time; what the function raised on a host is raised as it is.
        """

    @abstractmethod
    def _resources(self) -> AbstractContextManager[Any]:
        """Return a context in which what is submitted asks for a device."""


@contextmanager
def started(runner: Runner, *, workers: int, on_cpus: bool = False) -> Iterator[Cluster]:
    """
    Start a runner, or connect to its cluster.

    Args:
        runner: Which; not ``threads``.
        workers: Device tasks wanted; 0 for one a GPU of the cluster or, where it has none, one a worker of Dask or a
            CPU of Ray.
        on_cpus: Compute on CPUs, also where there are GPUs.

    Raises:
        ConfigurationError: The cluster cannot be reached, or has nothing to compute with.
    """
    with (_ray if runner.engine == "ray" else _dask)(runner, workers, on_cpus) as cluster:
        if cluster.slots < 1:
            raise ConfigurationError(f"the cluster of {runner.engine} has no worker that computes: start some")
        yield cluster


class _RayCluster(Cluster):
    def __init__(self, runner: TaskRunner[Any], workers: int, *, on_cpus: bool) -> None:
        self._ray = _imported("ray", "ray")
        found = self._ray.cluster_resources()
        gpus = 0 if on_cpus else int(found.get("GPU", 0))
        available = gpus or int(found.get("CPU", 0))
        super().__init__(runner, min(available, workers or available), "cuda" if gpus else "cpu")
        self._options = {"num_gpus": 1, "num_cpus": 0} if gpus else {"num_cpus": 1}

    def has_ended(self, future: PrefectFuture[Any]) -> bool:
        ended, _ = self._ray.wait([cast("Any", future).wrapped_future], timeout=0)
        return bool(ended)

    def drop(self, future: PrefectFuture[Any]) -> None:
        with suppress(Exception):  # it has ended, or its host has
            self._ray.cancel(cast("Any", future).wrapped_future)

    def on_every_host(self, function: Callable[..., Result], *args: Any, timeout_s: float) -> list[Result]:
        affinity = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        wanted = "GPU" if self.device_type == "cuda" else "CPU"
        nodes = [node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get(wanted)]
        call = self._ray.remote(function)
        options = {"num_cpus": 0, "num_gpus": self._options.get("num_gpus", 0), "max_retries": 0}
        calls = {
            call.options(**options, scheduling_strategy=affinity(node["NodeID"], soft=False)).remote(*args): node
            for node in nodes
        }
        ended, others = self._ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s)
        found = []
        for one in ended:
            try:
                found.append(self._ray.get(one))
            except self._ray.exceptions.RayTaskError as error:
                raise error.cause from None
        if others:
            address = calls[others[0]]["NodeManagerAddress"]
            raise ConfigurationError(f"the host at {printable(address)} did not answer for {timeout_s:g} s")
        return found

    def _resources(self) -> AbstractContextManager[Any]:
        # where a host dies its task runs again, on whichever has room, or on one that comes back
        options = {**self._options, "max_retries": -1}
        remote_options = _imported("prefect_ray.context", "ray").remote_options
        return cast("AbstractContextManager[Any]", remote_options(**options))


class _DaskCluster(Cluster):
    def __init__(self, runner: TaskRunner[Any], workers: int, *, on_cpus: bool, starts_them: bool) -> None:
        self._client = cast("Any", runner).client
        found = self._client.scheduler_info(n_workers=-1)["workers"].values()
        gpus = 0 if on_cpus else int(sum(worker["resources"].get("GPU", 0) for worker in found))
        available = gpus or len(found)
        slots = workers if starts_them and workers else min(available, workers or available)
        super().__init__(runner, slots, "cuda" if gpus else "cpu")

    def has_ended(self, future: PrefectFuture[Any]) -> bool:
        return bool(cast("Any", future).wrapped_future.done())

    def drop(self, future: PrefectFuture[Any]) -> None:
        with suppress(Exception):  # it has ended, or its host has
            cast("Any", future).wrapped_future.cancel()

    def on_every_host(self, function: Callable[..., Result], *args: Any, timeout_s: float) -> list[Result]:
        workers = self._client.scheduler_info(n_workers=-1)["workers"]
        one_a_host = {worker["host"]: address for address, worker in workers.items()}
        calls = [
            self._client.submit(function, *args, workers=[address], allow_other_workers=False, pure=False)
            for address in one_a_host.values()
        ]
        try:
            return [call.result(timeout=timeout_s) for call in calls]
        except TimeoutError as error:
            late = next(host for host, call in zip(one_a_host, calls, strict=True) if not call.done())
            raise ConfigurationError(f"the host at {printable(late)} did not answer for {timeout_s:g} s") from error

    def _resources(self) -> AbstractContextManager[Any]:
        if self.device_type == "cpu":
            return nullcontext()
        return cast("AbstractContextManager[Any]", _imported("dask", "dask").annotate(resources={"GPU": 1}))


@contextmanager
def _ray(runner: Runner, workers: int, on_cpus: bool) -> Iterator[Cluster]:
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if runner.is_local:
        options |= {"num_cpus": workers or os.cpu_count() or 1, "include_dashboard": False}
    address = None if runner.is_local else f"ray://{runner.address}"
    task_runner = _imported("prefect_ray", "ray").RayTaskRunner(address=address, init_kwargs=options)
    with _connected("ray", runner, task_runner):
        yield _RayCluster(task_runner, workers, on_cpus=on_cpus)


@contextmanager
def _dask(runner: Runner, workers: int, on_cpus: bool) -> Iterator[Cluster]:
    prefect_dask, dask = _imported("prefect_dask", "dask"), _imported("dask", "dask")
    if runner.is_local:
        one_a_slot = {"n_workers": workers or os.cpu_count() or 1, "threads_per_worker": 1}
        own = {**one_a_slot, "dashboard_address": None, "host": "127.0.0.1", "silence_logs": "ERROR"}
        task_runner = prefect_dask.DaskTaskRunner(cluster_kwargs=own)
    elif runner.address == "slurm":
        jobs = {"n_workers": workers or 1}
        task_runner = prefect_dask.DaskTaskRunner(cluster_class="dask_jobqueue.SLURMCluster", cluster_kwargs=jobs)
    else:
        task_runner = prefect_dask.DaskTaskRunner(address=f"tcp://{runner.address}")
    logging.getLogger("distributed").setLevel(logging.WARNING)
    # workers of Dask start processes of their own: ours
    with dask.config.set({"distributed.worker.daemon": False}), _connected("dask", runner, task_runner):
        yield _DaskCluster(task_runner, workers, on_cpus=on_cpus, starts_them=runner.address == "slurm")


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
        task_runner.__exit__(None, None, None)


def _imported(package: str, engine: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigurationError(
            f"the runner {engine} needs the package {package.replace('_', '-')}: pip install 'virnucpro[{engine}]'"
        ) from error
