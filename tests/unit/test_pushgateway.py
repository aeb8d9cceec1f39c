"""Metrics to a pushgateway that works, is down, is slow or talks nonsense; the servers are real, on 127.0.0.1."""

from __future__ import annotations

import http.server
import json
import socket
import threading
import time
from contextlib import contextmanager
from urllib.parse import unquote

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import GaugeMetricFamily
from structlog.testing import capture_logs

from virnucpro.errors import ConfigurationError
from virnucpro.run_layout import RunLayout
from virnucpro.telemetry.metrics import pushgateway
from virnucpro.telemetry.metrics.options import MetricsOptions
from virnucpro.telemetry.metrics.pushgateway import FORGOTTEN_S, Pushgateway
from virnucpro.telemetry.run_telemetry import RunTelemetry

HOST = socket.gethostname()
RUN_ID = "0123456789ab"


class Gateway(http.server.BaseHTTPRequestHandler):
    """Keeps what it is asked; the server's attributes say how it answers."""

    def _answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append((self.command, unquote(self.path), body))
        self.server.goes_on.wait(20)
        status, said = self.server.answers.get(self.command, (200, b""))
        self.send_response(status)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    do_GET = do_PUT = do_DELETE = _answer

    def log_message(self, *_):
        pass


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@contextmanager
def a_gateway(**answers):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        server.asked, server.answers, server.goes_on = [], answers, threading.Event()
        server.goes_on.set()
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.goes_on.set()
            server.shutdown()
            thread.join()


@pytest.fixture
def registry():
    registry = CollectorRegistry()
    Gauge("answer", "What it is.", registry=registry).set(42)
    return registry


def group(labels, pushed_s_ago):
    metric = {"labels": labels, "value": f"{time.time() - pushed_s_ago:.15e}"}
    return {"labels": labels, "push_time_seconds": {"type": "GAUGE", "metrics": [metric]}}


def pushes(gateway):
    return [body for method, _, body in gateway.asked if method == "PUT"]


def wait_until(is_so):
    deadline_s = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_push_replaces_what_the_run_had_there(registry):
    with a_gateway() as gateway:
        assert Pushgateway(gateway.url + "/", registry, RUN_ID).push() is None
        ((method, path, body),) = gateway.asked
    assert (method, path) == ("PUT", f"/metrics/job/virnucpro/instance/{HOST}/run_id/{RUN_ID}")
    assert b"answer 42.0" in body


def test_a_gateway_may_be_below_a_path(registry):
    with a_gateway() as gateway:
        assert Pushgateway(gateway.url + "/push", registry, RUN_ID).push() is None
        assert gateway.asked[0][1].startswith("/push/metrics/job/virnucpro/")


@pytest.mark.parametrize(
    "url",
    ["", "gateway:9091", "ftp://gateway", "file:///etc/passwd", "http://", "http://[", "http://a:b", "http://a:99999",
     "http://a:0", "http://a b", "http://a/\x1b[31m", "http://a?x=1", "http://a#x", "http://a/\u00fc",
     "http://" + "a" * 64],
)  # fmt: skip
def test_what_is_no_address_of_a_gateway_is_refused(url):
    with pytest.raises(ConfigurationError, match="such as http://gateway:9091"):
        MetricsOptions(pushgateway=url)


def test_a_password_is_refused_and_not_shown():
    with pytest.raises(ConfigurationError, match="password") as caught:
        MetricsOptions(pushgateway="http://me:secret@gateway:9091")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("said", "shown"),
    [(b"inconsistent\x1b[2J metrics\nmore", r"500 inconsistent\x1b[2J metrics"), (b"", "500 Internal Server Error")],
)
def test_a_gateway_that_refuses_is_one_sentence(registry, said, shown):
    with a_gateway(PUT=(500, said)) as gateway:
        problem = Pushgateway(gateway.url, registry, RUN_ID).push()
        assert problem == f"the pushgateway {gateway.url} refused the metrics: {shown}"


def test_a_gateway_that_is_down_is_one_sentence(registry):
    with socket.socket() as bound:  # a port that nobody listens on while we hold it
        bound.bind(("127.0.0.1", 0))
        problem = Pushgateway(f"http://127.0.0.1:{bound.getsockname()[1]}", registry, RUN_ID).push()
    assert "cannot be reached" in problem
    assert "refused" in problem


