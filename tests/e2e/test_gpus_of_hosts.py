"""
Eight GPUs (which are none) of a host with a Prefect server, watched by a Prometheus with the settings that we ship.

A run computes on all of them, and another waits; then one GPU is idle, and one falls off the bus. Only the windows of
the alerts about GPUs are shorter than ours, so that the test sees them end.
"""

from __future__ import annotations

import random
import time
from contextlib import ExitStack

import pynvml
import pytest
import yaml
from prefect.client.schemas.objects import StateType

from tests import fake_gpus, hash_flows
from tests.dashboard import OBSERVABILITY, panels, substituted
from tests.e2e.test_prefect_in_prometheus import OF_CONTIGS, exporter, prometheus, worker
from tests.faults.processes import make_proteins
from tests.prefect_service import POOL, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]

GPUS = 8
BUSY = {"utilization_percent": 93, "memory_used_bytes": 60 << 30, "memory_total_bytes": 80 << 30, "lost": False}
SLOWED = {"reasons": pynvml.nvmlClocksEventReasonSwPowerCap}
NOTHING_TO_DO, FALLEN_OFF = {"utilization_percent": 1}, {"lost": True}
IDLE, LOST = 6, 7
QUEUE = "gpu-eight"
LIMIT_S = 120.0
START = f"""
import sys
from tests import fake_gpus
fake_gpus.let_the_driver_tell({GPUS})
from flows import exporter
raise SystemExit(exporter.main(sys.argv[1:]))
"""
FAILURES = "virnucpro_failed_", "virnucpro_quarantined_", "virnucpro_worker_restarts_", "== 0)"
"""In questions that only a run with failures, or workers that are down, answer: ``test_prefect_in_prometheus``."""


def with_short_windows(folder):
    """Copy the rules, with windows of seconds in those about GPUs; return the folder that they are in."""
    (folder / "rules").mkdir()
    for path in (OBSERVABILITY / "rules").glob("*.yml"):
        rules = yaml.safe_load(path.read_text())
        for rule in (rule for group in rules["groups"] for rule in group["rules"] if "_gpu_" in rule["expr"]):
            rule["expr"] = rule["expr"].replace("[5m]", "[3s]")
            if "for" in rule:
                rule["for"] = "1s"
        (folder / "rules" / path.name).write_text(yaml.safe_dump(rules))
    return folder


def wait_for_alerts(found, expected):
    """Wait until these and no others are there, not even pending; this machine's disk may be full."""
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        alerts = map(dict, found.vector('ALERTS{alertname!="VirnucproDiskNearlyFull"}'))
        seen = {(alert["alertname"], alert["alertstate"], alert.get("device", "")) for alert in alerts}
        if seen == expected:
            return
        assert time.monotonic() < deadline_s, f"{seen}, not {expected}"
        time.sleep(0.2)


OF_REAL_GPUS = "virnucpro_peak_gpu_"


def questions():
    """Every question of the dashboard but those about contigs, failures, and memory that only a real GPU has."""
    asked = {target["expr"] for panel in panels() for target in panel.get("targets", [])}
    return {expr for expr in asked if not any(name in expr for name in (*OF_CONTIGS, *FAILURES, OF_REAL_GPUS))}


def test_an_idle_and_a_lost_gpu_of_eight_alert_and_nothing_else_does_and_the_dashboard_shows_all(
    prefect_server, tmp_path
):
    service, now, targets = prefect_server, tmp_path / "now.json", tmp_path / "targets"
    targets.mkdir()
    all_busy = dict.fromkeys(range(GPUS), BUSY)
    fake_gpus.set_now(now, all_busy)
    control = hash_flows.control_file(tmp_path / "plan.json", slow_s=0.5)
    make_proteins(tmp_path / "in.fasta", random.Random(1), 2000)
    environ = {
        hash_flows.VARIABLE: str(control),
        fake_gpus.VARIABLE: str(GPUS),
        fake_gpus.NOW: str(now),
        "VIRNUCPRO_LOCK_DIR": str(tmp_path / "locks"),
        "VIRNUCPRO_METRICS_TARGETS": str(targets),
    }
    deployment = service.deploy("tests/hash_flows.py:embed", "eight-gpus", queue=QUEUE, **environ)
    with service.client() as client:
        (queue,) = [one for one in client.read_work_queues(POOL) if one.name == QUEUE]
        client.update_work_queue(queue.id, concurrency_limit=1)
    rules = with_short_windows(tmp_path)
    with worker(service, tmp_path, QUEUE) as log, ExitStack() as watchers:
        runs = [
            service.start(deployment, fasta_files=[str(tmp_path / "in.fasta")], output_dir=str(tmp_path / name))
            for name in ("computes", "waits")
        ]
        port = watchers.enter_context(exporter(service, tmp_path, ("-c", START), **{fake_gpus.NOW: str(now)}))
        found = watchers.enter_context(prometheus(service, tmp_path, port, rules, [f"{targets}/*.json"]))
        info = f'virnucpro_run_info{{flow_run="{runs[0]}"}}'
        wait_until(lambda: found.vector(info), limit_s=LIMIT_S, log=log, interval_s=0.3)
        run_id = dict(next(iter(found.vector(info))))["run_id"]
        of_run = f'{{run_id="{run_id}"}}'
        computing = f"virnucpro_worker_up{of_run} == 1 and on (device) virnucpro_gpu_utilization_ratio{of_run}"
        wait_until(lambda: len(found.vector(computing)) == GPUS, limit_s=LIMIT_S, log=log, interval_s=0.3)
        wait_for_alerts(found, set())

        fake_gpus.set_now(now, all_busy | {0: BUSY | SLOWED, IDLE: BUSY | NOTHING_TO_DO, LOST: BUSY | FALLEN_OFF})
        expected = {
            ("VirnucproGpuIdleWhileRunsWait", "firing", f"{IDLE}"),
            ("VirnucproGpuIdle", "firing", f"cuda:{IDLE}"),
            ("VirnucproGpuLost", "firing", f"{LOST}"),
        }
        wait_for_alerts(found, expected)

        chosen = {"run_id": run_id, "model": ".+", "host": ".+", "device": ".+", "__rate_interval": "2s"}
        unanswered = {substituted(expr, **chosen) for expr in questions()}
        while unanswered and service.flow_run(runs[0]).state.type == StateType.RUNNING:
            unanswered = {asked for asked in unanswered if not found.vector(asked)}
        assert unanswered == set()
        shown = {
            name: {dict(labels)["uuid"] for labels in found.vector(f"virnucpro_host_gpu_{name}")}
            for name in ("lost", "utilization_ratio")
        }
        everything = {fake_gpus.uuid_of(number) for number in range(GPUS)}
        assert shown == {"lost": everything, "utilization_ratio": everything - {fake_gpus.uuid_of(LOST)}}
        assert {use["device"] for use in fake_gpus.uses_of(control)} == set(map(str, range(GPUS)))

        fake_gpus.set_now(now, all_busy)
        wait_for_alerts(found, set())
        assert service.flow_run(runs[0]).state.type == StateType.RUNNING
        for run in reversed(runs):
            service.cancel(run)
        service.wait_for_state(runs[0], "Cancelled", limit_s=LIMIT_S)
