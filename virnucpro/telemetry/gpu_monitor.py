"""
How the run's GPUs do, as the driver tells through NVML.

NVML numbers GPUs by their place on the bus and knows nothing of ``CUDA_VISIBLE_DEVICES``; so a GPU is found by its
UUID, or by its number only where CUDA counts as NVML does. Without a driver there are no samples. What the driver does
not tell, or no more, is absent by itself. All calls are made by one daemon thread, so that a driver that hangs (a GPU
that fell off the bus can do that) holds up nobody.
"""

from __future__ import annotations

import os
import queue
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pynvml

from virnucpro.telemetry.snapshot import GpuSample
from virnucpro.this_host import host_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ANSWER_LIMIT_S = 1.0
"""Seconds that the driver may take for a sample; one that comes later is shown the next time."""
ORDER_VARIABLE = "CUDA_DEVICE_ORDER"
NVML_ORDER = "PCI_BUS_ID"
THROTTLE_REASONS = {
    "power_cap": "nvmlClocksEventReasonSwPowerCap",
    "hardware_slowdown": "nvmlClocksEventReasonHwSlowdown",
    "sync_boost": "nvmlClocksEventReasonSyncBoost",
    "software_thermal": "nvmlClocksEventReasonSwThermalSlowdown",
    "hardware_thermal": "nvmlClocksEventReasonHwThermalSlowdown",
    "power_brake": "nvmlClocksEventReasonHwPowerBrakeSlowdown",
}
"""What slows a GPU down -> NVML's name of its bit. Being idle and clocks that somebody has set are none of it."""


class GpuMonitor:
    """
    Samples the GPUs of a run; used by one thread.

    Args:
        devices: Label and token of each worker's device; the token is what the worker's ``CUDA_VISIBLE_DEVICES`` is,
            empty for the CPU. Workers that share a GPU have one label and get one sample.
        nvml: The module, or something with its functions.
        environ: Where the order of CUDA's numbers is looked up, by default this process's environment.
    """

    def __init__(
        self, devices: Sequence[tuple[str, str]], nvml: Any = pynvml, environ: Mapping[str, str] | None = None
    ) -> None:
        order = (os.environ if environ is None else environ).get(ORDER_VARIABLE)
        self._driver = _Driver(nvml, {label: token for label, token in devices if token}, order)
        self._questions: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[GpuSample, ...]] = queue.SimpleQueue()
        self._is_waiting = False
        self._thread: threading.Thread | None = None
        if self._driver.tokens:
            self._thread = threading.Thread(target=self._answer, name="gpu-monitor", daemon=True)
            self._thread.start()

    def found(self, label: str, uuid: str) -> None:
        """Take in which GPU a worker computes on: *uuid* as CUDA or the framework has it, with or without a prefix."""
        self._driver.said[label] = uuid

    def sample(self) -> tuple[GpuSample, ...]:
        """Return a sample of each GPU that could be found and tells something, within ``ANSWER_LIMIT_S``."""
        if self._thread is None:
            return ()
        if not self._is_waiting:
            self._questions.put(True)
            self._is_waiting = True
        try:
            samples = self._answers.get(timeout=ANSWER_LIMIT_S)
        except queue.Empty:
            return ()
        self._is_waiting = False
        return samples

    def close(self) -> None:
        """Leave the driver; not waited for when it hangs."""
        if self._thread is not None:
            self._questions.put(False)
            self._thread.join(ANSWER_LIMIT_S)
            self._thread = None

    def _answer(self) -> None:
        is_there = self._driver.open()
        while self._questions.get():
            self._answers.put(self._driver.samples() if is_there else ())
        if is_there:
            self._driver.close()


