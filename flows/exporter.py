"""
Serves, for Prometheus, counts of flow runs, queues and workers, and this host's GPUs: ``python -m flows.exporter``.

One process beside the Prefect server, and one with ``--only gpus`` on each further host with GPUs.

Prefect's own metrics are about its connections and its process, not about runs. Each scrape reads the server's API, and
no label names a run. While the server does not answer, ``virnucpro_prefect_up 0`` is all there is of it. All GPUs of
the host are sampled, whether or not a run is there; without NVIDIA's driver there are no metrics of GPUs.
"""

import argparse
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count, product
from typing import Any

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, WorkerFilter
from prefect.client.schemas.objects import TERMINAL_STATES, FlowRun, StateType
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from virnucpro.errors import ConfigurationError
from virnucpro.telemetry.metrics.exposition import METRICS_PATH, MetricsServer, own_address
from virnucpro.telemetry.metrics.gpu_monitor import HostGpus
from virnucpro.telemetry.metrics.options import MetricsOptions
from virnucpro.telemetry.metrics.table import HostCollector
from virnucpro.this_host import terminating_signals

PORT = 4202
"""Beside the server's 4200; 4201 is Prefect's own for metrics of clients."""
REQUEST_TIMEOUT_S = 5.0
"""Seconds for one answer of the API; Prometheus waits ten for all of them."""
FRESH_S = 5.0
"""Seconds for which an answer is given again, so that many readers cost the server no more than one."""
POLLED_S = 60.0
"""Seconds since the last poll within which a queue has a worker, as Prefect itself judges."""
ENDED_WITHIN = timedelta(hours=1)
PAGE = 200
"""Flow runs that the API gives at once."""

_ENDING = {signal.SIGINT, *terminating_signals()}

WAITING = ("scheduled", "late", "retrying")
STATES = (*WAITING, "pending", "running", "cancelling", "paused")
ENDED = ("completed", "failed", "crashed", "cancelled")
QUEUE = ("pool", "queue")
_NAMES = {"Late": "late", "AwaitingRetry": "retrying"}
"""Prefect's name of a scheduled state -> name in metrics."""


@dataclass(frozen=True)
class ServerMetric:
    """A gauge: its name, unit, labels and help."""

    name: str
    unit: str
    labels: tuple[str, ...]
    help: str
    kind = "gauge"


UP = ServerMetric(
    "virnucpro_prefect_up", "0 or 1", (), "1 if the Prefect server answered at this scrape, else 0, without the others."
)
WORKERS = ServerMetric(
    "virnucpro_prefect_workers", "workers", ("pool",), "Workers that the server calls online: they sent heartbeats."
)
HAS_WORKER = ServerMetric(
    "virnucpro_queue_has_worker", "0 or 1", QUEUE, "1 if a worker has asked for runs of the queue within a minute."
)
IS_PAUSED = ServerMetric("virnucpro_queue_paused", "0 or 1", QUEUE, "1 if the queue, or its pool, is paused.")
RUNS = ServerMetric(
    "virnucpro_flow_runs",
    "runs",
    (*QUEUE, "state"),
    f"Flow runs that are due and have not ended, by state: {', '.join(STATES)}.",
)
LONGEST = ServerMetric(
    "virnucpro_flow_run_longest_seconds",
    "seconds",
    (*QUEUE, "state"),
    "Seconds of the run that has been in this state longest, a waiting one since it was due; 0 without a run.",
)
SCHEDULE_LATE = ServerMetric(
    "virnucpro_schedule_late_seconds",
    "seconds",
    QUEUE,
    "Seconds since the first run that waits here was due by a schedule; 0 without one.",
)
ENDED_RUNS = ServerMetric(
    "virnucpro_flow_runs_ended_1h",
    "runs",
    (*QUEUE, "state"),
    f"Flow runs that ended within an hour: {', '.join(ENDED)}.",
)
RETRIED = ServerMetric(
    "virnucpro_flow_runs_retried_1h",
    "runs",
    QUEUE,
    "Flow runs that run, wait for a retry or ended within an hour, and were started more than once.",
)
SERVER_METRICS = (UP, WORKERS, HAS_WORKER, IS_PAUSED, RUNS, LONGEST, SCHEDULE_LATE, ENDED_RUNS, RETRIED)


