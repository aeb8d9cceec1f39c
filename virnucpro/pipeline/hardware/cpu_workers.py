"""
The default number of CPU workers: one for each core, as far as memory and input allow.

Measured (``benchmarks/scaling.py``): processes of one thread each beat one process with as many threads. Rows do not
depend on the number.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.hardware.device_claim import DeviceClaim

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virnucpro.config import ModelConfig

WORKER_BYTES = 1 << 30
"""Memory of a worker besides its weights: the framework, and a batch in flight."""
WEIGHTS_SHARE = 1.5
"""Memory for each byte of a weights file, while it is loaded."""
INPUT_BYTES = 64 * 1024
"""Input worth another worker: less is done before a second process has started."""


def default_cpu_workers(*, cores: int, memory_bytes: int, weights_bytes: int, input_bytes: int) -> int:
    """
    Return how many CPU workers to start, at least 1.

    Args:
        cores: Usable by this process.
        weights_bytes: Size of the model's weights file.
        input_bytes: Size of all input files.
    """
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
