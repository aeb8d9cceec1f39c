"""
A server, its worker and a run without any setting for metrics, watched by a Prometheus with the settings that we ship.

Only ports, the password's file and the intervals are this test's. The run is real: the hash model, with a sequence that
cannot be computed and one that kills its process, so that the panels of failures have something to show.
"""

from __future__ import annotations

import json
import re
import socket
import sys
import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest
import yaml

from flows.run.metrics_by_default import MACHINE_FOLDER, OWN_FOLDER
from tests import hash_flows
from tests.conftest import REPOSITORY
from tests.dashboard import OBSERVABILITY, panels, substituted
from tests.debian_programs import Prometheus
from tests.debian_programs import started as started_prometheus
from tests.prefect_service import PASSWORD, POOL, started, wait_until
from virnucpro.this_host import host_name

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

INTERVAL = "500ms"
LIMIT_S = 60.0
FAILS, KILLS = "MKVLAAGIT" * 6, "GWWRNDCEQ" * 6
"""Each as long as a block, which it is alone in."""
WATCHED, UNWATCHED = "watched", "unwatched"
"""Queues: with a worker, and without."""


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@contextmanager
def exporter(service, folder, program=("-m", "flows.exporter"), **more):
    """The program as its unit starts it, with the server's own variable and *more*; yield its port."""
    port, log = free_port(), folder / "exporter.log"
    environ = {name: value for name, value in service.environ.items() if name != "PREFECT_API_AUTH_STRING"}
    environ |= {"PREFECT_SERVER_API_AUTH_STRING": PASSWORD, **more}
    command = [sys.executable, *program, "--port", str(port)]
    with started(command, log, cwd=REPOSITORY, environ=environ):
        wait_until(lambda: "/metrics" in log.read_text(), limit_s=LIMIT_S, log=log)
        yield port


@contextmanager
def prometheus(service, folder, exporter_port, base=OBSERVABILITY, targets=()):
    """
    A Prometheus with ``prometheus.yml``, whose relative paths mean what they mean in *base*, where it lies.

    *targets* are patterns of the runs' target files, in place of its own.
    """
    user, _, password = PASSWORD.partition(":")
    (folder / "password").write_text(password)
    settings = yaml.safe_load((OBSERVABILITY / "prometheus.yml").read_text())
    settings["global"] = {"scrape_interval": INTERVAL, "evaluation_interval": INTERVAL}
    settings["rule_files"] = [str(base / path) for path in settings["rule_files"]]
    (of_runs,) = settings["scrape_configs"][0]["file_sd_configs"]
    of_runs["files"] = [str(base / path) for path in targets or of_runs["files"]]
    text = json.dumps(settings)
    for shipped, ours in {
        "127.0.0.1:4202": f"127.0.0.1:{exporter_port}",
        "127.0.0.1:4200": service.url.removeprefix("http://"),
        "/etc/prometheus/prefect-password": str(folder / "password"),
        '"username": "virnucpro"': f'"username": "{user}"',
    }.items():
        assert text.count(shipped) == 1, shipped
        text = text.replace(shipped, ours)
    (folder / "prometheus.yml").write_text(text)
    options = ["--config.file=prometheus.yml", "--storage.tsdb.path=data", "--log.level=warn"]
    with started_prometheus("prometheus", *options, folder=folder) as url:
        yield Prometheus(url)


@pytest.fixture(scope="module")
def watched(prefect_server, tmp_path_factory):
    """The server, and the Prometheus that watches it."""
    folder = tmp_path_factory.mktemp("watched")
    with exporter(prefect_server, folder) as port, prometheus(prefect_server, folder, port) as found:
        yield prefect_server, found


@pytest.fixture(scope="module")
def unwatched(watched, tmp_path_factory):
    """The Prometheus, and runs of a queue without a worker: waiting, scheduled, about to start, retried, crashed."""
    from prefect.client.schemas.schedules import IntervalSchedule
    from prefect.states import AwaitingRetry, Crashed, Pending

    service, found = watched
    deployment = service.deploy("tests/hash_flows.py:embed", UNWATCHED, queue=UNWATCHED)
    runs: list = []
    given = {"fasta_files": ["a"], "output_dir": str(tmp_path_factory.mktemp("unwatched"))}
    with service.client() as client:
        for state in (None, AwaitingRetry(), Pending(), Crashed(), Crashed()):
            runs.append(client.create_flow_run_from_deployment(deployment, parameters=given).id)
            if state is not None:
                client.set_flow_run_state(runs[-1], state, force=True)
        day, due = timedelta(days=1), datetime.now(UTC) + timedelta(seconds=8)
        client.create_deployment_schedules(deployment, [(IntervalSchedule(interval=day, anchor_date=due - day), True)])
        yield found
        for run in runs:
            client.delete_flow_run(run)
        client.delete_deployment(deployment)


@contextmanager
def worker(service, folder, queue):
    """A worker of one queue; nothing about metrics is set."""
    assert not [name for name in service.environ if name.startswith("VIRNUCPRO_")]
    log = folder / "worker.log"
    command = [sys.executable, "-m", "flows.worker", "--pool", POOL, "--work-queue", queue]
    environ = {**service.environ, "VIRNUCPRO_DATA_ROOTS": str(folder)}
    with started(command, log, cwd=REPOSITORY, environ=environ):
        wait_until(lambda: " started!" in log.read_text(), limit_s=LIMIT_S, log=log)
        yield log