@dataclass(frozen=True)
class ServerSnapshot:
    now: datetime
    workers: Mapping[str, int]
    """Pool -> workers online."""
    queues: Mapping[tuple[str, str], tuple[bool, bool]]
    """(Pool, queue) -> whether it has a worker, whether it is paused."""
    active: Sequence[FlowRun]
    """Runs that are due and have not ended."""
    ended: Sequence[FlowRun]
    """Runs that ended within ``ENDED_WITHIN``."""


def read_server(client: SyncPrefectClient) -> ServerSnapshot:
    """Return what the API has now; raises an error of Prefect or its HTTP client where it does not answer."""
    now = datetime.now(UTC)
    waits = {StateType.SCHEDULED}

    def runs(types: Iterable[StateType], **asked: object) -> list[FlowRun]:
        of_types = {"type": {"any_": sorted(types)}}
        whole = {"is_null_": True}  # no part of another run
        return _all_runs(
            client, FlowRunFilter.model_validate({"state": of_types, "parent_task_run_id": whole, **asked})
        )

    active = runs(waits, next_scheduled_start_time={"before_": now}) + runs(set(StateType) - TERMINAL_STATES - waits)
    over = runs(TERMINAL_STATES, end_time={"after_": now - ENDED_WITHIN})
    online = WorkerFilter.model_validate({"status": {"any_": ["ONLINE"]}})
    workers, queues = {}, {}
    for pool in client.read_work_pools():
        workers[pool.name] = len(client.read_workers_for_work_pool(pool.name, online))
        for queue in client.read_work_queues(pool.name):
            polled = queue.last_polled
            has_worker = polled is not None and (now - polled).total_seconds() <= POLLED_S
            queues[pool.name, queue.name] = has_worker, queue.is_paused or pool.is_paused
    return ServerSnapshot(now, workers, queues, active, over)


def _all_runs(client: SyncPrefectClient, asked: FlowRunFilter) -> list[FlowRun]:
    found: list[FlowRun] = []
    for number in count():
        page = client.read_flow_runs(flow_run_filter=asked, limit=PAGE, offset=number * PAGE)
        found += page
        if len(page) < PAGE:
            return list({run.id: run for run in found}.values())  # one may move between two pages
    raise AssertionError


class ServerCollector(Collector):
    """Gives the metrics of a Prefect server, read anew unless that was done just now."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read_s = -FRESH_S
        self._families: list[GaugeMetricFamily] = []
        self._answers = True
        self._settings: dict[Any, Any] = {PREFECT_CLIENT_MAX_RETRIES: 0}
        if password := os.environ.get("PREFECT_SERVER_API_AUTH_STRING"):  # in the server's own file of settings
            self._settings[PREFECT_API_AUTH_STRING] = password

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Return nothing: the server is not queried before a scrape."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield every metric; ``virnucpro_prefect_up`` alone if the server does not answer."""
        with self._lock:
            if time.monotonic() - self._read_s >= FRESH_S:
                self._families = list(self._read())
                self._read_s = time.monotonic()
            yield from self._families

    def _read(self) -> Iterator[GaugeMetricFamily]:
        try:
            with (
                temporary_settings(self._settings),
                get_client(httpx_settings={"timeout": REQUEST_TIMEOUT_S}, sync_client=True) as client,
            ):
                snapshot = read_server(client)
        except Exception as error:  # noqa: BLE001  whatever it is, the next scrape asks again
            if self._answers:
                _say(f"the Prefect server does not answer: {error or repr(error)}")
            self._answers = False
            yield _family(UP, {(): 0.0})
            return
        self._answers = True
        for metric, samples in samples_of(snapshot).items():
            yield _family(metric, samples)


