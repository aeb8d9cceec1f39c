"""
The GPUs of this host, as ``CUDA_VISIBLE_DEVICES`` names them, without importing the framework.

NVIDIA's management library (NVML) tells. Where it gives no answer but something else speaks for a GPU (containers
without it, WSL, Jetson), torch counts in a process of its own: no run falls back to the CPU for want of that library.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pynvml
import structlog

if TYPE_CHECKING:
    from collections.abc import Iterator

log = structlog.get_logger(__name__)

SIGNS = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-gpu", "/dev/nvgpu")
"""What a host with a GPU has: NVIDIA's driver, WSL, two generations of Jetson."""
FIRST_WITH_BF16 = (8, 0)
"""Compute capability of the first GPUs that compute in bfloat16 (CUDA C++ Programming Guide, table of arithmetic)."""
_COUNT_LIMIT_S = 120.0
_COUNT = "import torch; print(torch.cuda.device_count())"


def host_tokens() -> list[str]:
    """
    Return a token for each GPU, visible or not: its number, or UUIDs where a GPU is divided by MIG.

    Of divided GPUs each instance is one; without a token CUDA would show a process only the first of them.
    """
    with suppress(pynvml.NVMLError), _nvml() as count:
        return _tokens(count)
    signs = [sign for sign in SIGNS if Path(sign).exists()]
    return [str(number) for number in range(_counted_by_torch(signs[0]))] if signs else []


def gpus_without_bf16() -> list[str]:
    """Return the names of this host's GPUs that do not compute in bfloat16; empty where NVML does not tell."""
    with suppress(pynvml.NVMLError), _nvml() as count:
        gpus = list(_handles(count))
        lacking = [gpu for gpu in gpus if tuple(pynvml.nvmlDeviceGetCudaComputeCapability(gpu)) < FIRST_WITH_BF16]
        return [str(pynvml.nvmlDeviceGetName(gpu)) for gpu in lacking]
    return []


@contextmanager
def _nvml() -> Iterator[int]:
    """Yield the number of GPUs, lost ones included, while the library is open."""
    pynvml.nvmlInit()
    try:
        yield pynvml.nvmlDeviceGetCount()
    finally:
        pynvml.nvmlShutdown()


def _tokens(count: int) -> list[str]:
    uuids: list[str] = []
    is_any_divided = False
    for gpu in _handles(count):
        is_divided = _is_divided(gpu)
        is_any_divided |= is_divided
        for one in _instances(gpu) if is_divided else [gpu]:
            with suppress(pynvml.NVMLError):  # lost just now
                uuids.append(str(pynvml.nvmlDeviceGetUUID(one)))
    return uuids if is_any_divided else [str(number) for number in range(count)]


def _handles(count: int) -> Iterator[Any]:
    """Yield what NVML calls the GPUs that are not lost."""
    for number in range(count):
        with suppress(pynvml.NVMLError):
            yield pynvml.nvmlDeviceGetHandleByIndex(number)


def _is_divided(gpu: Any) -> bool:
    try:
        return bool(pynvml.nvmlDeviceGetMigMode(gpu)[0])
    except pynvml.NVMLError:  # a GPU that cannot be
        return False


def _instances(gpu: Any) -> Iterator[Any]:
    for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        with suppress(pynvml.NVMLError):  # a place that is not taken
            yield pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number)


@cache
def _counted_by_torch(sign: str) -> int:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _COUNT], capture_output=True, text=True, timeout=_COUNT_LIMIT_S, check=False
        )
        count = int(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        count = 0
    if count:
        log.warning("gpus.counted_by_torch", gpus=count, reason="NVML gives no answer: utilisation is not shown")
    else:
        what = f"{sign} speaks for a GPU, but neither NVML nor torch finds one: computing on the CPU"
        log.warning("gpus.not_found", reason=what, visible=os.environ.get("CUDA_VISIBLE_DEVICES"))
    return count
