"""
A run's metrics over HTTP while it runs, and the files by which Prometheus finds them (``file_sd_configs``).

Each scrape collects the registry anew. A slow client holds up only itself. A scraper that comes regularly is awaited
at the end of a run, so that it sees the last values.

There is one target file for each run, locked (``flock``) while its run lives and removed at its end. One left by a
killed run shows its target as down, until the next run or Prefect worker of this host removes it.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import os
import re
import signal
import socket
import threading
import time
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psutil
from prometheus_client import MetricsHandler

from virnucpro import durable
from virnucpro.bounded_server import BoundedHandler, BoundedServer
from virnucpro.errors import OutputError
from virnucpro.run_folders import only_regular
from virnucpro.telemetry.show.progress import say
from virnucpro.this_host import host_name, terminating_signals

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from prometheus_client import CollectorRegistry

LOOPBACK = "127.0.0.1"
METRICS_PATH = "/metrics"
SCRAPER_HEADER = "X-Prometheus-Scrape-Timeout-Seconds"
"""Sent by Prometheus and compatible scrapers, not by curl or browsers."""
MOST_READERS = 16
LEAST_PATIENCE_S = 5.0
"""Least seconds to wait for a scraper that came before: on a busy machine intervals vary."""
LONGEST_PATIENCE_S = 30.0
"""Most seconds that the end of a run waits for a scraper."""
_POLL_S = 0.2


def own_address(network: str) -> str:
    """Return this host's IPv4 address in *network* (such as 10.1.0.0/16), else OSError; ``LOOPBACK`` when empty."""
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
    """Serves a registry at ``http://ADDRESS:PORT/metrics`` from daemon threads; port 0 takes a free one."""

    def __init__(self, registry: CollectorRegistry, port: int, address: str = LOOPBACK) -> None:
        self.address = address
        self._registry = registry
        self._port = port
        self._server: _Server | None = None

    def start(self) -> int:
        """Start serving and return the port; OSError where it is in use or not permitted."""
        self._server = _Server((self.address, self._port), self._registry)
        threading.Thread(target=self._server.serve_forever, args=(_POLL_S,), name="metrics", daemon=True).start()
        return int(self._server.server_address[1])

    @property
    def patience_s(self) -> float:
        """
        Seconds within which the next scrape is expected; 0 before the first.

        Twice the interval of the last two scrapes, between ``LEAST_PATIENCE_S`` and ``LONGEST_PATIENCE_S``; the latter
        after a single scrape.
        """
        return self._server.visits.patience_s if self._server is not None else 0.0

    def wait_for_scrape(self, limit_s: float) -> bool:
        """Wait at most *limit_s* for a scrape that begins after this call; return whether one came."""
        return self._server is not None and self._server.visits.wait_for_next(limit_s)

    def stop(self) -> None:
        """Stop serving, without waiting for open requests."""
        if self._server is None:
            return
        self._server.shutdown()
        self._server.server_close()
        self._server = None


class _Visits:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._before: float | None = None
        self._last: float | None = None

    def note(self, asked_s: float) -> None:
        """Record that the scrape begun at *asked_s* (monotonic) was answered."""
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


class _Server(BoundedServer):
    def __init__(self, address: tuple[str, int], registry: CollectorRegistry) -> None:
        self.registry = registry
        self.visits = _Visits()
        super().__init__(address, _Handler, most_clients=MOST_READERS)


class _Handler(BoundedHandler, MetricsHandler):
    server: _Server

    def do_GET(self) -> None:  # noqa: N802  the base class's name
        if self.is_misdirected():
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST, "these metrics are for their own machine: ask 127.0.0.1")
            return
        if urlsplit(self.path).path != METRICS_PATH:
            self.send_error(404, f"metrics are at {METRICS_PATH}")
            return
        asked_s = time.monotonic()
        self.registry = self.server.registry
        super().do_GET()
        if SCRAPER_HEADER in self.headers:
            self.server.visits.note(asked_s)


def wait_for_last_scrape(server: MetricsServer, *, is_quiet: bool) -> None:
    """Wait until the scraper has read the final metrics; Ctrl-C ends the wait."""
    if patience_s := server.patience_s:
        if not is_quiet:
            say(f"waiting until the final metrics are read, at most {patience_s:.0f} s (Ctrl-C: not at all)")
        with _ended_by_signals():
            server.wait_for_scrape(patience_s)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let Ctrl-C, or a SIGTERM or SIGHUP that would end the process, end the block and nothing else."""
    is_main = threading.current_thread() is threading.main_thread()
    taken = [one for one in terminating_signals() if is_main and signal.getsignal(one) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, signal.default_int_handler)
    try:
        with suppress(KeyboardInterrupt):
            yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


class TargetFile:
    """The target file of one run in *folder*, which ``file_sd_configs`` names as ``FOLDER/*.json``."""

    def __init__(self, folder: Path, run_id: str, address: str) -> None:
        self.path = folder / f"virnucpro-{host_name()}-{run_id}.json"
        self._content = [{"targets": [address], "labels": {"run_id": run_id}}]
        self._descriptor: int | None = None

    def start(self) -> None:
        """Remove the files of ended runs of this host and add this one."""
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        try:
            durable.make_folder(self.path.parent)
            remove_forgotten_targets(self.path.parent)
            self._descriptor = only_regular(os.fspath(temporary), os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # before the rename: it is never unlocked
            os.write(self._descriptor, json.dumps(self._content).encode())
            temporary.replace(self.path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            self.stop()
            raise OutputError(self.path, error.strerror or str(error)) from error

    def stop(self) -> None:
        if self._descriptor is None:
            return
        with suppress(OSError):  # the next run removes it: it is no longer locked
            self.path.unlink()
        os.close(self._descriptor)
        self._descriptor = None


def remove_forgotten_targets(folder: Path) -> None:
    """Remove the files that ended runs of this host left; OSError where *folder* cannot be read."""
    of_this_host = re.compile(rf"virnucpro-{re.escape(host_name())}-[^-]+\.json")
    for path in folder.iterdir():
        if of_this_host.fullmatch(path.name):
            with suppress(OSError):  # its run is alive, or another user owns it, or it is being removed
                _remove_unless_held(path)


def _remove_unless_held(path: Path) -> None:
    # opened for writing: an exclusive lock over NFS needs it
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    finally:
        os.close(descriptor)
