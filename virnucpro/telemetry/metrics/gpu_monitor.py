"""
Samples of a run's GPUs, or of all GPUs of the host, from the driver (NVML).

NVML numbers GPUs by bus position and ignores ``CUDA_VISIBLE_DEVICES``, so a GPU is found by UUID, or by number only
where CUDA and NVML count alike. Values that the driver does not give are None. One daemon thread makes all calls: a
driver that hangs, as after a GPU falls off the bus, blocks nothing else. A driver that is not there may come later.
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
"""Seconds to wait for a sample; a later one is returned by the next call."""
HOST_CALLS = 3
"""Calls without a sample after which the GPUs of a host are lost: a busy driver takes seconds."""
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
"""Reason -> NVML's name of its bit, without idleness and clocks set by an operator."""


class GpuMonitor:
    """
    Samples GPUs; used by one thread.

    *devices*: label of each worker's device and its ``CUDA_VISIBLE_DEVICES``, empty for the CPU. Workers that share a
    GPU share its label and its sample. None: all GPUs of the host, labelled by number as nvidia-smi has it.
    """

    def __init__(
        self, devices: Sequence[tuple[str, str]] | None, nvml: Any = pynvml, environ: Mapping[str, str] | None = None
    ) -> None:
        order = (os.environ if environ is None else environ).get(ORDER_VARIABLE)
        tokens = None if devices is None else {label: token for label, token in devices if token}
        self._driver = _Driver(nvml, tokens, order)
        self._questions: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[GpuSample, ...]] = queue.SimpleQueue()
        self._is_waiting = False
        self._thread: threading.Thread | None = None
        if tokens is None or tokens:
            self._thread = threading.Thread(target=self._answer, name="gpu-monitor", daemon=True)
            self._thread.start()

    def found(self, label: str, uuid: str) -> None:
        """Note the UUID of a worker's GPU, with or without its prefix."""
        self._driver.reported[label] = uuid

    def sample(self) -> tuple[GpuSample, ...]:
        """Return a sample of each GPU that answers within ``ANSWER_LIMIT_S``."""
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
        """Close the driver; a hung one is abandoned."""
        if self._thread is not None:
            self._questions.put(False)
            self._thread.join(ANSWER_LIMIT_S)
            self._thread = None

    def _answer(self) -> None:
        is_there = False
        while self._questions.get():
            is_there = is_there or self._driver.open()
            self._answers.put(self._driver.samples() if is_there else ())
        if is_there:
            self._driver.close()


class HostGpus:
    """
    Samples all GPUs of this host, whichever program uses them; for any thread.

    A GPU that answered before and does not now is among the samples without a value: lost, or its driver hangs.
    """

    def __init__(self, nvml: Any = pynvml) -> None:
        self._monitor = GpuMonitor(None, nvml)
        self._lock = threading.Lock()
        self._lost: dict[str, GpuSample] = {}
        """UUID -> the sample of a GPU that does not answer, for each that ever did."""

    def samples(self) -> tuple[GpuSample, ...]:
        """Return a sample of each GPU seen so far, within ``HOST_CALLS`` times ``ANSWER_LIMIT_S``."""
        with self._lock:
            calls = (self._monitor.sample() for _ in range(HOST_CALLS))
            answers = {one.uuid: one for one in next(filter(None, calls), ())}
            self._lost |= {one.uuid: one.without_values() for one in answers.values()}
            return tuple((self._lost | answers).values())


