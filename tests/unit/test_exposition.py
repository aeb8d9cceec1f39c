"""Metrics over HTTP and as a file: what readers get, and that none of them can hold up a run."""

from __future__ import annotations

import gzip
import socket
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import psutil
import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from virnucpro import bounded_server
from virnucpro.telemetry.metrics import exposition
from virnucpro.telemetry.metrics.exposition import (
    LEAST_PATIENCE_S,
    LONGEST_PATIENCE_S,
    LOOPBACK,
    MOST_READERS,
    SCRAPER_HEADER,
    MetricsServer,
    own_address,
)

SCRAPER = {SCRAPER_HEADER: "10"}


@pytest.fixture(autouse=True)
def _soon_stopped(monkeypatch):
    monkeypatch.setattr(exposition, "_POLL_S", 0.01)


@pytest.fixture
def registry():
    registry = CollectorRegistry()
    Gauge("answer", "What it is.", ["who"], registry=registry).labels('a"b\\c\nd').set(42)
    return registry


@contextmanager
def serving(registry, port=0, address=LOOPBACK):
    """A started server and its port."""
    server = MetricsServer(registry, port, address)
    try:
        yield server, server.start()
    finally:
        server.stop()


def test_the_address_is_this_hosts_own_within_the_network():
    assert own_address("") == own_address("127.0.0.0/8") == own_address("127.0.0.1") == "127.0.0.1"
    others = [
        one.address
        for interface in psutil.net_if_addrs().values()
        for one in interface
        if one.family == socket.AF_INET and not one.address.startswith("127.")
    ]
    assert own_address("0.0.0.0/0") == (others or ["127.0.0.1"])[0]
    with pytest.raises(OSError, match=r"no address in 198\.51\.100\.0/24"):  # set apart for documentation
        own_address("198.51.100.0/24")


def ask(port, path="/metrics", **headers):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=20) as answer:
        return answer.headers, answer.read()


def scrape(port):
    return ask(port, **SCRAPER)


def value_of(text):
    """The one sample's labels and value."""
    (family,) = text_string_to_metric_families(text.decode())
    (sample,) = family.samples
    return sample.labels, sample.value


def test_a_reader_gets_the_registry_as_it_is_now(registry):
    values = iter([1.0, 2.0])

    class Changing:
        def collect(self):
            yield GaugeMetricFamily("changing", "Another value each time.", value=next(values))

    with serving(registry) as (_, port):
        headers, text = ask(port)
        assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert value_of(text) == ({"who": 'a"b\\c\nd'}, 42)
        assert text.count(b"\n") == 3
    changing = CollectorRegistry()
    changing.register(Changing())
    with serving(changing) as (_, port):
        assert [value_of(ask(port)[1])[1] for _ in range(2)] == [1, 2]


def test_a_reader_gets_the_format_that_it_asks_for(registry):
    with serving(registry) as (_, port):
        headers, text = ask(port, Accept="application/openmetrics-text; version=1.0.0")
        assert headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
        assert text.endswith(b"# EOF\n")
        headers, text = ask(port, **{"Accept-Encoding": "gzip"})
        assert value_of(gzip.decompress(text))[1] == 42


@pytest.mark.parametrize("path", ["/", "/metric", "/favicon.ico", "/metrics/x"])
def test_there_is_nothing_but_the_metrics(registry, path):
    with serving(registry) as (server, port):
        with pytest.raises(urllib.error.HTTPError, match="metrics are at /metrics") as caught:
            ask(port, path, **SCRAPER)
        assert caught.value.code == 404
        assert server.patience_s == 0


def test_only_this_host_is_served(registry):
    with serving(registry) as (_, port), socket.socket() as other:
        assert ask(port)[1]
        other.bind(("127.0.0.2", port))  # free: we are not on all addresses


def test_a_taken_port_is_an_error_and_two_runs_with_port_0_have_two(registry):
    with serving(registry) as (_, port), serving(registry) as (_, other):
        assert port != other
        assert ask(port)[1] == ask(other)[1]
        taken = MetricsServer(registry, port)
        with pytest.raises(OSError, match="in use"):
            taken.start()
        taken.stop()
        assert not taken.wait_for_scrape(10)
        assert taken.patience_s == 0
    with serving(registry, port) as (_, again):  # at once, though its connections have not timed out yet
        assert again == port
        assert ask(port)[1]


def test_it_is_gone_when_it_is_stopped(registry):
    server = MetricsServer(registry, 0)
    port = server.start()
    server.stop()
    server.stop()
    with pytest.raises(urllib.error.URLError, match="refused"):
        ask(port)


def test_readers_that_hang_are_dropped_and_others_served_meanwhile(registry, monkeypatch, capfd):
    monkeypatch.setattr(bounded_server, "REQUEST_S", 0.5)
    with serving(registry) as (server, port):
        hanging = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
        hanging[0].sendall(b"GET /metrics HT")
        began_s = time.monotonic()
        assert scrape(port)[1]
        assert time.monotonic() - began_s < 0.5
        for connection in hanging:
            connection.settimeout(10)
            assert connection.recv(100) == b""
            connection.close()
        server.stop()
    assert capfd.readouterr() == ("", "")