def test_a_gateway_that_speaks_something_else_is_one_sentence(registry):
    def answer():
        connection, _ = listening.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(b"SSH-2.0-OpenSSH\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer)
        thread.start()
        problem = Pushgateway(f"http://127.0.0.1:{listening.getsockname()[1]}", registry, RUN_ID).push()
        thread.join()
    assert problem.endswith("cannot be used: BadStatusLine")


@pytest.mark.parametrize("proxy", ["http:/me:secret@proxy:1", "http://me:secret", "http://me:secret@a..b"])
def test_a_proxy_that_cannot_be_used_is_one_sentence_without_its_password(registry, monkeypatch, proxy):
    monkeypatch.setenv("http_proxy", proxy)
    problem = Pushgateway("http://gateway:9091", registry, RUN_ID).push()
    assert problem.startswith("the pushgateway http://gateway:9091 cannot be used: ")
    assert "secret" not in problem


def test_figures_that_cannot_be_made_are_one_sentence():
    class Broken:
        def collect(self):
            raise ZeroDivisionError

    registry = CollectorRegistry()
    registry.register(Broken())
    problem = Pushgateway("http://gateway:9091", registry, RUN_ID).push()
    assert problem == "the pushgateway http://gateway:9091 cannot be used: ZeroDivisionError"


def test_a_gateway_that_hangs_is_given_up(registry, monkeypatch):
    monkeypatch.setattr(pushgateway, "REQUEST_LIMIT_S", 0.2)
    with a_gateway() as gateway:
        gateway.goes_on.clear()
        began_s = time.monotonic()
        assert "timed out" in Pushgateway(gateway.url, registry, RUN_ID).push()
        assert 0.2 <= time.monotonic() - began_s < 5


@pytest.mark.parametrize(("interval_s", "before_the_end"), [(0.02, 5), (1000, 1)])
def test_a_run_pushes_regularly_and_once_more_at_its_end(monkeypatch, interval_s, before_the_end):
    monkeypatch.setattr(pushgateway, "INTERVAL_S", interval_s)
    numbers = iter(range(100_000))

    class Counting:
        def collect(self):
            yield GaugeMetricFamily("number", "Of the push.", value=next(numbers))

    registry = CollectorRegistry()
    registry.register(Counting())
    told = []
    with a_gateway() as gateway:
        mine = Pushgateway(gateway.url, registry, RUN_ID)
        mine.stop()
        mine.start(told.append)
        wait_until(lambda: len(pushes(gateway)) >= before_the_end)
        mine.stop()
        mine.stop()
        got = pushes(gateway)
        assert len(got) == 2 if interval_s == 1000 else len(got) > before_the_end
        time.sleep(0.1)
        assert pushes(gateway) == got
    assert [body.splitlines()[-1] for body in got] == [f"number {n}.0".encode() for n in range(len(got))]
    assert told == []


def test_what_goes_wrong_is_logged_once_and_pushing_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(pushgateway, "INTERVAL_S", 0.02)
    with a_gateway(PUT=(503, b"busy")) as gateway, capture_logs() as logs:
        telemetry = RunTelemetry(MetricsOptions(pushgateway=gateway.url))
        with telemetry, telemetry.running(RunLayout(tmp_path / "out"), RUN_ID):
            wait_until(lambda: len(pushes(gateway)) >= 5)
    reasons = [line["reason"] for line in logs if line["event"] == "metrics.not_pushed"]
    assert reasons == [f"the pushgateway {gateway.url} refused the metrics: 503 busy"]


def test_the_end_of_a_run_does_not_wait_for_a_gateway_that_hangs(registry, monkeypatch):
    monkeypatch.setattr(pushgateway, "LAST_PUSH_LIMIT_S", 0.3)
    with a_gateway() as gateway:
        mine = Pushgateway(gateway.url, registry, RUN_ID)
        mine.start(lambda _: None)
        wait_until(lambda: gateway.asked)
        gateway.goes_on.clear()
        began_s = time.monotonic()
        mine.stop()
        assert time.monotonic() - began_s < 5


def test_groups_that_runs_of_this_host_left_are_removed_and_no_others(registry):
    old, job = FORGOTTEN_S + 60, "virnucpro"
    groups = [
        group({"job": job, "instance": HOST, "run_id": "forgotten"}, old),
        group({"job": job, "instance": HOST, "run_id": "goes-on"}, FORGOTTEN_S - 60),
        group({"job": job, "instance": f"{HOST}x", "run_id": "elsewhere"}, old),
        group({"job": "other", "instance": HOST, "run_id": "of-other-job"}, old),
        group({"job": job, "instance": HOST}, old),
        group({"job": job, "instance": HOST, "run_id": "a", "more": "b"}, old),
    ]
    with a_gateway(GET=(200, json.dumps({"status": "success", "data": groups}).encode())) as gateway:
        Pushgateway(gateway.url, registry, RUN_ID).remove_forgotten()
        assert [(method, path) for method, path, _ in gateway.asked] == [
            ("GET", "/api/v1/metrics"),
            ("DELETE", f"/metrics/job/virnucpro/instance/{HOST}/run_id/forgotten"),
        ]


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (404, b""),
        (500, b"{}"),
        (200, b""),
        (200, b"\xff\xfe"),
        (200, b"[]"),
        (200, b"{}"),
        (200, b'{"data": 3}'),
        (200, b'{"data": [3]}'),
        (200, b'{"data": [{"labels": ["job"]}]}'),
        (200, json.dumps({"data": [{"labels": {"job": "virnucpro", "instance": HOST, "run_id": "a"}}]}).encode()),
        (200, b'{"data": [' + b"[" * 100_000),
    ],
)
def test_a_server_without_such_a_list_is_pushed_to_all_the_same(registry, status, said):
    told = []
    with a_gateway(GET=(status, said)) as gateway:
        mine = Pushgateway(gateway.url, registry, RUN_ID)
        mine.start(told.append)
        wait_until(lambda: any(method == "PUT" for method, *_ in gateway.asked))
        mine.stop()
        assert not [path for method, path, _ in gateway.asked if method == "DELETE"]
    assert told == []
