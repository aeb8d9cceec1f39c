"""A Ray cluster: on this machine for one run, or an existing one, through the port of its client server."""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from prefect.task_runners import TaskRunner

from flows.clusters.cluster import Cluster, connected, imported
from virnucpro.errors import ConfigurationError, VirNucProError, printable
from virnucpro.pipeline.hardware.device_claim import usable_cores


@contextmanager
def ray_cluster(address: str, *, workers: int, on_cpus: bool) -> Iterator[Cluster]:
    """
    Start a cluster on this machine, or connect to the one at *address*.

    Args:
        address: ``HOST:PORT`` of its client server; empty starts a cluster.
    """
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if address:
        options |= {"address": f"ray://{address}"}
    else:
        # "local" starts a cluster even where another runs or RAY_ADDRESS names one
        options |= {"address": "local", "num_cpus": workers or usable_cores(), "include_dashboard": False}
        options |= {"num_gpus": 0} if on_cpus else {}
    what = f"ray at {printable(address)}" if address else "ray on this machine"
    with connected(_task_runner(options), what) as task_runner:
        yield _RayCluster(task_runner, workers, on_cpus=on_cpus)


@contextmanager
def _task_runner(options: dict[str, Any]) -> Iterator[TaskRunner[Any]]:
    """Connect first: a task runner then leaves the connection alone, and does not query a lost Ray at its end."""
    ray, prefect_ray = imported("ray", "ray"), imported("prefect_ray", "ray")
    ray.init(**options)
    try:
        with prefect_ray.RayTaskRunner() as task_runner:
            yield task_runner
    finally:
        ray.shutdown()


class _RayCluster(Cluster):
    engine = "ray"

    def __init__(self, runner: TaskRunner[Any], workers: int, *, on_cpus: bool) -> None:
        self._ray = imported("ray", "ray")
        self._is_lost = False
        found = self._ray.cluster_resources()
        gpus = int(found.get("GPU", 0))
        available = gpus or int(found.get("CPU", 0))
        super().__init__(runner, min(available, workers or available), has_gpus=gpus > 0, on_cpus=on_cpus)

    def is_there(self) -> bool:
        # Ray's client reconnects for half a minute; a call after that would start a cluster on this machine
        return not self._is_lost and bool(self._ray.is_initialized())

    def _must_be_there(self, error: Exception | None = None) -> None:
        self._is_lost = self._is_lost or _is_of_connection(error)
        super()._must_be_there(error)

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
            if isinstance(error.cause, VirNucProError):
                raise error.cause from None
            raise ConfigurationError(f"the host at {printable(host)} failed: {printable(str(error.cause))}") from error
        except self._ray.exceptions.RayError as error:
            raise ConfigurationError(
                f"the host at {printable(host)} did not answer: {printable(str(error))}"
            ) from error

    def _cancel(self, call: Any) -> None:
        with suppress(Exception):  # the call or its host has ended
            self._ray.cancel(call)

    def _resources(self) -> AbstractContextManager[Any]:
        slot = {"num_gpus": 1, "num_cpus": 0} if self._has_gpus else {"num_cpus": 1}
        # the task of a lost host runs again on any free host
        options = {**slot, "max_retries": -1}
        remote_options = imported("prefect_ray.context", "ray").remote_options
        return cast("AbstractContextManager[Any]", remote_options(**options))


def _is_of_connection(error: Exception | None) -> bool:
    """Whether an error is about a connection, of Python or of gRPC, which only Ray's client loads."""
    grpc = sys.modules.get("grpc")
    return isinstance(error, ConnectionError) or (grpc is not None and isinstance(error, grpc.RpcError))


def show_token() -> None:
    """
    Make Ray's client send the user's token, where there is one; called before Ray is imported.

    ``ray start`` requires a token that it finds, the client sends it only on request, and without it the connection
    times out without a reason. Source: https://docs.ray.io/en/latest/ray-security/token-auth.html
    """
    token = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    if token or (Path.home() / ".ray" / "auth_token").exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
