"""Prometheus, its Pushgateway and PostgreSQL as Debian packages them, on a free port of this host, stopped again."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

START_LIMIT_S = 60.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def program(name: str) -> str:
    """Return where a program is; the test is skipped without it."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"no {name}: .ci/run says which of Debian's packages has it")
    return path


def get(url: str, **parameters: str) -> bytes:
    """Return what a server of ours answers."""
    with _DIRECT.open(f"{url}?{urllib.parse.urlencode(parameters)}", timeout=20) as answer:
        return answer.read()


@contextmanager
def started(name: str, *arguments: str, folder: Path):
    """Start a server of Prometheus' family, which says on ``/-/ready`` when it is ready; yield its URL."""
    path = program(name)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{name}.log"
    environ = {**os.environ, "GOMAXPROCS": "1"}
    command = [path, f"--web.listen-address=127.0.0.1:{port}", *arguments]
    with log.open("wb") as said:
        process = subprocess.Popen(command, cwd=folder, stdout=said, stderr=said, env=environ)
    try:
        url = f"http://127.0.0.1:{port}"
        deadline_s = time.monotonic() + START_LIMIT_S
        while True:
            assert process.poll() is None, log.read_text()
            try:
                get(f"{url}/-/ready")
                break
            except (urllib.error.URLError, ConnectionError):
                assert time.monotonic() < deadline_s, log.read_text()
                time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        process.wait(20)


@contextmanager
def postgresql():
    """Start a private cluster of PostgreSQL; yield the URL of its database for Prefect. Skips the test without it."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not programs:
        pytest.skip("Debian's package postgresql is not installed")
    folder = Path(tempfile.mkdtemp(prefix="virnucpro-postgresql-"))  # pytest's own folders are closed to other users
    is_root = os.geteuid() == 0
    if is_root:
        shutil.chown(folder, "postgres")
    identity = {"user": "postgres", "group": "postgres", "extra_groups": []} if is_root else {}

    def run(name, *arguments):
        command = [programs[-1] / name, *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, **identity)
        assert done.returncode == 0, done.stdout + done.stderr

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    run("initdb", "--pgdata", folder / "data", "--username", "prefect", "--auth", "trust", "--no-sync")
    options = f"-c listen_addresses=127.0.0.1 -c fsync=off -p {port} -k {folder}"
    run("pg_ctl", "--pgdata", folder / "data", "--log", folder / "log", "--wait", "--options", options, "start")
    try:
        run("createdb", "--host", "127.0.0.1", "--port", str(port), "--username", "prefect", "prefect")
        yield f"postgresql+asyncpg://prefect:any@127.0.0.1:{port}/prefect"
    finally:
        run("pg_ctl", "--pgdata", folder / "data", "--mode", "immediate", "--wait", "stop")
        shutil.rmtree(folder)


class Prometheus:
    """A Prometheus that is running, and its answers."""

    def __init__(self, url: str) -> None:
        self.url = url

    def vector(self, expression: str, at: float | None = None) -> dict[tuple[tuple[str, str], ...], float]:
        """Return labels -> value of an instant query; *at* is a Unix time, by default now."""
        time_s = {} if at is None else {"time": repr(at)}
        result = json.loads(get(f"{self.url}/api/v1/query", query=expression, **time_s))["data"]["result"]
        return {tuple(sorted(one["metric"].items())): float(one["value"][1]) for one in result}

    def number(self, expression: str, at: float | None = None) -> float | None:
        """Return the value of an expression that has one series or none."""
        values = list(self.vector(expression, at).values())
        assert len(values) < 2, (expression, values)
        return values[0] if values else None

    def samples(self, expression: str) -> list[tuple[float, float]]:
        """Return (Unix time, value) of each sample of a range selector that selects one series."""
        result = json.loads(get(f"{self.url}/api/v1/query", query=expression))["data"]["result"]
        assert len(result) == 1, (expression, result)
        return [(float(time_s), float(value)) for time_s, value in result[0]["values"]]
