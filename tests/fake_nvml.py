"""A hand-written NVML: functions, structures, constants and errors of ``pynvml``, over GPUs that a test describes."""

# ruff: noqa: N802  the functions have pynvml's names

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field

import pynvml


@dataclass
class FakeGpu:
    """A GPU, or a MIG instance, in NVML's own units."""

    uuid: str
    name: str = "NVIDIA H200"
    utilization_percent: int = 0
    memory_used_bytes: int = 0
    memory_total_bytes: int = 0
    power_milliwatts: int = 0
    temperature_celsius: int = 0
    sm_clock_megahertz: int = 0
    reasons: int = pynvml.nvmlClocksEventReasonNone
    failing: dict[str, int] = field(default_factory=dict)
    """Function -> the error code that it gives for this GPU."""
    lost: bool = False
    """It fell off the bus: every call gives an error."""
    instances: list[FakeGpu] = field(default_factory=list)
    """MIG instances; MIG is on when there are some."""


class FakeNvml:
    """Stands in for the module ``pynvml``."""

    NVMLError = pynvml.NVMLError
    NVML_TEMPERATURE_GPU = pynvml.NVML_TEMPERATURE_GPU
    NVML_CLOCK_SM = pynvml.NVML_CLOCK_SM
    nvmlMemory_v2 = pynvml.nvmlMemory_v2
    nvmlClocksEventReasonGpuIdle = pynvml.nvmlClocksEventReasonGpuIdle
    nvmlClocksEventReasonApplicationsClocksSetting = pynvml.nvmlClocksEventReasonApplicationsClocksSetting
    nvmlClocksEventReasonSwPowerCap = pynvml.nvmlClocksEventReasonSwPowerCap
    nvmlClocksEventReasonHwSlowdown = pynvml.nvmlClocksEventReasonHwSlowdown
    nvmlClocksEventReasonSyncBoost = pynvml.nvmlClocksEventReasonSyncBoost
    nvmlClocksEventReasonSwThermalSlowdown = pynvml.nvmlClocksEventReasonSwThermalSlowdown
    nvmlClocksEventReasonHwThermalSlowdown = pynvml.nvmlClocksEventReasonHwThermalSlowdown
    nvmlClocksEventReasonHwPowerBrakeSlowdown = pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown

    def __init__(self, gpus=(), *, has_driver=True):
        self.gpus = list(gpus)
        self.has_driver = has_driver
        self.users = 0
        self.goes_on = threading.Event()
        """While it is not set, the driver hangs."""
        self.goes_on.set()
        self.threads = set()
        """Names of the threads that called."""

    def nvmlInit(self):
        self.threads.add(threading.current_thread().name)
        if not self.has_driver:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        self.users += 1

    def nvmlShutdown(self):
        self._check()
        self.users -= 1

    def nvmlDeviceGetCount(self):
        self._check()
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        self._check()
        if not 0 <= index < len(self.gpus):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self._ask(self.gpus[index], "nvmlDeviceGetHandleByIndex")

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self._check()
        for gpu in itertools.chain(self.gpus, *(whole.instances for whole in self.gpus)):
            if gpu.uuid == uuid:
                return self._ask(gpu, "nvmlDeviceGetHandleByUUID")
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetUUID(self, handle):
        return self._ask(handle, "nvmlDeviceGetUUID").uuid

    def nvmlDeviceGetName(self, handle):
        return self._ask(handle, "nvmlDeviceGetName").name

    def nvmlDeviceGetMigMode(self, device):
        gpu = self._ask(device, "nvmlDeviceGetMigMode")
        return [int(bool(gpu.instances))] * 2

    def nvmlDeviceGetUtilizationRates(self, handle):
        gpu = self._ask(handle, "nvmlDeviceGetUtilizationRates")
        return pynvml.c_nvmlUtilization_t(gpu=gpu.utilization_percent, memory=99)

    def nvmlDeviceGetMemoryInfo(self, handle, version=None):
        gpu = self._ask(handle, "nvmlDeviceGetMemoryInfo")
        reserved = 1 << 20
        if version is None:  # the first version counts what the driver keeps for itself as used
            return pynvml.c_nvmlMemory_t(total=gpu.memory_total_bytes, used=gpu.memory_used_bytes + reserved)
        assert version == pynvml.nvmlMemory_v2
        return pynvml.c_nvmlMemory_v2_t(total=gpu.memory_total_bytes, used=gpu.memory_used_bytes, reserved=reserved)

    def nvmlDeviceGetPowerUsage(self, handle):
        return self._ask(handle, "nvmlDeviceGetPowerUsage").power_milliwatts

    def nvmlDeviceGetTemperature(self, handle, sensor):
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return self._ask(handle, "nvmlDeviceGetTemperature").temperature_celsius

    def nvmlDeviceGetClockInfo(self, handle, type):  # noqa: A002  pynvml's name
        assert type == pynvml.NVML_CLOCK_SM
        return self._ask(handle, "nvmlDeviceGetClockInfo").sm_clock_megahertz

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        return self._ask(handle, "nvmlDeviceGetCurrentClocksEventReasons").reasons

    def _check(self):
        self.threads.add(threading.current_thread().name)
        assert self.goes_on.wait(60)
        if not self.users or not self.has_driver:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)

    def _ask(self, gpu, function):
        self._check()
        if gpu.lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        if function in gpu.failing:
            raise pynvml.NVMLError(gpu.failing[function])
        return gpu
