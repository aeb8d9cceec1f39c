"""
What only a host knows of a run on a cluster, served there: its GPUs, and what its workers use of it.

Every device task writes a reading of its own GPU and worker into the run's folder, every few seconds. One task of each
host serves the readings of all tasks of that host; when its process ends, however that is, another one takes its place.
What workers say of their work is not here: it travels to the run's driver, which counts it once. Nothing that goes
wrong here ends a task.
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
from virnucpro.telemetry.exposition import METRICS_PATH, MetricsServer, own_address
from virnucpro.telemetry.gpu_monitor import GpuMonitor
from virnucpro.telemetry.metrics import RunCollector
from virnucpro.telemetry.process_monitor import ProcessMonitor
from virnucpro.telemetry.snapshot import GpuSample, RunSnapshot, WorkerCost
from virnucpro.telemetry.status_file import from_json, to_json
from virnucpro.telemetry.target_file import TargetFile
from virnucpro.this_host import host_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from virnucpro.pipeline.devices import Device
    from virnucpro.pipeline.rank_runner import MessageHandler
    from virnucpro.run_layout import UnitsLayout
    from virnucpro.telemetry.metrics_options import HostMetricsOptions

    Tell = Callable[..., None]
    """Takes level and event of a line for people, and its fields by name."""

INTERVAL_S = 5.0
"""Seconds between two readings, and between two looks whether somebody serves this host."""
STALE_S = 30.0
"""Seconds after which a reading is not shown any more: its task is gone. One host, one clock."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a device task has seen last."""

    written: float
    """Unix time."""
    cost: WorkerCost
    """What its worker uses."""
    gpus: tuple[GpuSample, ...]
    """Its GPU, where it has one that tells."""


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
    Read, and serve where nobody else of this host does, for the time of the block; yield what is to hear the worker.

    Args:
        options: Where; None, or a network that is empty on another host than the driver's, for not at all.
        units: Of the start of the run.
        owner: The device task.
        rank: Of the task.
        device: What its worker computes on.
        model: Name of the model.
        on_message: Called with rank and message, as if the worker had logged it, for what people should know.
    """
    if options is None or not (options.network or options.driver == host_name()):
        yield lambda _rank, _message: None
        return

    def tell(level: str, event: str, **fields: object) -> None:
        on_message(rank, {"kind": "log", "level": level, "event": event, "fields": fields})

    serving = _Serving(units.readings_dir, options, tell)
    with _Readings(units.reading(owner), serving, tell, rank=rank, device=device, model=model) as readings:
        yield readings.hear


class _Readings:
    """Keeps the reading of one device task up to date, with a thread of its own."""

    def __init__(self, path: Path, serving: _Serving, tell: Tell, *, rank: int, device: Device, model: str) -> None:
        self._path = path
        self._serving = serving
        self._tell = tell
        self._rank, self._device, self._model = rank, device, model
        self._gpus = GpuMonitor([(device.label, device.token)])
        self._processes = ProcessMonitor()
        self._pid: int | None = None
        self._used_s: dict[int, float] = {}
        """Process -> its processor seconds."""
        self._was_refused = False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._go_on, name="host-metrics", daemon=True)

    def hear(self, _rank: int, message: dict[str, Any]) -> None:
        """Take in which process the worker is, and on which GPU."""
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

    def _go_on(self) -> None:
        while True:
            try:
                self._write()
                self._serving.begin_unless_served()
            except OSError as error:  # the folder may come back
                if not self._was_refused:
                    self._was_refused = True
                    self._tell("warning", "metrics.not_read", path=str(self._path), reason=_reason(error))
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
    The endpoint of this host, in the one process that has it.

    Who that is, the kernel says: a name among its sockets that one process can have, and loses when it ends.
    """

    def __init__(self, folder: Path, options: HostMetricsOptions, tell: Tell) -> None:
        self._folder = folder
        self._options = options
        self._tell = tell
        self._place: socket.socket | None = None
        self._server: MetricsServer | None = None
        self._target: TargetFile | None = None

    def begin_unless_served(self) -> None:
        """Serve from now on, unless this host is served already."""
        if self._place is not None or (place := _place_of_host(self._options.run_id)) is None:
            return
        self._place = place  # kept whatever comes: no other task of this host would do better
        try:
            address = self._begin()
        except OSError as error:
            self._tell("warning", "metrics.not_served", reason=_reason(error))
            return
        self._tell("info", "metrics.served", address=f"http://{address}{METRICS_PATH}")
        if self._options.targets_dir is not None:
            target = TargetFile(Path(self._options.targets_dir), self._options.run_id, address, is_of_host=True)
            try:
                target.start()
                self._target = target
            except OutputError as error:
                self._tell("warning", "metrics.no_target_file", path=error.path, reason=error.what)

    def stop(self) -> None:
        """Serve no more, and let another task do it; does nothing where nothing was begun."""
        if self._target is not None:
            self._target.stop()
        if self._server is not None:
            self._server.stop()
        if self._place is not None:
            self._place.close()

    def _begin(self) -> str:
        """Start the server; return its address. Where the port is taken, as by the driver, it has a free one."""
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
    """Return the readings of this host's device tasks that live, the latest last."""
    found = []
    for path in folder.glob(f"{host_name()}.*"):
        with suppress(OSError, ValueError, RecursionError):  # its task has just ended, or it is nothing of ours
            reading = from_json(Reading, json.loads(path.read_bytes()))
            if reading.cost.host == host_name() and time.time() - reading.written < STALE_S:
                found.append(reading)
    return sorted(found, key=lambda reading: reading.written)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _place_of_host(run_id: str) -> socket.socket | None:
    """Return what one process of this host can hold for a run, or None where another one does."""
    place = socket.socket(socket.AF_UNIX)
    try:
        place.bind(b"\0virnucpro-metrics-" + hashlib.sha256(f"{run_id} {host_name()}".encode()).hexdigest().encode())
    except OSError:
        place.close()
        return None
    return place
