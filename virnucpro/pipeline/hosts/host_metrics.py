"""
Metrics that only a host of a cluster run knows, served there: its GPUs, and the cost of its workers.

Each device task writes a reading of its GPU and worker into the run's folder every few seconds. One task of each host
serves all readings of that host; when it ends, another takes over. The work of workers is counted by the driver
instead. No failure here ends a task.
"""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from prometheus_client import CollectorRegistry

from virnucpro.errors import OutputError
from virnucpro.telemetry.metrics.exposition import METRICS_PATH, MetricsServer, TargetFile, own_address
from virnucpro.telemetry.metrics.gpu_monitor import GpuMonitor
from virnucpro.telemetry.metrics.process_monitor import ProcessMonitor
from virnucpro.telemetry.metrics.table import RunCollector
from virnucpro.telemetry.show.status_file import from_json, to_json
from virnucpro.telemetry.snapshot import GpuSample, RunSnapshot, WorkerCost
from virnucpro.this_host import host_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from virnucpro.pipeline.devices import Device
    from virnucpro.pipeline.work.rank_runner import MessageHandler
    from virnucpro.run_layout import UnitsLayout
    from virnucpro.telemetry.metrics.options import HostMetricsOptions

    Report = Callable[..., None]
    """Takes level, event and fields of a line for users."""

INTERVAL_S = 5.0
"""Seconds between two readings, and between two attempts to serve this host."""
STALE_S = 30.0
"""Age in seconds from which a reading is ignored: its task has ended."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The last sample of a device task."""

    written: float
    """Unix time."""
    cost: WorkerCost
    gpus: tuple[GpuSample, ...]
    """At most one."""


@contextmanager
def host_metrics(
    options: HostMetricsOptions | None,
    units: UnitsLayout,
    owner: str,
    *,
    rank: int,
    device: Device,
    model: str,
    on_message: MessageHandler,
) -> Iterator[MessageHandler]:
    """
    Sample during the block, and serve unless another task of this host does; yield the handler of worker messages.

    Args:
        options: Where to serve; None, or an empty network on a host other than the driver's, disables it.
    """
    if options is None or not (options.network or options.driver == host_name()):
        yield lambda _rank, _message: None
        return

    def report(level: str, event: str, **fields: object) -> None:
        on_message(rank, {"kind": "log", "level": level, "event": event, "fields": fields})

    serving = _Serving(units.readings_dir, options, report)
    with _Readings(units.reading(owner), serving, report, rank=rank, device=device, model=model) as readings:
        yield readings.on_message


class _Readings:
    """Keeps the reading of one device task up to date, in a thread."""

    def __init__(self, path: Path, serving: _Serving, report: Report, *, rank: int, device: Device, model: str) -> None:
        self._path = path
        self._serving = serving
        self._report = report
        self._rank, self._device, self._model = rank, device, model
        self._gpus = GpuMonitor([(device.label, device.token)])
        self._processes = ProcessMonitor()
        self._pid: int | None = None
        self._used_s: dict[int, float] = {}
        """Process -> processor seconds."""
        self._was_refused = False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="host-metrics", daemon=True)

    def on_message(self, _rank: int, message: dict[str, Any]) -> None:
        """Note the worker's process and GPU."""
        if message.get("kind") == "heartbeat":
            self._pid = message.get("pid", self._pid)
        elif uuid := message.get("gpu_uuid"):
            self._gpus.found(self._device.label, str(uuid))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()
        self._serving.stop()
        self._gpus.close()
        with suppress(OSError):
            self._path.unlink()

    def _run(self) -> None:
        while True:
            try:
                self._write()
                self._serving.begin_unless_served()
            except OSError as error:  # the folder may come back
                if not self._was_refused:
                    self._was_refused = True
                    self._report("warning", "metrics.not_read", path=str(self._path), reason=_reason(error))
            if self._ending.wait(INTERVAL_S):
                return

    def _write(self) -> None:
        resident_bytes = None
        if self._pid is not None and (found := self._processes.sample({self._rank: self._pid})):
            self._used_s[self._pid], resident_bytes = found[self._rank].cpu_s, found[self._rank].resident_bytes
        cost = WorkerCost(
            rank=self._rank,
            host=host_name(),
            device=self._device.label,
            model=self._model,
            cpu_s=sum(self._used_s.values()) if self._used_s else None,
            resident_bytes=resident_bytes,
        )
        reading = Reading(written=time.time(), cost=cost, gpus=self._gpus.sample())
        temporary = self._path.with_name(f".{self._path.name}")
        temporary.write_text(json.dumps(to_json(reading)))
        temporary.replace(self._path)


