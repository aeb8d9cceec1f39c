"""
Which process holds a run's folder, from its lock file alone.

No lock is taken: a look must not make a starting run fail. The holder writes itself into the file and clears it at its
end, so an entry belongs to a live or a killed run. On the holder's host its process tells which; from another host only
a lock visible over the network file system does.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from virnucpro import run_folders
from virnucpro.errors import ResultError
from virnucpro.this_host import host_name, is_gone, is_same_space

if TYPE_CHECKING:
    from pathlib import Path

_KINDS = {"host": str, "pid": int, "run_id": str, "since": str}


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The entry in the lock file of a folder, and whether it is still valid."""

    host: str
    pid: int
    run_id: str
    since: str
    """UTC, ISO 8601."""
    is_alive: bool | None
    """Whether it still holds the folder; None when unknown on this host."""


def holder_of(lock: Path) -> Holder | None:
    """Return who holds a folder, or held it when killed; None without an entry."""
    try:
        descriptor = run_folders.only_regular(os.fspath(lock), os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ResultError(lock, error.strerror or str(error)) from error
    try:
        about = _parsed(run_folders.read_at(descriptor, 4096, 0))
        if about is None:
            return None
        has_process = is_same_space(about) and not is_gone(about)
        is_alive = True if _is_locked(descriptor) else has_process if about["host"] == host_name() else None
    except OSError as error:
        raise ResultError(lock, error.strerror or str(error)) from error
    finally:
        os.close(descriptor)
    return Holder(**{name: about[name] for name in _KINDS}, is_alive=is_alive)


def _parsed(data: bytes) -> dict[str, Any] | None:
    try:
        about = json.loads(data)
    except (ValueError, RecursionError):
        return None
    is_sound = isinstance(about, dict) and all(type(about.get(name)) is kind for name, kind in _KINDS.items())
    return about if is_sound else None


def _is_locked(descriptor: int) -> bool:
    """
    Whether an open file has a POSIX lock; takes none.

    Local file systems keep ``flock`` apart from it; NFS turns ``flock`` into a POSIX lock (flock(2)).
    """
    question = struct.pack("@hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, question)
    except OSError:  # a file system without such locks
        return False
    return bool(struct.unpack("@hhqqi0q", answer)[0] != fcntl.F_UNLCK)