def samples_of(snapshot: ServerSnapshot) -> dict[ServerMetric, dict[tuple[str, ...], float]]:
    """Return metric -> values of its labels -> value; every queue has every state."""
    runs: Counter[tuple[str, ...]] = Counter()
    ended: Counter[tuple[str, ...]] = Counter()
    retried: Counter[tuple[str, ...]] = Counter()
    longest: dict[tuple[str, ...], float] = {}
    late: dict[tuple[str, ...], float] = {}
    for run in snapshot.active:
        queue, state = _queue_of(run), _state_of(run)
        runs[*queue, state] += 1
        retried[queue] += _was_retried(run)
        since = run.next_scheduled_start_time if state in WAITING else run.state.timestamp if run.state else None
        seconds = max(0.0, (snapshot.now - since).total_seconds()) if since is not None else 0.0
        longest[*queue, state] = max(longest.get((*queue, state), 0.0), seconds)
        if run.auto_scheduled and state in {"scheduled", "late"}:
            late[queue] = max(late.get(queue, 0.0), seconds)
    for run in snapshot.ended:
        ended[*_queue_of(run), _state_of(run)] += 1
        retried[_queue_of(run)] += _was_retried(run)
    queues = sorted({*snapshot.queues, *map(_queue_of, [*snapshot.active, *snapshot.ended])})
    by_state = [(*queue, state) for queue, state in product(queues, STATES)]
    return {
        UP: {(): 1.0},
        WORKERS: {(pool,): float(number) for pool, number in snapshot.workers.items()},
        HAS_WORKER: {queue: float(has_worker) for queue, (has_worker, _) in snapshot.queues.items()},
        IS_PAUSED: {queue: float(is_paused) for queue, (_, is_paused) in snapshot.queues.items()},
        RUNS: {labels: float(runs[labels]) for labels in by_state},
        LONGEST: {labels: longest.get(labels, 0.0) for labels in by_state},
        SCHEDULE_LATE: {queue: late.get(queue, 0.0) for queue in queues},
        ENDED_RUNS: {(*queue, state): float(ended[*queue, state]) for queue, state in product(queues, ENDED)},
        RETRIED: {queue: float(retried[queue]) for queue in queues},
    }


def _queue_of(run: FlowRun) -> tuple[str, str]:
    """Return pool and queue of a run; both are empty for one that no worker starts."""
    return run.work_pool_name or "", run.work_queue_name or ""


def _state_of(run: FlowRun) -> str:
    if run.state is None:
        return "pending"
    kind = run.state.type.value.lower()
    return _NAMES.get(run.state.name or "", "scheduled") if kind == "scheduled" else kind


def _was_retried(run: FlowRun) -> bool:
    """Whether it was started more than once, or is about to be."""
    return run.run_count > 1 or _state_of(run) == "retrying"


def _family(metric: ServerMetric, samples: Mapping[tuple[str, ...], float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
    for labels, value in samples.items():
        family.add_metric(labels, value)
    return family


def _say(text: str) -> None:
    with suppress(OSError):
        sys.stderr.write(f"flows.exporter: {text}\n")
        sys.stderr.flush()


def main(arguments: Sequence[str]) -> int:
    """Serve until SIGTERM or Ctrl-C; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.exporter",
        description="Serves, for Prometheus, counts of the Prefect server's flow runs, and the GPUs of this host.",
    )
    parser.add_argument("--port", type=int, default=PORT, help=f"{PORT} by default, 0 takes a free one")
    parser.add_argument(
        "--network",
        default="",
        help="serve to this IPv4 network, as in 10.1.0.0/16, by the address of this host in it: everyone there can "
        "read the metrics (default: 127.0.0.1)",
    )
    parser.add_argument(
        "--only", choices=("gpus", "server"), help="gpus: where another host's exporter serves the counts of runs"
    )
    asked = parser.parse_args(arguments)
    if asked.only != "gpus" and not PREFECT_API_URL.value():
        _say("PREFECT_API_URL is not set")
        return 78
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # in the server's threads as well
    registry = CollectorRegistry()
    if asked.only != "gpus":
        registry.register(ServerCollector())
    if asked.only != "server":
        registry.register(HostCollector(HostGpus().samples))
    try:
        options = MetricsOptions(port=asked.port, network=asked.network)
        server = MetricsServer(registry, asked.port, own_address(options.network))
        port = server.start()
    except ConfigurationError as error:
        _say(str(error))
        return 78
    except OSError as error:
        _say(f"port {asked.port}: {error.strerror or error}")
        return 75
    _say(f"http://{server.address}:{port}{METRICS_PATH}")
    signal.sigwait(_ENDING)
    server.stop()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
