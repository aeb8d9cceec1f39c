"""
A command watched while it runs: CPU seconds and peak memory of every process of its tree, bytes of its folder.

CPU seconds of the whole tree are the kernel's, of processes that outlive their parent, too. All else is sampled every
``INTERVAL_S``: a peak is the kernel's own (VmHWM) at the last sample before the process ended.
"""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

INTERVAL_S = 0.05
SAMPLES_PER_LOOK_AT_FOLDER = 4
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PR_SET_CHILD_SUBREAPER = 36
LOG_SHOWN = 2_000
"""Characters of the log of a command that failed."""


@dataclass
class Process:
    """One process of the tree, as last seen."""

    is_worker: bool
    """A worker of the command's own process, not a process that a worker starts."""
    cpu_s: float = 0.0
    peak_bytes: int = 0


@dataclass
class Watched:
    """What a command took."""

    cpu_s: float = 0.0
    """User and system, of all processes."""
    wall_s: float = 0.0
    processes: dict[int, Process] = field(default_factory=dict)
    """By pid; the command's own is the first."""
    first_worker_s: float | None = None
    """Since the start."""
    with_workers_s: float = 0.0
    """Wall time in which there were workers; they may come twice."""
    parent_before_cpu_s: float = 0.0
    """CPU seconds of the command's own process until the first worker was seen."""
    parent_with_cpu_s: float = 0.0
    """And while there were workers."""
    last_sample: tuple[float, float] = (0.0, 0.0)
    """Since the start, and CPU seconds of the command's own process."""
    folder_peak_bytes: int = 0
    folder_bytes: int = 0
    """At the end."""

    def to_json(self) -> dict[str, object]:
        """Return plain data: seconds, MB of 10^6 bytes, and the phases before and with workers, and the rest."""
        parent, *others = self.processes.values()
        workers = [process for process in others if process.is_worker]
        found: dict[str, object] = {
            "cpu_s": round(self.cpu_s, 2),
            "wall_s": round(self.wall_s, 2),
            "peak_mb": {
                "parent": round(parent.peak_bytes / 1e6),
                "workers": [round(worker.peak_bytes / 1e6) for worker in workers],
            },
            "folder_mb": {"end": round(self.folder_bytes / 1e6, 2), "peak": round(self.folder_peak_bytes / 1e6, 2)},
        }
        if self.first_worker_s is None:
            return found
        walls_s = [self.first_worker_s, self.with_workers_s]
        parents_s = [self.parent_before_cpu_s, self.parent_with_cpu_s]
        walls_s.append(self.wall_s - sum(walls_s))
        parents_s.append(parent.cpu_s - sum(parents_s))
        names = ("before", "with", "after")
        return found | {
            "workers_cpu_s": round(sum(worker.cpu_s for worker in workers), 2),
            "phases_wall_s": {name: round(seconds, 2) for name, seconds in zip(names, walls_s, strict=True)},
            "phases_parent_cpu_s": {name: round(seconds, 2) for name, seconds in zip(names, parents_s, strict=True)},
        }


def watch(command: Sequence[str | Path], folder: Path, log: Path) -> Watched:
    """
    Run *command*, which writes into *folder*, with its output in *log*, whose end is printed if it fails.

    Raises:
        subprocess.CalledProcessError: It failed.
    """
    _adopt_orphans(is_on=True)
    found, before_s, began_s = Watched(), _cpu_of_children_s(), time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
        samples = 0
        while not _has_ended(process.pid):
            _sample(found, process.pid, time.monotonic() - began_s)
            if samples % SAMPLES_PER_LOOK_AT_FOLDER == 0:
                found.folder_peak_bytes = max(found.folder_peak_bytes, bytes_of(folder))
            samples += 1
            time.sleep(INTERVAL_S)
        found.wall_s = time.monotonic() - began_s
        _sample_process(found, process.pid)  # of a process that was not waited for yet, the kernel still has the times
        code = process.wait()
    for pid in found.processes:
        with suppress(ChildProcessError):  # its parent waited for it
            os.waitpid(pid, 0)
    _adopt_orphans(is_on=False)
    found.cpu_s = _cpu_of_children_s() - before_s
    found.folder_bytes = bytes_of(folder)
    found.folder_peak_bytes = max(found.folder_peak_bytes, found.folder_bytes)
    if code:
        print(log.read_text(errors="replace")[-LOG_SHOWN:], file=sys.stderr)
        raise subprocess.CalledProcessError(code, command)
    return found


def bytes_of(folder: Path) -> int:
    """Return the bytes of all files in *folder*."""
    size = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # removed meanwhile
                size += (Path(root) / name).lstat().st_size
    return size


def _adopt_orphans(*, is_on: bool) -> None:
    """Have processes that outlive their parent become children of this process, which then learns their seconds."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(is_on))


def _cpu_of_children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _sample(found: Watched, root: int, now_s: float) -> None:
    _sample_process(found, root)
    workers = 0
    for pid, parent in _descendants(root):
        _sample_process(found, pid, may_be_worker=parent == root)
        workers += pid in found.processes and found.processes[pid].is_worker
    parent_cpu_s = found.processes[root].cpu_s
    if workers and found.first_worker_s is None:
        found.first_worker_s, found.parent_before_cpu_s = now_s, parent_cpu_s
    elif workers:
        found.with_workers_s += now_s - found.last_sample[0]
        found.parent_with_cpu_s += parent_cpu_s - found.last_sample[1]
    found.last_sample = (now_s, parent_cpu_s)


def _descendants(pid: int) -> Iterator[tuple[int, int]]:
    """Yield each descendant and its parent."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has just ended
            for child in map(int, path.read_text().split()):
                yield child, pid
                yield from _descendants(child)


def _sample_process(found: Watched, pid: int, *, may_be_worker: bool = False) -> None:
    with suppress(OSError):  # it has just ended
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        process = found.processes.setdefault(pid, Process(is_worker=False))
        process.is_worker |= may_be_worker and b"multiprocessing-fork" in command
        process.cpu_s = max(process.cpu_s, (int(fields[11]) + int(fields[12])) / TICKS_PER_S)
        peak = next((int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM")), 0)
        process.peak_bytes = max(process.peak_bytes, peak)