def test_a_reader_that_takes_nothing_is_dropped(monkeypatch, capfd):
    monkeypatch.setattr(bounded_server, "REQUEST_S", 0.3)
    registry = CollectorRegistry()
    Gauge("large", "x" * (32 << 20), registry=registry)
    with serving(registry) as (server, port):
        with socket.create_connection(("127.0.0.1", port)) as slow:
            slow.sendall(b"GET /metrics HTTP/1.0\r\n" + f"Host: localhost\r\n{SCRAPER_HEADER}: 10\r\n\r\n".encode())
            assert not server.wait_for_scrape(1)  # what it has not taken it has not seen
        assert not [thread for thread in threading.enumerate() if "process_request" in thread.name]
    assert capfd.readouterr() == ("", "")


def test_the_time_to_send_is_for_the_request_and_not_for_each_of_its_bytes(registry, monkeypatch):
    monkeypatch.setattr(bounded_server, "REQUEST_S", 0.5)
    with serving(registry) as (_, port), socket.create_connection(("127.0.0.1", port)) as slow:
        began_s = time.monotonic()
        with suppress(ConnectionError):
            for _ in range(100):
                slow.sendall(b"G")
                time.sleep(0.05)
        assert 0.4 < time.monotonic() - began_s < 4


def test_slow_readers_in_all_places_do_not_shut_a_scraper_out(registry):
    with serving(registry) as (_, port), ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(MOST_READERS)]
        for one in slow:
            one.sendall(b"GET /metrics HT")
        for _ in range(3):
            began_s = time.monotonic()
            assert scrape(port)[1]
            assert time.monotonic() - began_s < bounded_server.REQUEST_S / 2
            slow.append(stack.enter_context(socket.create_connection(("127.0.0.1", port))))
            slow[-1].sendall(b"GET /metrics HT")  # it comes again
        slow[0].settimeout(10)
        assert slow[0].recv(100) == b""  # the oldest made room


def test_more_readers_than_places_are_turned_away_while_all_are_being_answered():
    collecting, goes_on = threading.Semaphore(0), threading.Event()

    class Slow:
        def describe(self):
            return []

        def collect(self):
            collecting.release()
            assert goes_on.wait(20)
            yield GaugeMetricFamily("slow", "Takes its time.", value=1)

    registry = CollectorRegistry()
    registry.register(Slow())
    with serving(registry) as (_, port), ThreadPoolExecutor(MOST_READERS) as readers:
        answers = [readers.submit(ask, port) for _ in range(MOST_READERS)]
        for _ in answers:
            assert collecting.acquire(timeout=20)
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            ask(port)
        goes_on.set()
        assert all(answer.result()[1] for answer in answers)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:9090", "", "[", "10.1.2.3"])
def test_a_page_elsewhere_whose_name_leads_here_reads_nothing(registry, host):
    """A browser sends the name of the page's address; by another name nobody here asks."""
    with serving(registry) as (server, port):
        with pytest.raises(urllib.error.HTTPError, match="for their own machine") as caught:
            ask(port, Host=host, **SCRAPER)
        assert caught.value.code == 421
        assert server.patience_s == 0
        assert all(ask(port, Host=name)[1] for name in ("localhost:1", "127.0.0.1", "[::1]:9"))
    with serving(registry, address="0.0.0.0") as (_, port):  # Prometheus may call this host by any name
        assert ask(port, Host="node7.cluster")[1]


def test_a_defect_of_ours_is_seen_and_the_next_reader_served(capfd):
    class Broken:
        def collect(self):
            raise ZeroDivisionError

    registry = CollectorRegistry()
    registry.register(Broken())
    with serving(registry) as (server, port):
        for _ in range(2):
            with pytest.raises(ConnectionError):
                scrape(port)
        assert server.patience_s == 0
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_a_scraper_is_waited_for_as_long_as_its_rhythm_says(registry):
    with serving(registry) as (server, port):
        ask(port)  # a person with curl does not come back
        assert server.patience_s == 0
        scrape(port)
        assert server.patience_s == LONGEST_PATIENCE_S
        scrape(port)
        assert LEAST_PATIENCE_S <= server.patience_s < LONGEST_PATIENCE_S
    visits = exposition._Visits()
    for asked_s, patience_s in [(0, LONGEST_PATIENCE_S), (10, 20), (10.25, LEAST_PATIENCE_S), (90, LONGEST_PATIENCE_S)]:
        visits.note(asked_s)
        assert visits.patience_s == patience_s


def test_the_wait_ends_with_a_scrape_that_began_after_it(registry):
    with serving(registry) as (server, port):
        scrape(port)
        began_s = time.monotonic()
        assert not server.wait_for_scrape(0.2)  # the one before does not count
        assert time.monotonic() - began_s >= 0.2
        later = threading.Timer(0.2, scrape, [port])
        later.start()
        assert server.wait_for_scrape(20)
        assert 0.2 <= time.monotonic() - began_s < 10
        later.join()


def test_a_scrape_that_had_begun_before_the_end_does_not_count():
    collecting, goes_on = threading.Event(), threading.Event()

    class Slow:
        def collect(self):
            collecting.set()
            assert goes_on.wait(20)
            yield GaugeMetricFamily("slow", "Takes its time.", value=1)

    registry = CollectorRegistry()
    registry.register(Slow())
    with serving(registry) as (server, port):
        early = threading.Thread(target=scrape, args=[port])
        early.start()
        assert collecting.wait(20)
        threading.Timer(0.1, goes_on.set).start()
        assert not server.wait_for_scrape(0.5)
        early.join()
        assert server.patience_s > 0
