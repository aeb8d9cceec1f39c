"""The units' own commands with their own settings, and the proxy in front: a server with a password, and its worker."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.conftest import REPOSITORY
from tests.debian_programs import program
from tests.made_prediction import Contig, make_prediction
from tests.prefect_service import started, wait_until
from virnucpro.report.prediction.page import write_report
from virnucpro.report.served_files import address_of

pytestmark = pytest.mark.slow

DEPLOYMENTS = REPOSITORY / "deployments"
PASSWORD = "virnucpro:the-password-of-this-test"
START_LIMIT_S = 120.0


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


class Place:
    """A machine's folders and ports, under a folder of the test, with what ``/etc/virnucpro`` would hold."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {there: str(free_port()) for there in ("4200", "8081", "4202", "4201")}
        for name in ("lib", "etc"):
            (folder / name).mkdir(parents=True)
        (folder / "repository").symlink_to(REPOSITORY)  # whose own path may have blanks
        (folder / "venv").symlink_to(Path(sys.executable).parents[1])
        for name in ("server.env", "worker.env"):
            text = (DEPLOYMENTS / "systemd" / name).read_text().replace("AUTH_STRING=\n", f"AUTH_STRING={PASSWORD}\n")
            (folder / "etc" / name).write_text(self.here(text))

    def here(self, text: str) -> str:
        """Return a unit's text with the paths and ports of this place."""
        for there, here in {
            "/opt/virnucpro/.venv/": f"{self.folder}/venv/",
            "/opt/virnucpro": f"{self.folder}/repository",
            "/var/lib/": f"{self.folder}/lib/",
            "/var/cache/": f"{self.folder}/cache/",
            "/etc/virnucpro": f"{self.folder}/etc",
            "/run/lock/": f"{self.folder}/lock/",
            f"{self.folder}/repository/runs": f"{self.folder}/runs",
            "/srv/": f"{self.folder}/srv/",
            "%H": "this-host",
            **self.ports,
        }.items():
            text = text.replace(there, here)
        return text

    @contextmanager
    def service(self, name: str):
        """Start a unit's ExecStart with exactly its environment; yield the process."""
        lines = self.here((DEPLOYMENTS / "systemd" / f"{name}.service").read_text()).replace("\\\n", " ").splitlines()
        settings = [line.split("=", 1) for line in lines if "=" in line and not line.startswith("#")]
        environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY), "LANG": "C.UTF-8", "no_proxy": "127.0.0.1"}
        for key, value in settings:
            if key == "Environment":
                environ |= dict(pair.split("=", 1) for pair in shlex.split(value))
        settings_files = [value for key, value in settings if key == "EnvironmentFile"]
        (command,) = [value for key, value in settings if key == "ExecStart"]
        (working,) = [value for key, value in settings if key == "WorkingDirectory"]
        Path(working).mkdir(exist_ok=True)
        for settings_file in settings_files:
            environ |= env_file(Path(settings_file))
        with started(shlex.split(command), self.log(name), cwd=Path(working), environ=environ) as process:
            yield process

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


def env_file(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def is_healthy(url: str) -> bool:
    """By the program that the containers' checks use."""
    return subprocess.run([DEPLOYMENTS / "healthy", url], capture_output=True, timeout=30, check=False).returncode == 0


def answer(url: str, authority: Path | None = None, password: str | None = None) -> int:
    """The status of what a server says."""
    context = ssl.create_default_context(cafile=authority) if authority else None
    handlers = [urllib.request.ProxyHandler({}), *([urllib.request.HTTPSHandler(context=context)] if context else [])]
    request = urllib.request.Request(url)
    if password:
        import base64

        request.add_header("Authorization", "Basic " + base64.b64encode(password.encode()).decode())
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=20) as said:
            return said.status
    except urllib.error.HTTPError as error:
        return error.code


def listening(process: subprocess.Popen) -> set[str]:
    """Addresses that a service and what it started listen on."""
    family = [psutil.Process(process.pid)]
    family += family[0].children(recursive=True)
    return {link.laddr.ip for one in family for link in one.net_connections("inet") if link.status == "LISTEN"}


