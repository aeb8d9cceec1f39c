"""What this machine is called, and what tells its processes from others': for files that several hosts read."""

from __future__ import annotations

import os
import socket
from pathlib import Path

HOST_NAME_VARIABLE = "VIRNUCPRO_HOST_NAME"
"""Name to use where the system's is not unique, as in containers that are made alike."""


def host_name() -> str:
    """Return what this host is called in files, logs and metrics."""
    return os.environ.get(HOST_NAME_VARIABLE) or socket.gethostname()


def process_space() -> str:
    """
    Return within what a process number means one process: this host's name, its boot, and our namespace of numbers.

    Two containers may have the name in common, and the kernel with its boot, but not that namespace.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # a sandbox's kernel may not tell
        boot = namespace = ""
    return f"{host_name()} {boot} {namespace}"


def process_started(pid: int) -> int | None:
    """
    Return when a process of this space started, in ticks since boot: with it a number is never another's.

    None where there is none, or it has ended and nobody has asked how.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in {"Z", "X"} else int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


def own_process() -> dict[str, str | int | None]:
    """Return what this process writes down of itself, for ``is_same_space`` and ``is_gone``."""
    pid = os.getpid()
    return {"host": host_name(), "pid": pid, "space": process_space(), "started": process_started(pid)}


def is_same_space(about: dict[str, object]) -> bool:
    """Whether the process that wrote itself down has its number in our space, so that we can know of it."""
    return about.get("space") == process_space()


def is_gone(about: dict[str, object]) -> bool:
    """Whether a process of our space that wrote itself down has ended."""
    pid = about.get("pid")
    return not isinstance(pid, int) or pid <= 0 or process_started(pid) != about.get("started")
