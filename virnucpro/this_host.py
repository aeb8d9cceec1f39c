"""This process and its host: names that other hosts can interpret, the signals that end it, its standard streams."""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MOST_HOSTS = 64
"""Hosts that are kept of each processor."""
HOST_NAME_VARIABLE = "VIRNUCPRO_HOST_NAME"
"""Overrides the system's name where it is not unique, as in identical containers."""


def host_name() -> str:
    """Return the name of this host in files, logs and metrics."""
    return os.environ.get(HOST_NAME_VARIABLE) or socket.gethostname()


def peak_resident_bytes() -> int:
    """Return the most memory that this process has had resident; 0 where a sandbox hides it."""
    with suppress(OSError):  # getrusage counts in what our parent had when it forked
        lines = Path("/proc/self/status").read_text().splitlines()
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)
    return 0


def merged_processors(found: Iterable[Mapping[str, Iterable[object]]]) -> dict[str, list[str]]:
    """Return processor -> hosts of all *found*, sorted, with at most ``MOST_HOSTS`` of each."""
    pairs = sorted({(str(processor), str(host)) for some in found for processor in some for host in some[processor]})
    hosts: dict[str, list[str]] = {processor: [] for processor, _ in pairs}
    for processor, host in pairs:
        hosts[processor] += [host] * (len(hosts[processor]) < MOST_HOSTS)
    return hosts


def processors_differ(found: Mapping[str, list[str]]) -> list[str]:
    """Return a printable sentence that names the processors and some of their hosts; none unless there are several."""
    named = "; ".join(f"{name} on {', '.join(hosts[:3])}{', ...' * (len(hosts) > 3)}" for name, hosts in found.items())
    again = "another run gives the same numbers within the tolerance, not the same bytes"
    shown = named.encode("unicode_escape").decode()
    return [f"rows come from different processors ({shown}): {again}"] if len(found) > 1 else []


def process_space() -> str:
    """
    Return the scope in which a process number is unique: host name, boot and PID namespace.

    Containers may share a name and the kernel's boot, but not the namespace.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # hidden in some sandboxes
        boot = namespace = ""
    return f"{host_name()} {boot} {namespace}"


def process_started(pid: int) -> int | None:
    """Return the start of a process in ticks since boot, unique with its number; None once it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in {"Z", "X"} else int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


def own_process() -> dict[str, str | int | None]:
    """Return this process's record for ``is_same_space`` and ``is_gone``."""
    pid = os.getpid()
    return {"host": host_name(), "pid": pid, "space": process_space(), "started": process_started(pid)}


def is_same_space(about: dict[str, object]) -> bool:
    """Whether a recorded process has its number in our space."""
    return about.get("space") == process_space()


def is_gone(about: dict[str, object]) -> bool:
    """Whether a recorded process of our space has ended."""
    pid = about.get("pid")
    return not isinstance(pid, int) or pid <= 0 or process_started(pid) != about.get("started")


def terminating_signals() -> tuple[signal.Signals, ...]:
    """Return what asks this process to end: SIGTERM, and SIGHUP unless the caller had it ignored, as nohup does."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM,) if is_ignored else (signal.SIGTERM, signal.SIGHUP)


def open_standard_streams() -> None:
    """Open /dev/null for each standard stream that the caller closed: no file or pipe of ours gets its number."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115  for the rest of the process
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
