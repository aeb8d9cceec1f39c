"""
Where the tasks of an embedding run, one for each device: threads of this process, or a cluster of Ray or of Dask.

A runner is named by one setting: ``threads``; ``ray`` or ``dask``, a small cluster on this machine for the time of the
run; ``ray://HOST:PORT`` or ``dask://HOST:PORT``, a cluster that stands; ``dask://slurm``, workers that SLURM starts as
dask-jobqueue's configuration says. The engines are existing ones, imported only when they are asked for.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from prefect.logging import get_run_logger
from prefect.runtime import deployment

from flows.cluster import Cluster, imported
from flows.dask_cluster import dask_cluster, slurm_cluster
from flows.ray_cluster import ray_cluster, show_token
from virnucpro.errors import ConfigurationError, printable
from virnucpro.settings import RUNNERS

ALLOWED_RUNNERS = "VIRNUCPRO_RUNNERS"
"""Environment variable of the worker: standing clusters and SLURM, by their names as runners, separated by commas."""


@dataclass(frozen=True)
class Runner:
    """A runner by its name, not started."""

    engine: Literal["threads", "ray", "dask"]
    address: str = ""
    """Where the cluster is; empty for one of our own on this machine, and ``slurm`` for workers that SLURM starts."""


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
        show_token()
    for package in ("prefect_ray", "ray") if engine == "ray" else ("prefect_dask", "distributed"):
        imported(package, engine)
    if address == "slurm":
        imported("dask_jobqueue", engine)
    return Runner("ray" if engine == "ray" else "dask", address)


def check_runner_allowed(name: str) -> None:
    """
    Refuse a cluster that the worker does not name: whoever runs one can run code here, and reads the settings of tasks.

    Clusters that are made on this machine are always allowed. Others a person's own command may use, unless the
    variable is set; of a deployment a run may use those that the variable has.

    Raises:
        ConfigurationError: It is another one.
    """
    setting = os.environ.get(ALLOWED_RUNNERS)
    if "://" not in name or (setting is None and deployment.id is None):
        return
    if name not in (allowed := [one.strip() for one in (setting or "").split(",") if one.strip()]):
        raise ConfigurationError(
            f"runner: {printable(name)} is not one that the worker allows "
            f"({ALLOWED_RUNNERS}: {', '.join(map(printable, allowed)) or 'none'}); nothing was connected to"
        )


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
    if runner.engine == "ray":
        start = ray_cluster(runner.address, workers=workers, on_cpus=on_cpus)
    elif runner.address == "slurm":
        start = slurm_cluster(workers=workers or 1, on_cpus=on_cpus)
    else:
        start = dask_cluster(runner.address, workers=workers, on_cpus=on_cpus)
    with start as cluster:
        if cluster.slots < 1:
            raise ConfigurationError(f"the cluster of {runner.engine} has no worker that computes: start some")
        if runner.address and cluster.device_type == "cpu" and not on_cpus:
            get_run_logger().warning(
                "the cluster of %s declares no GPU: its CPUs compute, in %s tasks (--devices cpu asks for that)",
                runner.engine,
                cluster.slots,
            )
        yield cluster
