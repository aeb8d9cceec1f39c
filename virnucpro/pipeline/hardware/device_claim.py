"""
The devices of one run: exclusive while it computes, and awaited only when needed.

The device type is known at once, because it decides settings; the devices are taken after indexing, and not at all for
a finished folder. A waiting run holds its folder but no device, so runs cannot deadlock.

By default there is a CPU worker for each core, as far as memory and input allow: processes of one thread each beat one
process with as many threads (``benchmarks/scaling.py``). Rows do not depend on the number.
"""

from __future__ import annotations

import math
import os
import threading
import time
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING

import structlog

from virnucpro.errors import StoppedError, printable
from virnucpro.pipeline.devices import CPU, DeviceChoice, choose_devices
from virnucpro.pipeline.hardware.device_locks import DeviceLocks, lock_names
from virnucpro.telemetry.show import wording

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, Sequence

    from virnucpro.config import ModelConfig
    from virnucpro.pipeline.devices import Device
    from virnucpro.pipeline.hardware.device_locks import DeviceHolder
    from virnucpro.settings import Hardware
    from virnucpro.telemetry.run_telemetry import RunTelemetry

log = structlog.get_logger(__name__)

LOOK_INTERVAL_S = 0.5
"""Seconds between two attempts to take devices."""
NOTICE_INTERVAL_S = 60.0
"""Seconds between two messages on who holds them."""
WORKER_BYTES = 1 << 30
"""Memory of a worker besides its weights: the framework, and a batch in flight."""
WEIGHTS_SHARE = 1.5
"""Memory for each byte of a weights file, while it is loaded."""
INPUT_BYTES = 64 * 1024
"""Input worth another worker: less is done before a second process has started."""


class DeviceClaim:
    """The devices of one run. *granted*: one a worker, where no lock is needed: CPUs, or reserved by the caller."""

    def __init__(self, choice: DeviceChoice, granted: Sequence[Device] | None = None) -> None:
        self.choice = choice
        self._granted = None if granted is None else list(granted)
        self._run: tuple[RunTelemetry, str, threading.Event] | None = None
        self._locks: DeviceLocks | None = None

    @classmethod
    def of(cls, devices: DeviceClaim | Sequence[Device]) -> DeviceClaim:
        """Return *devices* as a claim; a list is granted already."""
        if isinstance(devices, DeviceClaim):
            return devices
        each_once = tuple(dict.fromkeys(devices))
        return cls(DeviceChoice(candidates=each_once, least=len(each_once), most=len(each_once)), devices)

    @property
    def type(self) -> str:
        return self.choice.type

    @contextmanager
    def held(self, telemetry: RunTelemetry, *, run_id: str, stop: threading.Event | None = None) -> Iterator[None]:
        """Hold the devices from the first ``devices()`` to the end of the block; nested blocks do nothing."""
        if self._run is not None:
            yield
            return
        self._run = telemetry, run_id, stop or threading.Event()
        try:
            yield
        finally:
            self._run = None
            if self._locks is not None:
                self._locks.release()
                self._locks = self._granted = None

    def devices(self) -> list[Device]:
        """Return one device a worker; the first call, within ``held``, waits for them, or raises ``StoppedError``."""
        if self._granted is None:
            names = lock_names(self.choice.candidates)
            self._locks = DeviceLocks()
            self._granted = self.choice.ranks([names[name] for name in self._take(names, self._locks)])
        return list(self._granted)

    def keep(self, labels: Container[str]) -> None:
        """Drop the devices that have none of these labels, for the rest of the run; their locks stay."""
        self._granted = [device for device in self.devices() if device.label in labels]

    def _take(self, names: Mapping[str, Device], locks: DeviceLocks) -> list[str]:
        assert self._run is not None, "call within `held`"
        telemetry, run_id, stop = self._run
        attempt = partial(locks.take, list(names), least=self.choice.least, most=self.choice.most, run_id=run_id)
        if (taken := attempt()) is not None:
            return taken
        began_s, noticed_s = time.monotonic(), -math.inf
        with telemetry.waiting("devices"):
            while taken is None:
                if time.monotonic() - noticed_s >= NOTICE_INTERVAL_S:
                    noticed_s = time.monotonic()
                    text = self._waiting_for(names, locks)
                    telemetry.note(text)
                    log.info("devices.waiting", reason=text)  # for Prefect; the terminal has the line above
                if stop.wait(LOOK_INTERVAL_S):
                    raise StoppedError
                taken = attempt()
        got = ", ".join(names[name].label for name in taken)
        text = f"got {got} after {wording.about(time.monotonic() - began_s)}"
        telemetry.note(text)
        log.info("devices.free", reason=text)
        return taken

    def _waiting_for(self, names: Mapping[str, Device], locks: DeviceLocks) -> str:
        """Return how many devices the run waits for, and who holds them; safe for a terminal."""
        holders = [f"{device.label}: {_holder_text(locks.holder(name))}" for name, device in names.items()]
        least, most = self.choice.least, len(names)
        wanted = "all" if least == most else f"{least} of {most}" if self.choice.most == least else "any"
        return f"waiting for GPUs ({wanted} of these): {'; '.join(holders)}"