class _Serving:
    """
    The endpoint of this host, in one of its processes.

    An abstract socket name decides which: only one process can bind it, and loses it when it ends.
    """

    def __init__(self, folder: Path, options: HostMetricsOptions, report: Report) -> None:
        self._folder = folder
        self._options = options
        self._report = report
        self._place: socket.socket | None = None
        self._server: MetricsServer | None = None
        self._target: TargetFile | None = None

    def begin_unless_served(self) -> None:
        """Start serving, unless another process of this host does."""
        if self._place is not None or (place := _place_of_host(self._options.run_id)) is None:
            return
        self._place = place  # kept even after a failure: no other task of this host would succeed
        try:
            address = self._begin()
        except OSError as error:
            self._report("warning", "metrics.not_served", reason=_reason(error))
            return
        self._report("info", "metrics.served", address=f"http://{address}{METRICS_PATH}")
        if self._options.targets_dir is not None:
            target = TargetFile(Path(self._options.targets_dir), self._options.run_id, address, is_of_host=True)
            try:
                target.start()
                self._target = target
            except OutputError as error:
                self._report("warning", "metrics.no_target_file", path=error.path, reason=error.what)

    def stop(self) -> None:
        """Stop serving, so that another task can."""
        if self._target is not None:
            self._target.stop()
        if self._server is not None:
            self._server.stop()
        if self._place is not None:
            self._place.close()

    def _begin(self) -> str:
        """Start the server and return its address; a port in use, such as the driver's, is replaced by a free one."""
        registry = CollectorRegistry()
        registry.register(RunCollector(self._snapshot))
        address = own_address(self._options.network)
        for port in dict.fromkeys((self._options.port, 0)):
            self._server = MetricsServer(registry, port, address)
            try:
                return f"{address}:{self._server.start()}"
            except OSError:
                self._server = None
                if not port:
                    raise
        raise AssertionError

    def _snapshot(self) -> RunSnapshot:
        readings = readings_of_host(self._folder)
        return RunSnapshot(
            run_id=self._options.run_id,
            output_dir="",
            started=0.0,
            now=time.time(),
            stages=(),
            embeddings=(),
            gpus=tuple({gpu.uuid: gpu for reading in readings for gpu in reading.gpus}.values()),
            costs=tuple({reading.cost.rank: reading.cost for reading in readings}.values()),
            disk_free_bytes=None,
            disk_size_bytes=None,
        )


def readings_of_host(folder: Path) -> list[Reading]:
    """Return the readings of this host's live device tasks, latest last."""
    found = []
    for path in folder.glob(f"{host_name()}.*"):
        with suppress(OSError, ValueError, RecursionError):  # its task has just ended, or the file is not ours
            reading = from_json(Reading, json.loads(path.read_bytes()))
            if reading.cost.host == host_name() and time.time() - reading.written < STALE_S:
                found.append(reading)
    return sorted(found, key=lambda reading: reading.written)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _place_of_host(run_id: str) -> socket.socket | None:
    """Return a socket that one process of this host can hold for a run, None when another one does."""
    place = socket.socket(socket.AF_UNIX)
    try:
        place.bind(b"\0virnucpro-metrics-" + hashlib.sha256(f"{run_id} {host_name()}".encode()).hexdigest().encode())
    except OSError:
        place.close()
        return None
    return place
