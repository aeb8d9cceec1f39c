"""
A run's metrics for whoever asks: over HTTP, and as a file at the end.

Both collect a ``prometheus_client`` registry at the moment of asking; neither knows what is in it. A reader that is
slow, hangs or goes away holds up nobody but itself, and one that asks regularly can be waited for at the end, so that
the last figures are seen.
"""

from __future__ import annotations

import ipaddress
import socket
import socketserver
import sys
import threading
import time
from http.server import ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psutil
from prometheus_client import MetricsHandler, generate_latest

from virnucpro import durable

if TYPE_CHECKING:
    from pathlib import Path

    from prometheus_client import CollectorRegistry

LOOPBACK = "127.0.0.1"
METRICS_PATH = "/metrics"
SCRAPER_HEADER = "X-Prometheus-Scrape-Timeout-Seconds"
"""What Prometheus and its relatives send with each request, and people with curl or a browser do not."""
READER_LIMIT_S = 10.0
"""Seconds for a reader to send its request, and again to take the answer."""
MOST_READERS = 16
"""At the same time; more are turned away."""
LEAST_PATIENCE_S = 5.0
"""Seconds for which a scraper that has come before is waited for in any case: a busy machine keeps no rhythm."""
LONGEST_PATIENCE_S = 30.0
"""Seconds that the end of a run waits for a scraper at the most."""
_POLL_S = 0.2


def own_address(network: str) -> str:
    """
    Return the IPv4 address by which this host is reached within a network.

    Args:
        network: As in 10.1.0.0/16; empty for this host alone, which is ``LOOPBACK``.

    Raises:
        OSError: This host has no address in it.
    """
    if not network:
        return LOOPBACK
    around = ipaddress.IPv4Network(network, strict=False)
    found = [address for interface in psutil.net_if_addrs().values() for address in interface]
    ours = [one.address for one in found if one.family == socket.AF_INET]
    within = [one for one in ours if ipaddress.IPv4Address(one) in around]
    if not within:
        raise OSError(f"this host has no address in {network}")
    return min(within, key=lambda one: ipaddress.IPv4Address(one).is_loopback)  # 0.0.0.0/0 holds both


class MetricsServer:
    """
    Serves a registry at ``http://ADDRESS:PORT/metrics``, from threads of its own that never keep a process alive.

    Args:
        registry: Collected anew for each reader.
        port: 0 for a free one.
        address: Of the interface; the default is reached from this host only.
    """

    def __init__(self, registry: CollectorRegistry, port: int, address: str = LOOPBACK) -> None:
        self.address = address
        self._registry = registry
        self._port = port
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> int:
        """
        Serve from now on; return the port.

        Raises:
            OSError: The port is taken, or not ours to use.
        """
        self._server = _Server((self.address, self._port), self._registry)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="metrics-server", daemon=True
        )
        self._thread.start()
        return int(self._server.server_address[1])

    @property
    def patience_s(self) -> float:
        """
        Seconds within which a scraper's next visit is to be expected; 0 when none has come.

        Twice the time between its last two visits, ``LEAST_PATIENCE_S`` at the least; after a single one, and at the
        most, ``LONGEST_PATIENCE_S``.
        """
        return self._server.visits.patience_s if self._server is not None else 0.0

    def wait_for_scrape(self, limit_s: float) -> bool:
        """
        Wait until a scraper has come that asked after this call began; return whether one has.

        Args:
            limit_s: Seconds to wait at the most. An exception from a signal handler ends the wait at once.
        """
        return self._server is not None and self._server.visits.wait_for_next(limit_s)

    def stop(self) -> None:
        """Serve no more; does nothing where nothing was started. Readers that are being served are not waited for."""
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._server = None


class _Visits:
    """When scrapers came."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._before: float | None = None
        self._last: float | None = None

    def note(self, asked_s: float) -> None:
        """Take in that a scraper that asked at *asked_s* (monotonic) has its answer."""
        with self._changed:
            self._before, self._last = self._last, asked_s
            self._changed.notify_all()

    @property
    def patience_s(self) -> float:
        with self._changed:
            if self._last is None:
                return 0.0
            if self._before is None:
                return LONGEST_PATIENCE_S
            return min(max(2 * abs(self._last - self._before), LEAST_PATIENCE_S), LONGEST_PATIENCE_S)

    def wait_for_next(self, limit_s: float) -> bool:
        began_s = time.monotonic()
        with self._changed:
            return self._changed.wait_for(lambda: self._last is not None and self._last >= began_s, limit_s)


class _Server(ThreadingHTTPServer):
    """Takes a bounded number of readers, each in a daemon thread."""

    request_queue_size = MOST_READERS

    def __init__(self, address: tuple[str, int], registry: CollectorRegistry) -> None:
        self.registry = registry
        self.visits = _Visits()
        self._places = threading.BoundedSemaphore(MOST_READERS)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Take the port; the parent's version also asks the name service, which may take its time."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a reader in a thread, or turn it away."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a reader."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of readers that went away or were too slow; anything else is a defect of ours."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(MetricsHandler):
    timeout = READER_LIMIT_S
    server: _Server

    def do_GET(self) -> None:  # noqa: N802  the base class's name
        """Answer a reader."""
        if urlsplit(self.path).path != METRICS_PATH:
            self.send_error(404, f"metrics are at {METRICS_PATH}")
            return
        asked_s = time.monotonic()
        self.registry = self.server.registry
        super().do_GET()
        if SCRAPER_HEADER in self.headers:
            self.server.visits.note(asked_s)


def write_textfile(registry: CollectorRegistry, path: Path) -> None:
    """
    Write what *registry* holds now in Prometheus' text format, whole or not at all.

    Raises:
        OutputError: The system refused.
    """
    durable.write_bytes(path, generate_latest(registry))
