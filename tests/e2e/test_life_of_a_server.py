"""``deployments/server`` and the retention on a real server: backup, restore, a new password, old runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import sys
import time
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta

import pytest

from tests import hash_flows
from tests.conftest import REPOSITORY
from tests.prefect_service import PASSWORD, POOL, prefect_service, started, wait_until
from tests.strategies import edit_manifest
from virnucpro.telemetry.metrics.options import TEXTFILES

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

SERVER = str(REPOSITORY / "deployments" / "server")
ON_CPU = {"devices": "cpu", "workers": 1}


def server(service, *arguments, **environ):
    """Run ``deployments/server ARGUMENTS``; return its exit code and everything that it printed."""
    done = service.run(sys.executable, SERVER, *map(str, arguments), **environ)
    return done.returncode, done.stdout + done.stderr


def pools(service):
    with service.client() as client:
        return {pool.name for pool in client.read_work_pools()}


def test_a_backup_of_a_running_server_is_restored_once_it_is_stopped(tmp_path):
    from prefect.client.schemas.actions import WorkPoolCreate

    backup, database = tmp_path / "one.db", tmp_path / "server" / "home" / "prefect.db"
    with prefect_service(tmp_path / "server") as service:
        assert server(service, "backup", backup)[0] == 0
        assert backup.stat().st_mode & 0o777 == 0o600
        code, printed = server(service, "backup", backup)
        assert (code, "exists: give the name of a new file" in printed) == (78, True)
        with service.client() as client:
            client.create_work_pool(WorkPoolCreate(name="made-later", type="process"))
        code, printed = server(service, "restore", backup)
        assert (code, "stop it first" in printed) == (78, True)
        code, printed = server(service, "restore", backup, PREFECT_API_URL="http://127.0.0.1:9/api")
        assert (code, "is in use" in printed) == (78, True), printed
        service.server.close()
        (tmp_path / "text").write_text("no database")
        code, printed = server(service, "restore", tmp_path / "text")
        assert (code, "is no backup of a Prefect server's SQLite database" in printed) == (78, True)
        code, printed = server(service, "restore", backup)
        assert code == 0, printed
        (kept,) = database.parent.glob("prefect.db.before-*")
        with closing(sqlite3.connect(kept)) as before:
            assert before.execute("SELECT count(*) FROM work_pool WHERE name = 'made-later'").fetchone() == (1,)
        service.serve()
        assert POOL in pools(service)
        assert "made-later" not in pools(service)


def old_and_new_figures(folder, long_ago):
    """Make an old file of a run's figures, a new one, and an old one of others; return them."""
    found = [folder / name for name in ("virnucpro-old.prom", "virnucpro-new.prom", "of-others.prom")]
    for path in found:
        path.touch()
    for path in (found[0], found[2]):
        os.utime(path, (long_ago.timestamp(),) * 2)
    return found


def finished(service, deployment, folder, *names):
    """Runs of the deployment, one after the other in the database, and their folders."""
    (folder / "in.fasta").write_text(">a\nMKTAYIAKQR\n")
    given = {"fasta_files": [str(folder / "in.fasta")], "hardware": ON_CPU}
    return {name: service.start(deployment, **given, output_dir=str(folder / name)) for name in names}


@pytest.fixture
def on_sqlite(tmp_path):
    """Give a server whose database a test may change."""
    with prefect_service(tmp_path / "server") as service:
        yield service


