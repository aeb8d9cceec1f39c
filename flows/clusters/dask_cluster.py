"""A Dask cluster: on this machine for one run, an existing one, or workers started by SLURM."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, cast

from prefect.futures import PrefectFuture
from prefect.task_runners import TaskRunner

from flows.clusters.cluster import Cluster, connected, imported
from flows.clusters.slurm import SlurmJobs
from virnucpro.errors import ConfigurationError, VirNucProError, printable
from virnucpro.pipeline.devices import count_gpus
from virnucpro.pipeline.hardware.device_claim import usable_cores

_START_S = 60
"""Seconds for the first worker to appear."""


@contextmanager
def dask_cluster(address: str, *, workers: int, on_cpus: bool) -> Iterator[Cluster]:
    """
    Start a cluster on this machine, or connect to the one at *address*.

    Args:
        address: ``HOST:PORT`` of its scheduler; empty starts a cluster.
    """
    prefect_dask, dask = imported("prefect_dask", "dask"), imported("dask", "dask")
    if address:
        task_runner = prefect_dask.DaskTaskRunner(address=f"tcp://{address}")
    else:
        gpus = 0 if on_cpus else count_gpus()
        one_a_slot = {"n_workers": workers or gpus or usable_cores(), "threads_per_worker": 1}
        slot = {"resources": {"GPU": 1}} if gpus else {}
        own = {**one_a_slot, **slot, "dashboard_address": None, "host": "127.0.0.1", "silence_logs": "ERROR"}
        task_runner = prefect_dask.DaskTaskRunner(cluster_kwargs=own)
    logging.getLogger("distributed").setLevel(logging.WARNING)
    what = f"dask at {printable(address)}" if address else "dask on this machine"

    def ready() -> None:
        task_runner.client.wait_for_workers(1, timeout=_START_S)

    # workers start our processes, so are no daemons; the profiler, every 10 ms, takes 5 % of a core each
    own_settings = {"distributed.worker.daemon": False, "distributed.worker.profile.enabled": False}
    with dask.config.set(own_settings), connected(task_runner, what, ready=ready):
        try:
            yield _DaskCluster(task_runner, workers, on_cpus=on_cpus)
        finally:
            # at the end of a run a lost connection is normal
            logging.getLogger("distributed.client").setLevel(logging.CRITICAL)


@contextmanager
def slurm_cluster(*, workers: int, on_cpus: bool) -> Iterator[Cluster]:
    """Start workers through SLURM, and wait for the first."""
    logging.getLogger("distributed").setLevel(logging.WARNING)
    prefect_dask = imported("prefect_dask", "dask")
    with SlurmJobs(workers) as jobs, prefect_dask.DaskTaskRunner(cluster=jobs.cluster) as task_runner:
        jobs.wait_for_worker()
        yield _DaskCluster(task_runner, workers, on_cpus=on_cpus, jobs=jobs)


async def _in_a_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a thread, outside of a worker's event loop."""
    return await asyncio.to_thread(function, *args)


class _DaskCluster(Cluster):
    engine = "dask"

    def __init__(self, runner: TaskRunner[Any], workers: int, *, on_cpus: bool, jobs: SlurmJobs | None = None) -> None:
        self._client = cast("Any", runner).client
        found = self._client.scheduler_info(n_workers=-1)["workers"].values()
        gpus = int(sum(worker["resources"].get("GPU", 0) for worker in found))
        available = gpus or len(found)
        slots = workers if jobs is not None else min(available, workers or available)  # more jobs start later
        super().__init__(runner, slots, has_gpus=gpus > 0, on_cpus=on_cpus)
        self._jobs = jobs

    def look(self) -> None:
        super().look()
        if self._jobs is not None:
            self._jobs.look()

    def is_there(self) -> bool:
        # a client that lost its connection has lost its tasks, even if it reconnects
        return bool(self._client.status == "running")

    def _result(self, future: PrefectFuture[Any]) -> Any:
        call = cast("Any", future).wrapped_future
        if call.status == "finished":
            return super()._result(future)
        return call.exception()  # a worker could not load it, or too many died of it: unknown to Prefect

    def has_begun(self, future: PrefectFuture[Any]) -> bool:
        key = cast("Any", future).wrapped_future.key
        return any(key in keys for keys in self._client.processing().values())

    def _call_hosts(self, function: Callable[..., Any], args: tuple[Any, ...], *, gpus: int) -> dict[str, Any]:
        workers = self._one_worker_a_host()
        if not gpus:
            loop = self._client.loop.asyncio_loop
            return {
                host: asyncio.run_coroutine_threadsafe(self._call_beside(worker, function, args), loop)
                for host, worker in workers.items()
            }
        options = {"resources": {"GPU": gpus}, "allow_other_workers": False, "pure": False}
        return {
            host: self._client.submit(function, *args, workers=[worker], **options) for host, worker in workers.items()
        }

    async def _call_beside(self, worker: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call a function beside the computation of a worker; a task would wait for its end."""
        answers = await self._client.run(_in_a_thread, function, *args, workers=[worker])
        return answers[worker]

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
        with suppress(Exception):  # the call or its host has ended
            call.cancel()

    def _resources(self) -> AbstractContextManager[Any]:
        if not self._has_gpus:
            return nullcontext()
        return cast("AbstractContextManager[Any]", imported("dask", "dask").annotate(resources={"GPU": 1}))