def prefect(*arguments, **environ):
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return subprocess.run(
        [sys.executable, "-m", "prefect", *map(str, arguments)],
        env={**ours, "COLUMNS": "200", **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The units' services, running."""
    place = Place(tmp_path_factory.mktemp("place"))
    server, worker, exporter, place.reports = (f"http://127.0.0.1:{port}" for port in place.ports.values())
    with place.service("virnucpro-server") as of_server:
        log = place.log("virnucpro-server")
        took_s = wait_until(lambda: is_healthy(f"{server}/api/ready"), limit_s=START_LIMIT_S, log=log)
        with place.service("virnucpro-worker") as of_worker, place.service("virnucpro-exporter") as of_exporter:
            log = place.log("virnucpro-worker")
            took_s += wait_until(lambda: is_healthy(f"{worker}/health"), limit_s=START_LIMIT_S, log=log)
            wait_until(lambda: " started!" in log.read_text(), limit_s=START_LIMIT_S, log=log)
            print(f"server and worker of the units ready after {took_s:.1f} s")
            wait_until(lambda: is_healthy(f"{exporter}/metrics"), limit_s=START_LIMIT_S, log=log)
            place.server, place.exporter = server, exporter
            place.processes = {"server": of_server, "worker": of_worker, "exporter": of_exporter}
            yield place


def test_the_units_server_asks_for_the_password_and_protects_against_forged_requests(place):
    asked = f"{place.server}/api/admin/version"
    assert answer(asked) == 401
    assert answer(asked, password="virnucpro:another-password") == 401
    assert answer(asked, password=PASSWORD) == 200
    with urllib.request.urlopen(f"{place.server}/ui-settings", timeout=20) as page:
        settings = json.load(page)
    assert (settings["auth"], settings["csrf_enabled"]) == ("BASIC", True)
    assert settings["api_url"] == f"{place.server}/api"


def test_no_unit_listens_beyond_this_machine(place):
    assert set(place.processes) == {"server", "worker", "exporter"}
    for name, process in place.processes.items():
        assert listening(process) == {"127.0.0.1"}, name


def test_the_units_serve_metrics_the_server_with_its_password_and_the_exporter_with_its_answer(place):
    assert answer(f"{place.server}/api/metrics") == 401
    assert answer(f"{place.server}/api/metrics", password=PASSWORD) == 200
    with urllib.request.urlopen(f"{place.exporter}/metrics", timeout=20) as said:
        assert b"\nvirnucpro_prefect_up 1.0\n" in said.read()
    log = place.log("virnucpro-worker").read_text()
    assert log.startswith("flows.worker: metrics of runs: VIRNUCPRO_METRICS_TARGETS="), log[:500]


class Proxy(NamedTuple):
    url: str
    authority: Path
    log: Path
    process: subprocess.Popen


@pytest.fixture(scope="module")
def proxy(place, tmp_path_factory):
    """Caddy in front of server and reports, with a certificate of its own."""
    caddy, openssl = program("caddy"), program("openssl")
    folder = tmp_path_factory.mktemp("proxy")
    port, tls, log = free_port(), folder / "tls", folder / "caddy.log"
    tls.mkdir()
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    key = ["-newkey", "rsa:2048", "-nodes", "-keyout", tls / "key.pem", "-out", tls / "cert.pem"]
    subprocess.run([openssl, "req", "-x509", "-days", "2", *subject, *key], capture_output=True, check=True)
    environ = {
        "PATH": os.environ["PATH"],
        "XDG_DATA_HOME": str(folder),
        "XDG_CONFIG_HOME": str(folder),
        "VIRNUCPRO_HOST": "localhost",
        "VIRNUCPRO_PORT": str(port),
        "PREFECT_SERVER": place.server.removeprefix("http://"),
        "REPORTS_SERVER": place.reports.removeprefix("http://"),
        "TLS_FOLDER": str(tls),
    }
    caddyfile = DEPLOYMENTS / "proxy" / "Caddyfile"
    command = [caddy, "run", "--adapter", "caddyfile", "--config", str(caddyfile)]
    with started(command, log, cwd=folder, environ=environ) as process:
        url, authority = f"https://localhost:{port}", tls / "cert.pem"

        def is_up():
            try:
                return answer(f"{url}/api/health", authority) == 200
            except OSError:
                return False

        wait_until(is_up, limit_s=START_LIMIT_S, log=log)
        yield Proxy(url, authority, log, process)
    assert PASSWORD.partition(":")[2] not in log.read_text()


def test_the_proxy_gives_the_server_tls_and_the_server_takes_the_cluster_pool_through_it(proxy, tmp_path):
    """The template of deployments/kubernetes makes a work pool."""
    url, authority = proxy.url, proxy.authority
    assert answer(f"{url}/api/admin/version", authority) == 401
    assert answer(f"{url}/api/admin/version", authority, PASSWORD) == 200
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        answer(f"{url}/api/health")
    assert {link.laddr.port for link in psutil.Process(proxy.process.pid).net_connections("inet")} & {2019} == set()
    made = prefect(
        *("work-pool", "create", "cluster", "--type", "kubernetes"),
        *("--base-job-template", DEPLOYMENTS / "kubernetes" / "base-job-template.json"),
        PREFECT_HOME=str(tmp_path / "home"),
        PREFECT_API_URL=f"{url}/api",
        PREFECT_API_AUTH_STRING=PASSWORD,
        PREFECT_API_SSL_CERT_FILE=str(authority),
        no_proxy="localhost,127.0.0.1",
    )
    assert made.returncode == 0, made.stdout + made.stderr


def test_reports_of_the_unit_are_behind_the_proxy_and_prefects_password(place, proxy):
    folder = place.folder / "srv" / "virnucpro" / "runs" / "a #1 100%25 \u00fc; (b)?"
    report = write_report(make_prediction(folder, [Contig("c", 900)]).layout)
    (place.folder / "runs").mkdir()
    with place.service("virnucpro-reports") as process:
        wait_until(
            lambda: is_healthy(f"{place.reports}/health"), limit_s=START_LIMIT_S, log=place.log("virnucpro-reports")
        )
        assert listening(process) == {"127.0.0.1"}
        linked = f"{proxy.url}/reports{address_of(report)}"
        assert answer(linked, proxy.authority) == 401
        assert answer(linked, proxy.authority, "virnucpro:another-password") == 401
        assert answer(linked, proxy.authority, PASSWORD) == 200
        assert answer(linked.replace("report.html", "contigs.tsv"), proxy.authority, PASSWORD) == 200
        assert answer(linked.replace("report.html", "metrics.prom"), proxy.authority, PASSWORD) == 404
        assert answer(f"{proxy.url}/reports", proxy.authority, PASSWORD) == 200  # by a redirection, to the list
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.build_opener(
                urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=proxy.authority))
            ).open(linked)
        assert refused.value.headers["WWW-Authenticate"].startswith("Basic ")
        assert PASSWORD.partition(":")[2] not in place.log("virnucpro-reports").read_text()
        process.terminate()
        unit = (DEPLOYMENTS / "systemd" / "virnucpro-reports.service").read_text()
        assert f"SuccessExitStatus={process.wait(20)}\n" in unit


@pytest.mark.parametrize("unit", ["virnucpro-server", "virnucpro-worker", "virnucpro-exporter"])
def test_no_unit_starts_with_the_settings_as_they_are_shipped(unit, tmp_path):
    place = Place(tmp_path)
    shutil.copytree(DEPLOYMENTS / "systemd", tmp_path / "etc", dirs_exist_ok=True)
    with place.service(unit) as process:
        assert process.wait(20) == 78
    assert "AUTH_STRING must be NAME:PASSWORD" in place.log(unit).read_text()
    text = (DEPLOYMENTS / "systemd" / f"{unit}.service").read_text()
    assert "RestartPreventExitStatus=78" in text
