"""
The embedding of a run on a cluster: one task a device, each of which claims its work in the shared folder.

The driver prepares the run, checks on every host that it sees the same input and folder, submits the tasks, and waits
until all units are done; tasks need no message from it. The engine starts a task again whose host died. One that could
not take part is logged and submitted again a little later, and the others do its work meanwhile.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import copy_context
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture  # noqa: TC002
from prefect.logging import get_run_logger
from prefect.runtime import task_run
from prefect.settings import PREFECT_API_URL

from flows.clusters.api_reach import check_api_reached
from flows.clusters.cluster import NOTICE_S, Cluster
from flows.clusters.cluster_result import result_on_hosts
from flows.run.telemetry import log_level
from virnucpro.config import RunLimits
from virnucpro.errors import VirNucProError, printable
from virnucpro.pipeline.executor import Executor
from virnucpro.pipeline.failures import FailureClass
from virnucpro.pipeline.hosts.device_task import DeviceOutcome, probe_device_here, run_device_task
from virnucpro.pipeline.hosts.host_check import check_host, hashing_s
from virnucpro.pipeline.hosts.host_run import HostRun
from virnucpro.pipeline.hosts.result_passes import ResultPasses
from virnucpro.pipeline.plan.budget_probe import DeviceProbe
from virnucpro.pipeline.run.run_completion import Reasons
from virnucpro.pipeline.run.run_preparation import PreparedRun
from virnucpro.telemetry.embedding_telemetry import EmbeddingTelemetry
from virnucpro.telemetry.log_lines import log_sentence
from virnucpro.telemetry.metrics.options import HostMetricsOptions
from virnucpro.telemetry.ranks import Rank
from virnucpro.this_host import host_name

PROBE_S = 900.0
"""Seconds that each host has to probe one of its GPUs; it may have to fetch the weights first."""
ANSWER_S = 30.0
"""Seconds that the hosts have to answer whether they can take part, beside those of hashing the input."""
LOOK_S = 0.5
"""Seconds between two looks at the tasks."""
LATER_S = (10.0, 60.0)
"""Seconds until a lost task is submitted again: the first time, and every time after it. A folder that is away comes
back within a minute, or needs an operator."""
LEAVE_S = 60.0
"""Seconds that tasks have to end once there is nothing left to do; those with a heartbeat (they seal, which takes
minutes where there are many rows) have as long as they need."""


def _name() -> str:
    return f"embed_on_host {task_run.parameters['rank']}"


@task(name="embed_on_host", task_run_name=_name, cache_policy=NO_CACHE, persist_result=False)
def embed_on_host(run: PreparedRun, rank: int, limits: RunLimits, metrics: HostMetricsOptions | None) -> DeviceOutcome:
    """Take part in the run with one device of this host, until everything is done."""
    logger = get_run_logger()
    context = copy_context()  # other threads have none: Prefect would start a server of its own here for their lines

    def on_message(rank: int, message: dict[str, Any]) -> None:
        if message.get("kind") == "log":
            line = "host %s, rank %s: %s", host_name(), rank, log_sentence(message)
            context.copy().run(logger.log, log_level(message["level"]), *line)

    outcome = run_device_task(run, rank, limits=limits, task=str(task_run.id), metrics=metrics, on_message=on_message)
    logger.info(
        "host %s, %s: %s sequences computed, %s",
        outcome.host,
        outcome.rank.device,
        outcome.rank.sequences,
        outcome.rank.state,
    )
    return outcome


class OnCluster(Executor):
    """
    One task a device of a cluster.

    Args:
        cluster: Started.
        metrics: Returns where each host serves what only it knows of the run; None for nowhere.
    """

    is_here = False
    _run: PreparedRun
    _limits: RunLimits

    def __init__(self, cluster: Cluster, metrics: Callable[[], HostMetricsOptions | None]) -> None:
        self._cluster = cluster
        self._metrics_options = metrics
        self._metrics: HostMetricsOptions | None = None
        self._host_run: HostRun | None = None
        self._running: dict[int, PrefectFuture[Any]] = {}
        self._starts: Counter[int] = Counter()
        """Rank -> times that its task was submitted."""
        self._later: dict[int, float] = {}
        """Rank of a lost task -> when it is submitted again."""
        self._problems: dict[int, VirNucProError] = {}
        """Rank -> what its task was lost by first, until it has taken part."""
        self._is_ending = False
        self._all_done = False

    def probe(self, run_id: str) -> Callable[..., list[DeviceProbe]]:
        """See ``Executor.probe``: each host probes one of its GPUs."""

        def probe(*args: Any) -> list[DeviceProbe]:
            def here() -> list[DeviceProbe]:
                return probe_device_here(*args, run_id=run_id)

            return [
                found for of_host in self._cluster.on_a_gpu_of_every_host(here, timeout_s=PROBE_S) for found in of_host
            ]

        return probe

    def embed(self, run: PreparedRun, limits: RunLimits, telemetry: EmbeddingTelemetry, stop: threading.Event) -> None:
        """
        Embed what is left of the run; when it is interrupted, every task is stopped.

        Raises:
            HostCheckError: A host does not see the input or the folder that the run has; nothing was embedded.
            ConfigurationError: A host does not answer, or does not reach the Prefect API.
            ClusterLostError: The cluster's scheduler is gone.
            VirNucProError: No task could take part.
        """
        del stop  # in a flow, a run is interrupted by an error
        self._run, self._limits, self._metrics = run, limits, self._metrics_options()
        self._host_run = HostRun(run, telemetry)
        with self._hosts:
            if url := PREFECT_API_URL.value():
                self._cluster.on_every_host(check_api_reached, url, timeout_s=ANSWER_S)
            limit_s = ANSWER_S + hashing_s(self._run)
            hosts = self._cluster.on_every_host(check_host, self._run, "check", timeout_s=limit_s)
            self._warn_of_unserved(hosts)
            for rank in range(self._run.world_size):
                self._submit(rank)
            say_s: float | None = time.monotonic() + NOTICE_S
            try:
                while (self._running or self._later) and not self._is_done():
                    self._cluster.look()
                    self._take_ended()
                    self._submit_again()
                    if say_s is not None and time.monotonic() > say_s:
                        say_s = None
                        self._say_if_waiting()
                    time.sleep(LOOK_S)
            except BaseException:
                get_run_logger().warning("stopping: workers end at their next batch boundary")
                self._hosts.stop()
                raise
            finally:
                self._let_end()
        if self._problems and len(self._problems) == self._run.world_size:
            raise next(iter(self._problems.values()))

    def outcomes(self) -> list[Rank]:
        """See ``Executor.outcomes``."""
        return [] if self._host_run is None else self._host_run.outcomes

    def reasons(self) -> Reasons:
        """See ``Executor.reasons``."""
        return self._hosts.excuses()

    def result_passes(self, run: PreparedRun) -> AbstractContextManager[ResultPasses | None]:
        """See ``Executor.result_passes``."""
        return result_on_hosts(self._cluster, run)

    @property
    def _hosts(self) -> HostRun:
        assert self._host_run is not None
        return self._host_run

    def _submit(self, rank: int) -> None:
        parameters = {"run": self._run, "rank": rank, "limits": self._limits, "metrics": self._metrics}
        self._starts[rank] += 1
        self._running[rank] = self._cluster.submit(embed_on_host, parameters)

    def _submit_again(self) -> None:
        """Submit the lost tasks whose time has come."""
        for rank in [rank for rank, due_s in self._later.items() if due_s <= time.monotonic()]:
            del self._later[rank]
            self._submit(rank)

    def _say_if_waiting(self) -> None:
        if self._running and not self._hosts.ranks_at_work():
            get_run_logger().warning(
                "waiting for a slot of the cluster: no task of this run computes yet (other runs have all slots, or "
                "hosts are still getting ready)"
            )

    def _warn_of_unserved(self, hosts: list[str]) -> None:
        others = sorted(set(hosts) - {host_name()})
        if self._metrics is not None and not self._metrics.network and others:
            get_run_logger().warning(
                "metrics of GPUs and processes are not served on %s: give the network that Prometheus asks from, as in "
                "--metrics-network 10.1.0.0/16",
                printable(", ".join(others)),
            )

    def _let_end(self) -> None:
        """Wait until the tasks have ended; those that never began are taken back."""
        self._is_ending = True
        deadline_s = time.monotonic() + LEAVE_S
        waiting: set[int] = set()
        while self._running and self._cluster.is_there() and (time.monotonic() < deadline_s or self._some_seal()):
            self._take_ended()
            not_begun = {rank for rank, future in self._running.items() if not self._cluster.has_begun(future)}
            for rank in not_begun & waiting:  # at the second look: one that has just ended is not running either
                self._cluster.drop(self._running.pop(rank))
                self._hosts.take_unused(rank)
            waiting = not_begun
            time.sleep(LOOK_S)
        if self._cluster.is_there():
            for rank, future in self._running.items():
                self._cluster.drop(future)
                if self._all_done:
                    self._hosts.take_unused(rank)

    def _is_done(self) -> bool:
        self._all_done = self._hosts.is_done()
        return self._all_done

    def _some_seal(self) -> bool:
        """Whether all is computed, and a task that has not ended is at work still."""
        return self._all_done and bool(self._hosts.ranks_at_work() & self._running.keys())

    def _take_ended(self) -> None:
        """Take in how tasks went that have ended since the last look."""
        for rank, future in list(self._running.items()):
            if not self._cluster.has_ended(future):
                continue
            found = self._cluster.result(future)
            if isinstance(found, DeviceOutcome):
                del self._running[rank]
                self._take(rank, found)
            elif self._cluster.is_there():  # else all tasks have ended with it
                del self._running[rank]
                self._take_lost(rank, found)

    def _take(self, rank: int, outcome: DeviceOutcome) -> None:
        self._hosts.take(outcome)
        self._problems.pop(rank, None)
        if outcome.rank.state == "stopped":  # unless we are ending, it missed the driver's heartbeat
            again_s = self._again_s(rank)
            if again_s is not None:
                get_run_logger().warning("task %s stopped by itself: it is submitted again in %g s", rank, again_s)

    def _take_lost(self, rank: int, found: Any) -> None:
        reason = str(found) or type(found).__name__
        again_s = self._again_s(rank)
        then = "" if again_s is None else f"; it is submitted again in {again_s:g} s"
        get_run_logger().warning("task %s did not take part: %s%s", rank, reason, then)
        failure = FailureClass.DIED
        if isinstance(found, VirNucProError):
            self._problems.setdefault(rank, found)
            failure = FailureClass.CONFIGURATION
        self._hosts.take_lost(rank, reason, failure=failure, starts_again=again_s is not None)

    def _again_s(self, rank: int) -> float | None:
        """Note that a lost task starts again; return the seconds until then, or None where it does not."""
        starts = self._starts[rank]
        if self._is_ending or starts >= self._limits.attempts:
            return None
        again_s = LATER_S[min(starts, len(LATER_S)) - 1]
        self._later[rank] = time.monotonic() + again_s
        return again_s