def claim_devices(choice: str, *, workers: int | None = None, workers_per_device: int = 1) -> DeviceClaim:
    """Return a claim of the chosen devices without waiting; arguments as in ``choose_devices``."""
    return claim_of(choose_devices(choice, workers=workers, workers_per_device=workers_per_device))


def claim_of(choice: DeviceChoice) -> DeviceClaim:
    """Return a claim of *choice*; CPUs need no lock."""
    return DeviceClaim(choice, choice.ranks(choice.candidates) if choice.type == "cpu" else None)


def _holder_text(holder: DeviceHolder | None) -> str:
    if holder is None:
        return "free, or held by a run that has not named it yet"
    where = "" if holder.host == gethostname() else f" on {holder.host}"
    try:
        since = datetime.fromisoformat(holder.since).strftime("%Y-%m-%d %H:%M UTC")
    except ValueError:
        since = holder.since
    return printable(f"held by process {holder.pid} of {holder.user}{where} since {since}")


def claim_for(hardware: Hardware) -> DeviceClaim:
    """Return a claim on the devices of this machine that the settings name."""
    return claim_devices(
        hardware.devices, workers=hardware.workers or None, workers_per_device=hardware.workers_per_device
    )


# --- the number of CPU workers ----------------------------------------------------------------------------------------


def default_cpu_workers(*, cores: int, memory_bytes: int, weights_bytes: int, input_bytes: int) -> int:
    """Return how many CPU workers to start, at least 1; *cores*: usable by this process."""
    by_memory = int(memory_bytes / (WEIGHTS_SHARE * weights_bytes + WORKER_BYTES))
    by_input = 1 + input_bytes // INPUT_BYTES
    return max(1, min(cores, by_memory, by_input))


def devices_for(
    claim: DeviceClaim, config: ModelConfig, fasta_files: Sequence[str | Path], *, workers: int | None
) -> DeviceClaim:
    """Return *claim*, or for CPUs without a given number of *workers* one of the default number."""
    if workers is not None or claim.type != CPU.type or claim.devices() != [CPU]:
        return claim
    count = default_cpu_workers(
        cores=usable_cores(),
        memory_bytes=free_memory_bytes(),
        weights_bytes=Path(config.weights_path).stat().st_size,
        input_bytes=sum(_size(path) for path in fasta_files),
    )
    return DeviceClaim.of([CPU] * count)


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the cores of this process by its affinity and the quota of its control group."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no control group, or "max": no quota
        return cores


def free_memory_bytes(cgroup: Path = Path("/sys/fs/cgroup"), meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return the free memory of the machine, within the limit of the control group."""
    lines = meminfo.read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    try:
        limit, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
        return max(0, min(free, limit - used))
    except (OSError, ValueError):  # no control group, or "max": no limit
        return free


def _size(path: str | Path) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:  # indexing reports it
        return 0
