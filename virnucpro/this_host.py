"""
What this machine is called, and what tells it from every other: for files that several hosts read.

A process number means something only together with the host and the boot that it belongs to.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

HOST_NAME_VARIABLE = "VIRNUCPRO_HOST_NAME"
"""Name to use where the system's is not unique, as in containers that are made alike."""


def host_name() -> str:
    """Return what this host is called in files, logs and metrics."""
    return os.environ.get(HOST_NAME_VARIABLE) or socket.gethostname()


def boot_id() -> str:
    """Return what the kernel calls its present boot; empty where it does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