OF_CONTIGS = "virnucpro_contigs_", "virnucpro_nucleotides_", "virnucpro_worker_nucleotides_"
OF_GPU_WORKERS = "virnucpro_worker_gpu_", "virnucpro_peak_gpu_"
ELSEWHERE = "virnucpro_gpu_", "virnucpro_host_gpu_", *OF_GPU_WORKERS, *OF_CONTIGS
"""Metrics that a run which embeds on processors has not: those of GPUs, and of workers on contigs."""


def questions():
    """Every question of the dashboard that a run which embeds on processors answers."""
    asked = {target["expr"] for panel in panels() for target in panel.get("targets", [])}
    return {expr for expr in asked if not any(name in expr for name in ELSEWHERE)}


def pending(found, alert):
    return {dict(labels).get("queue") for labels in found.vector(f'ALERTS{{alertname="{alert}"}}')}


def proteins(count):
    """Sequences of the hash model's letters, all different, two of them as the plan names them, one of them twice."""
    letters = "ACDEFGHIKLMNPQRSTVWY"
    made = ["M" + letters[i % 20] + letters[i // 20] + letters[: 5 + i % 5] for i in range(count)]
    return [*made, made[0], FAILS, KILLS]


def test_a_run_without_any_setting_is_found_and_answers_every_question_of_the_dashboard(watched, unwatched, tmp_path):
    service, found = watched
    control = hash_flows.control_file(tmp_path / "plan.json", slow_s=0.2, poison={FAILS: "raise", KILLS: "sigkill"})
    fasta = tmp_path / "in.fasta"
    fasta.write_text("".join(f">p{i}\n{sequence}\n" for i, sequence in enumerate(proteins(40))))
    deployment = service.deploy(
        "tests/hash_flows.py:embed", "watched", queue=WATCHED, **{hash_flows.VARIABLE: str(control)}
    )
    given = {"fasta_files": [str(fasta)], "output_dir": str(tmp_path / "out"), "result": {"allow_partial": True}}
    run = service.start(deployment, **given, hardware={"devices": "cpu", "workers": 2})
    wait_until(lambda: WATCHED in pending(found, "VirnucproQueueWithoutWorker"), limit_s=LIMIT_S)

    info = f'virnucpro_run_info{{flow_run="{run}"}}'
    with worker(service, tmp_path, WATCHED) as log:
        wait_until(lambda: found.vector(info), limit_s=LIMIT_S, log=log, interval_s=0.3)
        labels = dict(next(iter(found.vector(info))))
        chosen = {"run_id": labels["run_id"], "model": ".+", "host": ".+", "device": ".+", "__rate_interval": "2s"}
        files = [path for folder in (MACHINE_FOLDER, OWN_FOLDER) for path in folder.glob(f"*-{labels['run_id']}.json")]
        assert len(files) == 1
        assert labels["deployment"] == "embed/watched"
        unanswered = {substituted(expr, **chosen): expr for expr in questions()}
        while unanswered and service.flow_run(run).state.name in {"Running", "Pending"}:
            unanswered = {asked: expr for asked, expr in unanswered.items() if not found.vector(asked)}
            time.sleep(0.2)
        assert set(unanswered.values()) == set()
        ended = service.wait_for_state(run, "Partial", "Completed", "Failed", limit_s=LIMIT_S)
        assert ended.state.name == "Partial", log.read_text()[-3000:]
        assert not files[0].exists()
        wait_until(lambda: "Finished in state Partial(" in log.read_text(), limit_s=LIMIT_S, log=log)
        check_logs(tmp_path / "out", log.read_text(), labels)
    assert WATCHED not in pending(found, "VirnucproQueueWithoutWorker")
    assert found.number('up{job="prefect"}') == found.number('up{job="virnucpro-prefect"}') == 1


def check_logs(out, said, labels):
    """Lines of the workers' files and of the journal lead to the run's metrics."""
    shared = {"host": host_name(), **{name: labels[name] for name in ("run_id", "flow_run", "deployment")}}
    for path in (out / "logs").glob("worker_*.log"):
        for line in path.read_text().splitlines():
            assert json.loads(line).items() >= shared.items()
    (began,) = re.findall(r"run\.began (.+)", said)
    assert dict(pair.split("=") for pair in began.split()) == shared
    assert re.search(rf"Flow run '.+' flow_run={labels['flow_run']} - Finished in state", said)
    assert re.search(rf"Task run '.+' flow_run={labels['flow_run']} - ", said)


def test_the_server_counts_what_waits_is_late_crashed_and_is_retried(unwatched):
    def of_queue(metric, label="state"):
        vector = unwatched.vector(f'{metric}{{pool="{POOL}", queue="{UNWATCHED}"}}')
        return {dict(labels).get(label, ""): value for labels, value in vector.items() if value}

    wait_until(lambda: of_queue("virnucpro_schedule_late_seconds"), limit_s=LIMIT_S)
    wait_until(lambda: of_queue("virnucpro_flow_runs").get("late"), limit_s=LIMIT_S)
    counted = of_queue("virnucpro_flow_runs")
    assert counted.pop("late") + counted.pop("scheduled", 0) == 2
    assert counted == {"retrying": 1, "pending": 1}
    assert of_queue("virnucpro_flow_runs_ended_1h") == {"crashed": 2}
    assert of_queue("virnucpro_flow_runs_retried_1h") == {"": 1}
    assert of_queue("virnucpro_flow_run_longest_seconds").keys() >= {"late", "pending"}
    assert not of_queue("virnucpro_queue_has_worker")
    assert UNWATCHED in pending(unwatched, "VirnucproQueueWithoutWorker")
