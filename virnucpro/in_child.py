"""
Files of unknown origin, read in a child process first: some damage sends HDF5 into an endless loop that no signal ends.

The child is forked, imports nothing, and has limits of time and memory. What it could read, its parent can read.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import select
import signal
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from virnucpro.errors import ResultError

if TYPE_CHECKING:
    from collections.abc import Callable

CPU_SECONDS = 2
"""CPU time that a file may take, and another second for each 16 MiB."""
WALL_SECONDS = 60
"""Likewise of the clock, in which a disk may be slow: another second for each 4 MiB."""
MEMORY_BYTES = 1 << 28
"""Memory that a file may take beside twice its size."""


def read_in_child(path: Path, read: Callable[[Path], object]) -> None:
    """Run *read* on a file; ResultError where it raises, crashes, or exceeds its limits. OSError: there is no file."""
    size_bytes = path.stat().st_size
    receives, sends = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, whose locks the child does not take
        child = os.fork()
    if not child:
        _child(path, read, sends, size_bytes)
    os.close(sends)
    try:
        answer, deadline = b"", time.monotonic() + WALL_SECONDS + (size_bytes >> 22)
        while select.select([receives], [], [], max(0, deadline - time.monotonic()))[0]:
            if not (data := os.read(receives, 4096)):
                break
            answer += data
    finally:
        os.close(receives)
        os.kill(child, signal.SIGKILL)  # it is ours until it is waited for
        with suppress(ChildProcessError):
            os.waitpid(child, 0)
    if answer != b"+":
        limits = "damaged: reading it crashes, or takes more time or memory than a sound file"
        raise ResultError(path, answer.decode(errors="replace") or limits)


def _child(path: Path, read: Callable[[Path], object], sends: int, size_bytes: int) -> None:
    """Read the file, send what came of it, and end."""
    try:
        faulthandler.disable()  # what it would print is said by our caller
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        pages = int(Path("/proc/self/statm").read_bytes().split()[0])
        most_bytes = pages * os.sysconf("SC_PAGESIZE") + MEMORY_BYTES + 2 * size_bytes
        limits = (resource.RLIMIT_AS, most_bytes), (resource.RLIMIT_CPU, CPU_SECONDS + (size_bytes >> 24))
        for which, most in (*limits, (resource.RLIMIT_CORE, 0)):
            hard = resource.getrlimit(which)[1]
            resource.setrlimit(which, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
        read(path)
        os.write(sends, b"+")
    except ResultError as error:
        os.write(sends, error.what.encode(errors="replace")[:4096])
    finally:
        os._exit(0)
