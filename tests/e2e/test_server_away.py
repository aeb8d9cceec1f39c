"""A run of a deployment outlives restarts and an upgrade of its server, and an outage longer than three heartbeats."""

from __future__ import annotations

import random
import sys
import time

import pytest

pytest.importorskip("prefect")

import prefect

from flows.run.interrupts import LOOK_S
from tests.conftest import REPOSITORY
from tests.faults.processes import RowsFound, compare_rows, make_proteins
from tests.hash_flows import VARIABLE, control_file
from tests.prefect_service import prefect_service, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1200)]

NEWEST = REPOSITORY / ".venv-prefect" / "bin" / "python"
"""With Prefect's newest version: make e2e-newest."""
RESTART_S = 16.0
LEASE_RENEWED_S = 225.0
"""Seconds after which a run would renew the lease of a concurrency limit."""
OUTAGE_S = 100.0
"""More than three heartbeats."""
CANCEL_OUTAGE_S = 60.0


def test_a_run_is_cancelled_within_seconds_though_its_server_was_away(tmp_path):
    """For longer than Prefect's worker listens again: half a minute."""
    make_proteins(tmp_path / "in.fasta", random.Random(4), 60)
    control = control_file(tmp_path / "control.json", slow_s=2.0)
    with prefect_service(tmp_path / "server") as service:
        environ = {VARIABLE: str(control), "VIRNUCPRO_DATA_ROOTS": str(tmp_path)}
        deployment = service.deploy("tests/hash_flows.py:embed", "cancelled", **environ)
        with service.worker():
            given = {"fasta_files": [str(tmp_path / "in.fasta")], "output_dir": str(tmp_path / "out")}
            run = service.start(deployment, **given, hardware={"devices": "cpu", "workers": 2})
            wait_until(lambda: list((tmp_path / "out").glob("work/parts/*")), limit_s=120)
            process = service.flow_process(run)
            service.be_away(CANCEL_OUTAGE_S)
            time.sleep(LOOK_S + 2)
            began_s = time.monotonic()
            service.cancel(run)
            wait_until(lambda: not process.is_running(), limit_s=45)
            service.wait_for_state(run, "Cancelled", limit_s=45)
            print(f"Cancelled {time.monotonic() - began_s:.1f} s after it was asked for, 15 promised")
            assert time.monotonic() - began_s < 45


def test_a_run_goes_on_over_a_restart_of_the_server_and_an_outage_and_completes(tmp_path):
    """The deployment is prefect.yaml's, on a server that keeps leases in memory, as Prefect's default is."""
    from prefect.client.schemas.actions import DeploymentUpdate

    sequences = make_proteins(tmp_path / "in.fasta", random.Random(4), 60)
    control = control_file(tmp_path / "control.json", slow_s=40.0)  # 13 blocks each of two workers: nine minutes
    memory = "prefect.server.concurrency.lease_storage.memory"
    with prefect_service(tmp_path / "server", PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE=memory) as service:
        ready = service.run(sys.executable, str(REPOSITORY / "deployments" / "bootstrap"))
        assert ready.returncode == 0, ready.stderr
        assert "in memory: our deployments have no concurrency_limit" in ready.stdout
        with service.client() as client:
            deployment = client.read_deployment_by_name("embed/embed")
            variables = deployment.job_variables["env"] | {VARIABLE: str(control)}
            flow = DeploymentUpdate(entrypoint="tests/hash_flows.py:embed", job_variables={"env": variables})
            client.update_deployment(deployment.id, flow)
        with service.worker(VIRNUCPRO_DATA_ROOTS=str(tmp_path)):
            given = {"fasta_files": [str(tmp_path / "in.fasta")], "output_dir": str(tmp_path / "out")}
            run = service.start(deployment.id, **given, hardware={"devices": "cpu", "workers": 2})
            service.wait_for_state(run, "Running", limit_s=120)
            began_s = time.monotonic()
            wait_until(lambda: list((tmp_path / "out").glob("work/parts/*")), limit_s=120)
            process = service.flow_process(run)
            service.be_away(RESTART_S)
            time.sleep(max(0.0, began_s + LEASE_RENEWED_S + 25 - time.monotonic()))
            assert service.flow_run(run).state.name == "Running"
            service.be_away(OUTAGE_S)
            time.sleep(45)  # automations have looked at what they missed, and the run at its own state
            assert service.flow_run(run).state.name == "Running"
            assert process.is_running()
            service.wait_for_state(run, "Completed", limit_s=400)
            with service.client() as client:
                names = [state.name for state in client.read_flow_run_states(run)]
        print(f"{time.monotonic() - began_s:.0f} s of run: {names}")
        assert names.count("Running") == 1
    assert compare_rows(tmp_path / "out", sequences) == RowsFound()


def test_a_run_completes_with_the_same_bytes_over_an_upgrade_and_two_restarts_of_the_server(tmp_path, request):
    """
    The steps of "Life of a server": stop, ``deployments/server upgrade``, start; then twice a restart.

    The new server is Prefect's newest; worker and run keep their version.
    """
    if not NEWEST.exists():
        pytest.skip("no .venv-prefect: make e2e-newest makes it")
    run_s = request.config.getoption("--run-seconds")
    make_proteins(tmp_path / "in.fasta", random.Random(4), 60)  # 13 blocks each of two workers
    results = {}
    with prefect_service(tmp_path / "server") as service:
        control = control_file(tmp_path / "control.json")
        deployment = service.deploy("tests/hash_flows.py:embed", "restarted", **{VARIABLE: str(control)})

        def begin(name):
            results[name] = tmp_path / name / "embeddings.h5"
            given = {"fasta_files": [str(tmp_path / "in.fasta")], "output_dir": str(tmp_path / name)}
            return service.start(deployment, **given, hardware={"devices": "cpu", "workers": 2})

        def upgrade():
            service.server.close()
            service.server_python = str(NEWEST)
            server = str(REPOSITORY / "deployments" / "server")
            done = service.run(service.server_python, server, "upgrade", str(backup))
            assert done.returncode == 0, done.stderr
            service.serve()
            versions.append(service.server_version())

        backup = tmp_path / "before.db"
        versions = [service.server_version()]
        with service.worker(VIRNUCPRO_DATA_ROOTS=str(tmp_path)):
            service.wait_for_state(begin("undisturbed"), "Completed", limit_s=120)
            control_file(control, slow_s=run_s / 13)
            run = begin("restarted")
            service.wait_for_state(run, "Running", limit_s=120)
            began_s = time.monotonic()
            process = service.flow_process(run)
            for number, disturb in enumerate([upgrade, lambda: service.be_away(5), lambda: service.be_away(5)], 1):
                time.sleep(max(0.0, began_s + run_s * number / 4 - time.monotonic()))
                disturb()
                print(f"the server is back {time.monotonic() - began_s:.0f} s after the start")
                assert service.flow_run(run).state.name == "Running"
                assert process.is_running()
            service.wait_for_state(run, "Completed", limit_s=run_s + 120)
            took_s = time.monotonic() - began_s
            with service.client() as client:
                names = [state.name for state in client.read_flow_run_states(run)]
    print(f"{took_s:.0f} s of run: {names}, servers {versions}")
    assert versions[0] == prefect.__version__ != versions[1]
    assert took_s > 0.9 * run_s
    assert names.count("Running") == 1
    assert backup.stat().st_mode & 0o777 == 0o600
    assert results["restarted"].read_bytes() == results["undisturbed"].read_bytes()
