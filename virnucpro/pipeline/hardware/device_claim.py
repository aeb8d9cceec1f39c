"""
The devices of one run: exclusive while it computes, and awaited only when needed.

The device type is known at once, because it decides settings; the devices are taken after indexing, and not at all for
a finished folder. A waiting run holds its folder but no device, so runs cannot deadlock.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from datetime import datetime
from socket import gethostname
from typing import TYPE_CHECKING

import structlog

from virnucpro.errors import StoppedError, printable
from virnucpro.pipeline.devices import DeviceChoice, choose_devices
from virnucpro.pipeline.hardware.device_locks import DeviceLocks, lock_names
from virnucpro.telemetry.show import wording

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from virnucpro.pipeline.devices import Device
    from virnucpro.pipeline.hardware.device_locks import DeviceHolder
    from virnucpro.settings import Hardware
    from virnucpro.telemetry.run_telemetry import RunTelemetry

log = structlog.get_logger(__name__)

LOOK_INTERVAL_S = 0.5
"""Seconds between two attempts to take devices."""
NOTICE_INTERVAL_S = 60.0
"""Seconds between two messages on who holds them."""


class DeviceClaim:
    """
    The devices that one run computes on.

    Args:
        choice: The devices to choose from.
        granted: One device for each worker, where no lock is needed: CPUs, or devices that the caller has reserved.
    """

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
        """``cpu`` or ``cuda``."""
        return self.choice.type

    @contextmanager
    def held(self, telemetry: RunTelemetry, *, run_id: str, stop: threading.Event | None = None) -> Iterator[None]:
        """
        Hold the devices from the first ``devices()`` to the end of the block.

        Nested blocks do nothing: a prediction keeps its devices over both embedding runs.
        """
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
        """
        Return one device for each worker; the first call, within ``held``, waits for them.

        Raises:
            StoppedError: The run is stopping.
        """
        if self._granted is None:
            assert self._run is not None, "call within `held`"
            names = lock_names(self.choice.candidates)
            self._locks = DeviceLocks()
            taken = self._take(names, self._locks, *self._run)
            self._granted = self.choice.ranks([names[name] for name in taken])
        return list(self._granted)

    def _take(
        self,
        names: Mapping[str, Device],
        locks: DeviceLocks,
        telemetry: RunTelemetry,
        run_id: str,
        stop: threading.Event,
    ) -> list[str]:
        def free() -> list[str] | None:
            return locks.take(list(names), least=self.choice.least, most=self.choice.most, run_id=run_id)

        if (taken := free()) is not None:
            return taken
        began_s = time.monotonic()
        noticed_s = None
        with telemetry.waiting("devices"):
            while taken is None:
                if noticed_s is None or time.monotonic() - noticed_s >= NOTICE_INTERVAL_S:
                    noticed_s = time.monotonic()
                    text = self._waiting_for(names, locks)
                    telemetry.say(text)
                    log.info("devices.waiting", reason=text)  # for Prefect; the terminal has the line above
                if stop.wait(LOOK_INTERVAL_S):
                    raise StoppedError
                taken = free()
        got = ", ".join(names[name].label for name in taken)
        text = f"got {got} after {wording.about(time.monotonic() - began_s)}"
        telemetry.say(text)
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
