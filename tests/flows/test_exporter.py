"""What the exporter counts of a Prefect server's runs, and what it serves while the server does not answer."""

from __future__ import annotations

import re
import urllib.request
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows import exporter
from flows.exporter import SERVER_METRICS, ServerCollector, ServerSnapshot, samples_of
from tests.fake_nvml import FakeGpu, FakeNvml
from virnucpro.telemetry.metrics.gpu_monitor import HostGpus

NOW = datetime(2026, 11, 24, 12, tzinfo=UTC)
QUEUE = ("virnucpro", "embed")


def run(kind, name=None, *, seconds=0.0, pool="virnucpro", queue="embed", **others):
    """A run that entered this state, or was due, so many seconds ago."""
    since = NOW - timedelta(seconds=seconds)
    return FlowRun(
        flow_id=uuid4(),
        state=State(type=StateType(kind), name=name, timestamp=since),
        next_scheduled_start_time=since if kind == "SCHEDULED" else None,
        work_pool_name=pool,
        work_queue_name=queue,
        **others,
    )


def counted(active=(), ended=(), queues=None):
    """Metric -> labels -> value, without zeros."""
    snapshot = ServerSnapshot(
        NOW, {"virnucpro": 2}, {QUEUE: (True, False)} if queues is None else queues, active, ended
    )
    found = {metric.name: values for metric, values in samples_of(snapshot).items()}
    return {name: {labels: value for labels, value in values.items() if value} for name, values in found.items()}


def test_runs_are_counted_by_queue_and_state_with_the_longest_of_each():
    found = counted(
        [
            run("SCHEDULED", "Scheduled", seconds=5),
            run("SCHEDULED", "Late", seconds=600),
            run("SCHEDULED", "Late", seconds=60),
            run("SCHEDULED", "AwaitingRetry", seconds=1),
            run("PENDING", "Pending", seconds=30),
            run("RUNNING", "Running", seconds=9000, run_count=2),
            run("CANCELLING", "Cancelling", seconds=7),
            run("PAUSED", "Suspended", seconds=8),
            run("RUNNING", "Running", seconds=3, pool=None, queue=None),
        ],
        [run("COMPLETED", "Partial", run_count=1), run("CRASHED", "Crashed", run_count=3), run("FAILED", "TimedOut")],
    )
    of_embed = {labels[2]: value for labels, value in found["virnucpro_flow_runs"].items() if labels[:2] == QUEUE}
    assert of_embed == {
        "scheduled": 1,
        "late": 2,
        "retrying": 1,
        "pending": 1,
        "running": 1,
        "cancelling": 1,
        "paused": 1,
    }
    assert found["virnucpro_flow_runs"]["", "", "running"] == 1
    longest = found["virnucpro_flow_run_longest_seconds"]
    assert (longest[*QUEUE, "late"], longest[*QUEUE, "running"], longest[*QUEUE, "pending"]) == (600, 9000, 30)
    ended = {labels[2]: value for labels, value in found["virnucpro_flow_runs_ended_1h"].items()}
    assert ended == {"completed": 1, "crashed": 1, "failed": 1}
    assert found["virnucpro_flow_runs_retried_1h"] == {QUEUE: 3}
    assert found["virnucpro_prefect_workers"] == {("virnucpro",): 2}


def test_only_runs_of_a_schedule_that_wait_make_it_late():
    late = {"auto_scheduled": True, "seconds": 100}
    found = counted([run("SCHEDULED", "Late", seconds=900), run("SCHEDULED", "Late", **late), run("RUNNING", **late)])
    assert found["virnucpro_schedule_late_seconds"] == {QUEUE: 100}
    assert counted([run("SCHEDULED", "Late", seconds=900)])["virnucpro_schedule_late_seconds"] == {}


def test_every_queue_has_every_state_with_or_without_runs():
    snapshot = ServerSnapshot(NOW, {}, {QUEUE: (False, True)}, [], [])
    found = {metric.name: values for metric, values in samples_of(snapshot).items()}
    assert set(found) == {metric.name for metric in SERVER_METRICS}
    states = {labels[2] for labels in found["virnucpro_flow_runs"]}
    assert states == set(exporter.STATES)
    assert set(found["virnucpro_flow_runs"].values()) == {0.0}
    assert found["virnucpro_queue_has_worker"] == {QUEUE: 0.0}
    assert found["virnucpro_queue_paused"] == {QUEUE: 1.0}
    for metric, values in samples_of(snapshot).items():
        assert all(len(labels) == len(metric.labels) for labels in values)


def test_while_the_server_does_not_answer_there_is_only_that_and_it_is_said_once(capsys):
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        collector = ServerCollector()
        for _ in range(2):
            collector._read_s = -exporter.FRESH_S
            (family,) = collector.collect()
            assert [(sample.name, sample.value) for sample in family.samples] == [("virnucpro_prefect_up", 0.0)]
    assert capsys.readouterr().err.count("the Prefect server does not answer") == 1


def test_without_an_address_of_the_server_it_does_not_start(capsys):
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        assert exporter.main(["--port", "0"]) == 78
    assert "PREFECT_API_URL" in capsys.readouterr().err


@pytest.fixture
def served(monkeypatch, capsys):
    """What the exporter serves to one scrape, from where, and its exit code; it stops by itself."""
    monkeypatch.setattr(exporter, "HostGpus", lambda: HostGpus(FakeNvml([FakeGpu("GPU-0")])))
    monkeypatch.setattr(exporter.signal, "pthread_sigmask", lambda *_: None)
    found = []

    def ask(_signals):
        (url,) = re.findall(r"http://\S+", capsys.readouterr().err)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=20) as answer:
            found.extend([url, answer.read().decode()])

    monkeypatch.setattr(exporter.signal, "sigwait", ask)
    return lambda *arguments: (exporter.main(["--port", "0", *arguments]), *found)


def test_a_host_without_a_server_serves_its_gpus_alone_to_the_network_that_is_named(served):
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        code, url, text = served("--only", "gpus", "--network", "127.0.0.0/8")
    assert (code, url.startswith("http://127.0.0.1:")) == (0, True)
    assert 'virnucpro_host_gpu_lost{device="0"' in text
    assert "virnucpro_prefect_up" not in text


@pytest.mark.parametrize(("only", "has_gpus"), [((), True), (("--only", "server"), False)])
def test_beside_the_server_it_serves_the_counts_with_the_gpus_or_without(served, monkeypatch, only, has_gpus):
    monkeypatch.setattr(exporter, "get_client", lambda **_: 1 / 0)  # the scrape's thread has not this test's settings
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        code, _, text = served(*only)
    assert code == 0
    assert "\nvirnucpro_prefect_up 0.0" in text
    assert ("virnucpro_host_gpu_lost{" in text) == has_gpus


@pytest.mark.parametrize(
    ("network", "code", "why"),
    [
        ("10.1.0.0/40", 78, "metrics network is 10.1.0.0/40: give an IPv4 network such as 10.1.0.0/16, or an address"),
        ("203.0.113.0/24", 75, "this host has no address in 203.0.113.0/24"),
    ],
)
def test_a_network_that_is_none_or_that_the_host_is_not_in_is_refused(served, capsys, network, code, why):
    assert served("--only", "gpus", "--network", network) == (code,)
    assert why in capsys.readouterr().err
