"""
The event of a run's end, and the examples of automations that ``bootstrap --with`` installs, on a real server.

Runs are of ``embed`` with the hash model; the webhook is a server of this test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests import hash_flows
from tests.conftest import REPOSITORY
from tests.prefect_service import PASSWORD, wait_until

pytestmark = pytest.mark.slow

BOOTSTRAP = str(REPOSITORY / "deployments" / "bootstrap")
POISON = "MKVLAAGIT"
SILENT = "no heartbeat for 15 minutes: run it again, and it continues"


def events_of(service, run_id):
    """Our events of a flow run, as the server has them."""
    now = datetime.now(UTC)
    asked = {
        "occurred": {"since": str(now - timedelta(hours=1)), "until": str(now + timedelta(hours=1))},
        "event": {"prefix": ["virnucpro."]},
        "any_resource": {"id": [f"prefect.flow-run.{run_id}"]},
    }
    with service.client() as client:
        return client.request("POST", "/events/filter", json={"filter": asked}).json()["events"]


@contextmanager
def webhook():
    """A server that takes calls; yield its address and the calls."""
    calls = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self):
            calls.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", calls
        server.shutdown()


@contextmanager
def installed(service, *names, times=("made",)):
    """Install examples by bootstrap, which prints *times*, one after the other, of each; remove them at the end."""
    options = [item for name in names for item in ("--with", name)]
    own = {f"virnucpro: {name.partition('=')[0]}" for name in names}
    try:
        for became in times:
            done = service.run(sys.executable, BOOTSTRAP, *options)
            assert done.returncode == 0, done.stdout + done.stderr
            lines = {line[:46].strip(): line[46:].strip() for line in done.stdout.splitlines()}
            assert {lines.get(name) for name in own} == {became}, done.stdout
        yield
    finally:
        with service.client() as client:
            for name in own:
                for automation in client.read_automations_by_name(name):
                    client.delete_automation(automation.id)


@contextmanager
def saved(block):
    """Save a block under the name ``of-a-test``; delete it at the end."""
    block.save("of-a-test", overwrite=True)
    try:
        yield
    finally:
        type(block).delete("of-a-test")


def tagged(service, name, **variables):
    """Deploy ``embed/NAME`` of the hash model with our tag; return its id."""
    from prefect.client.schemas.actions import DeploymentUpdate

    deployment = service.deploy("tests/hash_flows.py:embed", name, **variables)
    with service.client() as client:
        client.update_deployment(deployment, DeploymentUpdate(tags=["virnucpro"]))
    return deployment


def test_each_end_has_one_event_with_counts_and_paths_a_webhook_hears_it_and_the_next_sample_runs(
    prefect_server, tmp_path
):
    from prefect.blocks.webhook import Webhook
    from prefect.client.schemas.actions import DeploymentUpdate
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    (tmp_path / "in.fasta").write_text(f">secret_a\nMKTAYIAKQR\n>secret_b\n{POISON}\n>secret_c\nGAVLIMC\n")
    (tmp_path / "inbox").mkdir()
    (tmp_path / "inbox" / "next.fasta").write_text(">secret_d\nGAVLI\n")
    control = hash_flows.control_file(tmp_path / "control.json", poison={POISON: "nan"})
    variables = {hash_flows.VARIABLE: str(control), "VIRNUCPRO_DATA_ROOTS": str(tmp_path)}
    deployment = tagged(prefect_server, "hash-of-events", **variables)
    on_cpu = {"devices": "cpu", "workers": 1}

    def start(name, fasta="in.fasta", **others):
        given = {"fasta_files": [str(tmp_path / fasta)], "output_dir": str(tmp_path / name), "hardware": on_cpu}
        return prefect_server.start(deployment, **given, **others)

    settings = {PREFECT_API_URL: f"{prefect_server.url}/api", PREFECT_API_AUTH_STRING: PASSWORD}
    with (
        webhook() as (address, calls),
        temporary_settings(settings),
        saved(Webhook(url=address)),
        installed(prefect_server, "next-sample", "webhook=of-a-test"),
    ):
        with prefect_server.client() as client:
            scan = client.read_deployment_by_name("predict-inbox/predict-nightly")
            parameters = {
                "inbox_dir": str(tmp_path / "inbox"),
                "output_root": str(tmp_path / "results"),
                "deployment": "embed/hash-of-events",
                "parameters": {"hardware": on_cpu},
                "settle_seconds": 0,
            }
            update = DeploymentUpdate(parameters=parameters, job_variables={"env": variables})
            client.update_deployment(scan.id, update)
        with prefect_server.worker(VIRNUCPRO_DATA_ROOTS=str(tmp_path)) as worker:
            runs = {
                "partial": start("partial", result={"allow_partial": True}),
                "failed": start("failed"),
                "bad input": start("bad", "none.fasta"),
            }
            ends = ("Completed", "Partial", "Failed")
            for run_id in runs.values():
                prefect_server.wait_for_state(run_id, *ends, limit_s=120)
            results = tmp_path / "results"
            wait_until(lambda: list(results.glob("*/embeddings.h5")), limit_s=120, log=worker.log, interval_s=0.5)
            wait_until(lambda: len(calls) >= 4, limit_s=60, interval_s=0.2)
            wait_until(lambda: all(events_of(prefect_server, run_id) for run_id in runs.values()), limit_s=60)
    found = {name: events_of(prefect_server, run_id) for name, run_id in runs.items()}
    assert [len(events) for events in found.values()] == [1, 1, 1]
    ((partial,), (failed,), (bad,)) = found.values()
    assert [event["event"] for (event,) in found.values()] == [
        "virnucpro.run.partial",
        "virnucpro.run.failed",
        "virnucpro.run.failed",
    ]
    folder = str(tmp_path / "partial")
    assert partial["payload"] == {
        "flow": "embed",
        "state": "Partial",
        "exit_code": 3,
        "error": None,
        "counts": {"records": 3, "rows": 2, "missing": 1},
        "paths": {"output_dir": folder, "embeddings": f"{folder}/embeddings.partial.h5"},
    }
    assert partial["resource"]["virnucpro.output-dir"] == folder
    assert "prefect.tag.virnucpro" in [item["prefect.resource.id"] for item in partial["related"]]
    assert (failed["payload"]["exit_code"], failed["payload"]["error"]) == (3, "WorkersFailedError")
    assert failed["payload"]["counts"] == {"records": 3, "missing": 1}
    assert (bad["payload"]["exit_code"], bad["payload"]["counts"]) == (65, {})
    (completed,) = [call for call in calls if call["event"] == "virnucpro.run.completed"]
    assert completed["state"] == "Completed"
    assert completed["details"]["counts"] == {"records": 1, "rows": 1, "missing": 0}
    assert completed["details"]["paths"]["output_dir"].startswith(str(tmp_path / "results"))
    by_run = {call["run_id"]: call for call in calls}
    assert by_run[f"prefect.flow-run.{runs['partial']}"]["details"] == partial["payload"]
    assert len(by_run) == len(calls) == 4, "a scan, or a run within a run, has an event"
    assert "secret" not in json.dumps([found, calls])


@pytest.mark.long
def test_a_run_whose_host_died_is_resumed_until_it_was_started_four_times(prefect_server, tmp_path):
    """No worker runs: each start and each death is a state, as the server's automation and a worker would set it."""
    from prefect.states import Crashed, Running

    deployment = tagged(prefect_server, "hash-of-resume")
    run = prefect_server.start(deployment, fasta_files=["none"], output_dir=str(tmp_path / "out"))

    def is_resumed():
        return prefect_server.flow_run(run).state.name == "AwaitingRetry"

    with installed(prefect_server, "resume-crashed", times=("made", "as it was")), prefect_server.client() as client:
        client.set_flow_run_state(run, Running(), force=True)
        client.set_flow_run_state(run, Crashed(message="killed by its user"), force=True)
        time.sleep(3)
        assert not is_resumed(), "its host is alive"
        for _ in range(2):
            client.set_flow_run_state(run, Running(), force=True)
            client.set_flow_run_state(run, Crashed(message=SILENT), force=True)
            wait_until(is_resumed, limit_s=30)
        client.set_flow_run_state(run, Running(), force=True)
        client.set_flow_run_state(run, Crashed(message=SILENT), force=True)
        time.sleep(5)
        assert prefect_server.flow_run(run).state.name == "Crashed"
        assert prefect_server.flow_run(run).run_count == 4
        client.delete_flow_run(run)


HANGING = """
import os, socket, time, uuid

listening = socket.create_server(("127.0.0.1", 0))  # takes connections, and never answers
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Failed

from flows.embed import embed
from flows.run import events

events.PATIENCE_S = 2.0
run = FlowRun(id=uuid.uuid4(), flow_id=uuid.uuid4(), deployment_id=uuid.uuid4(), parameters={"output_dir": "out"})
with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{listening.getsockname()[1]}/api"}):
    began_s = time.monotonic()
    events.emit_end(embed, run, Failed(message="no matter"))
print(time.monotonic() - began_s, flush=True)
os._exit(0)
"""


def test_an_api_that_hangs_holds_a_run_up_for_seconds_and_raises_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", HANGING],
        cwd=REPOSITORY,
        env={**os.environ, "PREFECT_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert 2 <= float(done.stdout) < 10