def test_retention_deletes_what_is_old_and_ours_and_lists_it_before(on_sqlite, tmp_path, monkeypatch):
    from prefect.client.schemas.actions import DeploymentUpdate
    from prefect.exceptions import ObjectNotFound
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    from flows.retention import retention

    service = on_sqlite
    control = hash_flows.control_file(tmp_path / "control.json")
    deployment = service.deploy("tests/hash_flows.py:embed", "hash-of-old", **{hash_flows.VARIABLE: str(control)})
    with service.client() as client:
        client.update_deployment(deployment, DeploymentUpdate(tags=["virnucpro"]))
    with service.worker(VIRNUCPRO_DATA_ROOTS=str(tmp_path)):
        runs = finished(service, deployment, tmp_path, "old", "with notes", "used again", "recent")
        for run_id in runs.values():
            service.wait_for_state(run_id, "Completed", limit_s=120)
        again = service.start(deployment, fasta_files=["none"], output_dir=str(tmp_path / "used again"))
        service.wait_for_state(again, "Failed", limit_s=60)
    (tmp_path / "with notes" / "notes.txt").write_text("precious")
    long_ago = datetime.now(UTC) - timedelta(days=50)
    with closing(sqlite3.connect(service.folder / "home" / "prefect.db", timeout=60)) as database, database:
        for name in ("old", "with notes", "used again"):
            edit_manifest(tmp_path / name / "run.json", lambda values: values.update(finished=long_ago.isoformat()))
            database.execute(
                "UPDATE flow_run SET end_time = ? WHERE id = ?", (f"{long_ago:%Y-%m-%d %H:%M:%S.%f}", str(runs[name]))
            )

    def left():
        with service.client() as client:
            found = set()
            for name, run_id in runs.items():
                try:
                    client.read_flow_run(run_id)
                except ObjectNotFound:
                    continue
                found.add(name)
        return found, {name for name in runs if (tmp_path / name).exists()}

    def retain(**given):
        settings = {PREFECT_API_URL: f"{service.url}/api", PREFECT_API_AUTH_STRING: PASSWORD}
        with temporary_settings(settings):
            return retention(days=40, return_state=True, **given).message

    monkeypatch.setenv("VIRNUCPRO_DATA_ROOTS", str(tmp_path))
    monkeypatch.setenv(TEXTFILES, str(tmp_path))
    figures = old_and_new_figures(tmp_path, long_ago)
    everything = {"old", "with notes", "used again", "recent"}
    assert retain(folders=True).startswith("a dry run: would delete 1 run that ended before")
    assert left() == (everything, everything)
    assert all(path.exists() for path in figures)
    message = retain(folders=True, dry_run=False)
    assert message.startswith("deleted 1 run that ended before")
    assert message.endswith("2 kept, see retention-summary")
    assert left() == (everything - {"old"}, everything - {"old"})
    assert [path.exists() for path in figures] == [False, True, True]

    def of_old(what):
        return client.request(
            "POST", f"/{what}/filter", json={what: {"flow_run_id": {"any_": [str(runs["old"])]}}}
        ).json()

    with service.client() as client:
        assert of_old("artifacts") == []
        wait_until(lambda: not of_old("logs"), limit_s=20)  # the server deletes them by and by
    assert retain(dry_run=False).startswith("deleted 2 runs")
    assert left() == ({"recent"}, everything - {"old"})
    assert (tmp_path / "with notes" / "notes.txt").read_text() == "precious"


def test_a_new_password_loses_no_run_in_the_order_of_the_readme(tmp_path):
    """Workers stop, files change, the server restarts, workers start: the run resumes."""
    files = [tmp_path / name for name in ("server.env", "worker.env")]
    for file in files:
        shutil.copy(REPOSITORY / "deployments" / "systemd" / file.name, file)
        text = file.read_text()
        for name in ("PREFECT_SERVER_API_AUTH_STRING=", "PREFECT_API_AUTH_STRING="):
            text = text.replace(f"\n{name}\n", f"\n{name}{PASSWORD}\n")
        file.write_text(text)
        file.chmod(0o600)
    (tmp_path / "in.fasta").write_text("".join(f">{number}\n{'MKTAYIAKQR' * (number + 1)}\n" for number in range(40)))
    control = hash_flows.control_file(tmp_path / "control.json", slow_s=3.0, calls=True)
    roots = {"VIRNUCPRO_DATA_ROOTS": str(tmp_path)}

    def password_of(file):
        return re.search(r"^PREFECT_\w*AUTH_STRING=(.*)$", file.read_text(), re.MULTILINE)[1]

    with prefect_service(tmp_path / "server") as service:
        deployment = service.deploy("tests/hash_flows.py:embed", "rotated", **{hash_flows.VARIABLE: str(control)})
        given = {"fasta_files": [str(tmp_path / "in.fasta")], "output_dir": str(tmp_path / "out"), "hardware": ON_CPU}
        with stopping_worker(service, **roots) as worker:
            run = service.start(deployment, **given)
            service.wait_for_state(run, "Running", limit_s=120)
            wait_until(lambda: list((tmp_path / "out").glob("work/parts/*")), limit_s=120)
            worker.terminate()
            worker.wait(60)
        assert service.flow_run(run).state.name == "AwaitingRetry"
        code, printed = server(service, "rotate-password", *files)
        assert code == 0, printed
        new = password_of(files[0])
        assert new == password_of(files[1]) != PASSWORD
        assert new.partition(":")[2] not in printed
        assert [file.stat().st_mode & 0o777 for file in files] == [0o600, 0o600]
        service.password = new
        service.be_away(0)
        assert "401" in service.prefect("work-pool", "ls").stderr
        service.environ["PREFECT_API_AUTH_STRING"] = new
        assert service.prefect("work-pool", "ls").returncode == 0
        with stopping_worker(service, **roots):
            service.wait_for_state(run, "Completed", limit_s=180)
        assert service.flow_run(run).run_count == 2
    computed = [
        name
        for line in control.with_suffix(".calls").read_text().splitlines()
        for name in json.loads(line)["sequences"]
    ]
    assert len(computed) == len(set(computed)) == 40


@contextmanager
def stopping_worker(service, **environ):
    """A worker that hands its runs back when it stops."""
    log = service.folder / f"stopping-{time.monotonic_ns()}.log"
    command = [sys.executable, "-m", "flows.worker", "--pool", POOL]
    with started(command, log, cwd=REPOSITORY, environ={**service.environ, **environ}) as process:
        wait_until(lambda: " started!" in log.read_text(), limit_s=60, log=log)
        yield process
