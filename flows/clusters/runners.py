"""
Where the workers of an embedding run: threads of this process, or a cluster of Ray or Dask.

One setting names it: ``threads``; ``ray`` or ``dask`` for a small cluster on this machine during the run;
``ray://HOST:PORT`` or ``dask://HOST:PORT`` for an existing cluster; ``dask://slurm`` for workers started by SLURM
according to dask-jobqueue's configuration. Engines are imported only when used.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from prefect.logging import get_run_logger
from prefect.runtime import deployment

from flows.clusters.dask_engine import dask_engine
from flows.clusters.engine import Engine, imported
from flows.clusters.ray_engine import ray_engine, show_token
from virnucpro.errors import ConfigurationError, printable
from virnucpro.texts import RUNNER

ALLOWED_RUNNERS = "VIRNUCPRO_RUNNERS"
"""Environment variable of the worker: allowed runners with an address, separated by commas."""


@dataclass(frozen=True)
class Runner:
    """A named runner, not started."""

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
    """
    Start a runner, or connect to its cluster.

    Args:
        runner: Not ``threads``.
        workers: At the same time; 0 for as many as the cluster has slots.
        on_cpus: Compute on CPUs, even where slots are GPUs.
    """
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
