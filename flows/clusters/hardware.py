"""
The devices of a flow run: awaited when needed, kept by a prediction over both embedding runs, here or of a cluster.

One setting names the runner: ``threads``; ``ray`` or ``dask`` for a small cluster on this machine during the run;
``ray://HOST:PORT`` or ``dask://HOST:PORT`` for an existing cluster; ``dask://slurm`` for workers started by SLURM
according to dask-jobqueue's configuration. Engines are imported only when used.

Context variables tell the flow ``embed`` within ``predict`` that its devices are held or its cluster is connected.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

from prefect.logging import get_run_logger
from prefect.runtime import deployment

from flows.clusters.dask_engine import dask_engine
from flows.clusters.engine import Engine, imported
from flows.clusters.ray_engine import ray_engine, show_token
from virnucpro.errors import ConfigurationError, printable
from virnucpro.pipeline.devices import CPU, Device
from virnucpro.pipeline.hardware.device_claim import DeviceClaim, claim_for
from virnucpro.settings import Hardware
from virnucpro.texts import RUNNER

ALLOWED_RUNNERS = "VIRNUCPRO_RUNNERS"
"""Environment variable of the worker: allowed runners with an address, separated by commas."""
_KEPT: ContextVar[DeviceClaim | None] = ContextVar("_KEPT", default=None)
_CLUSTER: ContextVar[Engine | None] = ContextVar("_CLUSTER", default=None)


@dataclass(frozen=True)
class Runner:
    engine: Literal["threads", "ray", "dask"]
    address: str = ""
    """HOST:PORT; empty for a cluster on this machine, ``slurm`` for workers started by SLURM."""


def runner_of(name: str) -> Runner:
    if not re.match(RUNNER.pattern, name):
        raise ConfigurationError(
            f"no runner is called {printable(name)}: threads, ray, ray://HOST:PORT, dask, dask://HOST:PORT or dask://slurm"
        )
    engine, _, address = name.partition("://")
    if engine == "threads":
        return Runner("threads")
    if engine == "ray" and address:
        show_token()
    imported("ray" if engine == "ray" else "distributed", engine)
    if address == "slurm":
        imported("dask_jobqueue", engine)
    return Runner("ray" if engine == "ray" else "dask", address)


def check_runner_allowed(name: str) -> None:
    """
    Refuse a cluster that the worker does not allow: its operator can run code here and read the settings of tasks.

    Clusters made on this machine are always allowed. A deployment may use those listed in the variable; a user's own
    command may use any, unless the variable is set.
    """
    setting = os.environ.get(ALLOWED_RUNNERS)
    if "://" not in name or (setting is None and deployment.id is None):
        return
    if name not in (allowed := [one.strip() for one in (setting or "").split(",") if one.strip()]):
        raise ConfigurationError(
            f"runner: {printable(name)} is not one that the worker allows "
            f"({ALLOWED_RUNNERS}: {', '.join(map(printable, allowed)) or 'none'}); no connection was made"
        )


@contextmanager
def started(runner: Runner, *, workers: int, on_cpus: bool = False) -> Iterator[Engine]:
    """Start a runner that is not ``threads``, or connect to its cluster; *workers* 0: as many as it has slots."""
    start = ray_engine if runner.engine == "ray" else dask_engine
    with start(runner.address, workers=workers, on_cpus=on_cpus) as engine:
        if engine.slots < 1:
            raise ConfigurationError(f"the cluster of {runner.engine} has no worker that can compute: start some")
        if runner.address and engine.device_type == "cpu" and not on_cpus:
            get_run_logger().warning(
                "the cluster of %s declares no GPU: its CPUs compute, with %s workers (as with --devices cpu)",
                runner.engine,
                engine.slots,
            )
        yield engine


@contextmanager
def computing_on(hardware: Hardware, check: Callable[[], object]) -> Iterator[DeviceClaim]:
    """Yield this flow run's devices, the prediction's, or a cluster's; *check* raises before a cluster is requested."""
    if (kept_claim := _KEPT.get()) is not None:
        yield kept_claim
        return
    check_runner_allowed(hardware.runner)
    runner = runner_of(hardware.runner)
    if runner.engine == "threads":
        yield claim_for(hardware)
        return
    check()
    with started(runner, workers=hardware.workers, on_cpus=hardware.devices.strip() == "cpu") as engine:
        token = _CLUSTER.set(engine)
        try:
            # placeholders for devices of other hosts, by number
            slots = range(max(1, engine.slots))
            yield DeviceClaim.of([CPU if engine.device_type == "cpu" else Device(f"task-{slot}") for slot in slots])
        finally:
            _CLUSTER.reset(token)


def cluster_here() -> Engine | None:
    """Return the cluster of this flow run, None when it uses this machine's devices."""
    return _CLUSTER.get()


@contextmanager
def kept(claim: DeviceClaim) -> Iterator[None]:
    """Let the embedding runs of the block compute on the devices of *claim*."""
    token = _KEPT.set(claim)
    try:
        yield
    finally:
        _KEPT.reset(token)