def uuids_of(tokens: Sequence[str], *, nvml: Any = pynvml, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """
    Return the UUIDs of GPUs and MIG instances; what the driver does not tell for certain is left out.

    Args:
        tokens: Numbers as CUDA counts, and UUIDs or their beginnings.
        nvml: The module, or something with its functions.
        environ: Where the order of CUDA's numbers is looked up, by default this process's environment.
    """
    driver = _Driver(
        nvml, {token: token for token in tokens}, (os.environ if environ is None else environ).get(ORDER_VARIABLE)
    )
    if not driver.open():
        return {}
    try:
        return {token: uuid for token in tokens if (uuid := driver.uuid(token)) is not None}
    finally:
        driver.close()


class _Driver:
    """NVML itself, for one thread; the keys of *tokens* are the labels of the GPUs that are sampled."""

    def __init__(self, nvml: Any, tokens: Mapping[str, str], order: str | None) -> None:
        self._nvml = nvml
        self._order = order
        self.tokens = tokens
        self.said: dict[str, str] = {}
        """Label -> UUID, as the workers said."""
        self._found: dict[str, tuple[str | None, Any]] = {}
        """Label -> what had been said when it was looked for, and the GPU's handle or None."""

    def open(self) -> bool:
        """Return whether there is a driver."""
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError:
            return False
        return True

    def close(self) -> None:
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def samples(self) -> tuple[GpuSample, ...]:
        handles = [(label, self._handle(label)) for label in self.tokens]
        samples = (self._sample(label, handle) for label, handle in handles if handle is not None)
        return tuple(sample for sample in samples if sample is not None)

    def uuid(self, label: str) -> str | None:
        """Return the UUID of a GPU, None where it is not certain."""
        handle = self._handle(label)
        return None if handle is None else self._tell("nvmlDeviceGetUUID", handle)

    def _handle(self, label: str) -> Any:
        said = self.said.get(label)
        if label not in self._found or self._found[label][0] != said:
            self._found[label] = said, self._look_for(self.tokens[label], said)
        return self._found[label][1]

    def _look_for(self, token: str, said: str | None) -> Any:
        """Return the handle of the GPU or MIG instance, or None where it is not certain which it is."""
        if token.startswith("MIG-"):
            return self._tell("nvmlDeviceGetHandleByUUID", token)
        handles = self._handles()
        uuids = [self._tell("nvmlDeviceGetUUID", handle) or "" for handle in handles]
        if token.isdigit():
            if said is None:
                return handles[int(token)] if int(token) < len(handles) and self._counts_as_cuda(handles) else None
            bare = said.removeprefix("GPU-").removeprefix("MIG-")
            if f"GPU-{bare}" in uuids:
                return handles[uuids.index(f"GPU-{bare}")]
            return self._tell("nvmlDeviceGetHandleByUUID", f"MIG-{bare}")
        matching = [handle for handle, uuid in zip(handles, uuids, strict=True) if uuid.startswith(token)]
        return matching[0] if len(matching) == 1 else None  # CUDA takes the beginning of a UUID where it is one GPU's

    def _handles(self) -> list[Any]:
        """Return the handles of all GPUs, None for one that is lost."""
        count = self._tell("nvmlDeviceGetCount") or 0
        return [self._tell("nvmlDeviceGetHandleByIndex", number) for number in range(count)]

    def _counts_as_cuda(self, handles: Sequence[Any]) -> bool:
        """Whether CUDA's numbers are NVML's: it leaves out lost GPUs, puts fast ones first, and splits by MIG."""
        names = [self._tell("nvmlDeviceGetName", handle) for handle in handles]
        modes = [self._tell("nvmlDeviceGetMigMode", handle) or [0, 0] for handle in handles]
        if None in names or any(current for current, _ in modes):
            return False
        return self._order == NVML_ORDER or len(set(names)) == 1

    def _sample(self, label: str, handle: Any) -> GpuSample | None:
        nvml = self._nvml
        rates = self._tell("nvmlDeviceGetUtilizationRates", handle)
        memory = self._tell("nvmlDeviceGetMemoryInfo", handle, nvml.nvmlMemory_v2)
        milliwatts = self._tell("nvmlDeviceGetPowerUsage", handle)
        celsius = self._tell("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU)
        megahertz = self._tell("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM)
        reasons = self._tell("nvmlDeviceGetCurrentClocksEventReasons", handle)
        uuid = self._tell("nvmlDeviceGetUUID", handle)
        if uuid is None or all(told is None for told in (rates, memory, milliwatts, celsius, megahertz, reasons)):
            return None  # lost
        return GpuSample(
            device=label,
            uuid=uuid,
            host=host_name(),
            utilization=None if rates is None else rates.gpu / 100,
            memory_used_bytes=None if memory is None else memory.used,
            memory_total_bytes=None if memory is None else memory.total,
            power_watts=None if milliwatts is None else milliwatts / 1000,
            temperature_celsius=None if celsius is None else float(celsius),
            sm_clock_hertz=None if megahertz is None else megahertz * 1e6,
            throttle={}
            if reasons is None
            else {reason: bool(reasons & getattr(nvml, name)) for reason, name in THROTTLE_REASONS.items()},
        )

    def _tell(self, function: str, *arguments: Any) -> Any:
        """Return what the driver tells, or None."""
        if None in arguments:
            return None
        try:
            return getattr(self._nvml, function)(*arguments)
        except Exception:  # noqa: BLE001  an older library lacks functions, a broken driver may tell anything
            return None
