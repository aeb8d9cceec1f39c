"""What the exporter counts of a Prefect server's runs, and what it serves while the server does not answer."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import uuid4

from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows import exporter
from flows.exporter import SERVER_METRICS, ServerCollector, ServerSnapshot, samples_of

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
