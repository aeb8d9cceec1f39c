"""
The result of many files of a run on a cluster: its hosts check, write and validate its files, with the driver.

One task a slot, as for the embedding. A task that finds no slot in time, or fails, costs only time: the driver does
what no task does.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture
from prefect.logging import get_run_logger
from prefect.runtime import task_run

from flows.clusters.cluster import Cluster
from virnucpro.errors import printable
from virnucpro.pipeline.hosts.result_passes import ResultPasses, help_with_result
from virnucpro.pipeline.run.run_preparation import PreparedRun
from virnucpro.store.results.forms import FORMS
from virnucpro.this_host import host_name

LOOK_S = 0.2
"""Seconds between checks whether the tasks have ended."""
LEAVE_S = 10.0
"""Seconds that tasks have to end once the result is whole; they look every second."""


def _name() -> str:
    return f"write_result_on_host {task_run.parameters['rank']}"


@task(name="write_result_on_host", task_run_name=_name, cache_policy=NO_CACHE, persist_result=False)
def write_result_on_host(run: PreparedRun, rank: int) -> int:
    """Take part in making the result until it is whole; returns the number of files checked or written."""
    num_done = help_with_result(run)
    get_run_logger().info(
        "host %s, task %s: %s files of the result checked, written or validated", host_name(), rank, num_done
    )
    return num_done


@contextmanager
def result_on_hosts(cluster: Cluster, run: PreparedRun) -> Iterator[ResultPasses | None]:
    """
    Have the hosts of *cluster* take part in the result of *run* while the block runs.

    Yields:
        Their passes, or None where the result is one file, which has one writer.

    Raises:
        OutputError: The folder cannot be written.
    """
    if not FORMS[run.result_form].has_many_files:
        yield None
        return
    with ResultPasses(run) as passes:
        tasks = _submitted(cluster, run)
        try:
            yield passes
        finally:
            passes.end()
            _let_end(cluster, tasks)


def _submitted(cluster: Cluster, run: PreparedRun) -> list[PrefectFuture[Any]]:
    try:
        return [cluster.submit(write_result_on_host, {"run": run, "rank": rank}) for rank in range(run.world_size)]
    except Exception as error:  # noqa: BLE001  # whatever the engine has, the result can be written without it
        get_run_logger().warning("the result is put together here alone: %s", printable(str(error)))
        return []


def _let_end(cluster: Cluster, tasks: list[PrefectFuture[Any]]) -> None:
    """Wait for the tasks, which see that the result is there, and drop those that never began."""
    deadline_s = time.monotonic() + LEAVE_S
    while cluster.is_there():
        begun = [one for one in tasks if cluster.has_begun(one) or cluster.has_ended(one)]
        if all(cluster.has_ended(one) for one in begun) or time.monotonic() > deadline_s:
            break
        time.sleep(LOOK_S)
    for one in tasks if cluster.is_there() else ():
        if not cluster.has_ended(one):
            cluster.drop(one)
        elif isinstance(found := cluster.result(one), BaseException):
            get_run_logger().warning("a task took no part in the result: %s", printable(str(found)))