def uuids_of(tokens: Sequence[str], *, nvml: Any = pynvml, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the UUID of each GPU or MIG instance that the driver identifies with certainty, by its token."""
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
    """NVML, for one thread; the keys of *tokens* are the labels of the sampled GPUs, None: of all, by number."""

    def __init__(self, nvml: Any, tokens: Mapping[str, str] | None, order: str | None) -> None:
        self._nvml = nvml
        self._order = order
        self._tokens = tokens
        self.reported: dict[str, str] = {}
        """Label -> UUID reported by its worker."""
        self._found: dict[str, tuple[str | None, Any]] = {}
        """Label -> the reported UUID at the last look-up, and the handle or None."""

    def open(self) -> bool:
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError:
            return False
        return True

    def close(self) -> None:
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def samples(self) -> tuple[GpuSample, ...]:
        if self._tokens is None:
            handles = [(str(number), handle) for number, handle in enumerate(self._handles())]
        else:
            handles = [(label, self._handle(label)) for label in self._tokens]
        samples = (self._sample(label, handle) for label, handle in handles if handle is not None)
        return tuple(sample for sample in samples if not (sample is None or sample.is_lost))

    def uuid(self, label: str) -> str | None:
        """Return the UUID of a GPU, None where it is uncertain."""
        handle = self._handle(label)
        return None if handle is None else self._query("nvmlDeviceGetUUID", handle)

    def _handle(self, label: str) -> Any:
        reported = self.reported.get(label)
        if label not in self._found or self._found[label][0] != reported:
            assert self._tokens is not None
            self._found[label] = reported, self._look_for(self._tokens[label], reported)
        return self._found[label][1]

    def _look_for(self, token: str, reported: str | None) -> Any:
        """Return the handle of the GPU or MIG instance, None where it is uncertain."""
        if token.startswith("MIG-"):
            return self._query("nvmlDeviceGetHandleByUUID", token)
        handles = self._handles()
        uuids = [self._query("nvmlDeviceGetUUID", handle) or "" for handle in handles]
        if token.isdigit():
            if reported is None:
                return handles[int(token)] if int(token) < len(handles) and self._counts_as_cuda(handles) else None
            bare = reported.removeprefix("GPU-").removeprefix("MIG-")
            if f"GPU-{bare}" in uuids:
                return handles[uuids.index(f"GPU-{bare}")]
            return self._query("nvmlDeviceGetHandleByUUID", f"MIG-{bare}")
        matching = [handle for handle, uuid in zip(handles, uuids, strict=True) if uuid.startswith(token)]
        return matching[0] if len(matching) == 1 else None  # CUDA takes a unique prefix of a UUID

    def _handles(self) -> list[Any]:
        """Return the handles of all GPUs, None for a lost one."""
        count = self._query("nvmlDeviceGetCount") or 0
        return [self._query("nvmlDeviceGetHandleByIndex", number) for number in range(count)]

    def _counts_as_cuda(self, handles: Sequence[Any]) -> bool:
        """Whether CUDA numbers GPUs as NVML does: CUDA skips lost ones, sorts by speed and splits by MIG."""
        names = [self._query("nvmlDeviceGetName", handle) for handle in handles]
        modes = [self._query("nvmlDeviceGetMigMode", handle) or [0, 0] for handle in handles]
        if None in names or any(current for current, _ in modes):
            return False
        return self._order == NVML_ORDER or len(set(names)) == 1

    def _sample(self, label: str, handle: Any) -> GpuSample | None:
        nvml = self._nvml
        rates = self._query("nvmlDeviceGetUtilizationRates", handle)
        memory = self._query("nvmlDeviceGetMemoryInfo", handle, nvml.nvmlMemory_v2)
        milliwatts = self._query("nvmlDeviceGetPowerUsage", handle)
        celsius = self._query("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU)
        megahertz = self._query("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM)
        reasons = self._query("nvmlDeviceGetCurrentClocksEventReasons", handle)
        uuid = self._query("nvmlDeviceGetUUID", handle)
        if uuid is None:
            return None
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

    def _query(self, function: str, *arguments: Any) -> Any:
        """Return the driver's answer, None on any error."""
        if None in arguments:
            return None
        try:
            return getattr(self._nvml, function)(*arguments)
        except Exception:  # noqa: BLE001  an older library lacks functions, a broken driver may raise anything
            return None
