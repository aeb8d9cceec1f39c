"""
Who works in a folder, asked without touching its lock: whoever wants to know must not make a run that starts fail.

The holder writes itself into the lock file and empties it at its end, so what stands there is of a run that goes on or
was killed. On the holder's host its process tells which; on another one only a lock on a network file system can, which
the system is asked about and not for.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import psutil

from virnucpro.errors import ResultError
from virnucpro.run_folders import only_regular
from virnucpro.this_host import host_name

if TYPE_CHECKING:
    from pathlib import Path

_CLOCK_STEP_S = 60.0
"""Seconds by which the clock may have been set since the holder started."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """What the lock file of a folder says, and whether it is still so."""

    host: str
    """Where the run goes on."""
    pid: int
    """Its process there."""
    run_id: str
    """Of that start of the run."""
    since: str
    """UTC, ISO 8601."""
    is_alive: bool | None
    """Whether it still holds the folder; None where that cannot be told from here."""


def holder_of(lock: Path) -> Holder | None:
    """
    Return who holds a folder, or was killed while it did; None where nobody is written down.

    Args:
        lock: The lock file of the folder.

    Raises:
        ResultError: It cannot be read.
    """
    try:
        descriptor = only_regular(os.fspath(lock), os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ResultError(lock, error.strerror or str(error)) from error
    try:
        about = _parsed(os.pread(descriptor, 4096, 0))
        if about is None:
            return None
        is_here = about["host"] == host_name()
        is_alive = True if _is_locked(descriptor) else _has_process(about) if is_here else None
    except OSError as error:
        raise ResultError(lock, error.strerror or str(error)) from error
    finally:
        os.close(descriptor)
    return Holder(**about, is_alive=is_alive)


def _parsed(data: bytes) -> dict[str, Any] | None:
    try:
        about = json.loads(data)
    except (ValueError, RecursionError):
        return None
    kinds = {"host": str, "pid": int, "run_id": str, "since": str}
    if not isinstance(about, dict) or not all(type(about.get(name)) is kind for name, kind in kinds.items()):
        return None
    return {name: about[name] for name in kinds}


def _is_locked(descriptor: int) -> bool:
    """
    Whether somebody holds a POSIX lock on an open file; takes none.

    On local file systems ``flock`` is something else and not seen here; NFS makes a POSIX lock of it (flock(2)).
    """
    question = struct.pack("@hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, question)
    except OSError:  # a file system that knows no such locks
        return False
    return bool(struct.unpack("@hhqqi0q", answer)[0] != fcntl.F_UNLCK)


def _has_process(about: dict[str, Any]) -> bool:
    """Whether the process that wrote itself down lives; one that started later has only got its number."""
    try:
        process = psutil.Process(about["pid"])
        started = datetime.fromisoformat(about["since"]).timestamp()
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= started + _CLOCK_STEP_S
    except psutil.AccessDenied:
        return True
    except (psutil.Error, ValueError, OverflowError):
        return False
