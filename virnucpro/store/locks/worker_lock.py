"""
Keeps workers of a dead run from writing into the folder of the next one.

A worker normally ends within milliseconds of its parent, but not while it is stopped (SIGSTOP, a frozen container).
Each worker holds a ``flock`` on its own file while it lives. A new run takes the folder's lock, then kills the workers
of this host that still hold theirs, and refuses the folder when one is on another host. A worker takes its lock, then
checks that the folder is still its parent's; so one of the two always sees the other.

The files may be forged: a process is killed only if its start time matches, it belongs to our user, and its environment
names this folder (``run_folders.is_worker_for``). Without ``flock`` a worker of this host is found by its process
number.

Workers of a cluster hold no such lock: what they compute twice has the same bytes, and they look before each unit
whether the folder is still their run's.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import signal
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from virnucpro import durable, run_folders
from virnucpro.errors import RunLockedError
from virnucpro.run_layout import RunLayout
from virnucpro.store.locks.lease import read_lease
from virnucpro.this_host import is_gone, is_same_space, own_process

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

END_TIMEOUT_S = 10.0
"""Seconds for a killed process to end; one that hangs in the kernel does not."""

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of file systems without locks."""

_held: list[durable.NewFile] = []
"""Kept open until this process ends."""


def hold_worker_lock(output_dir: Path, rank: int) -> None:
    """Hold this worker's lock until it ends, before it writes anything; ``RunLockedError`` where its run is dead."""
    layout = RunLayout(output_dir)
    path = layout.worker_locks_dir / f"{rank}.{os.getpid()}.{secrets.token_hex(4)}.lock"
    about = {"rank": rank, **own_process()}
    with durable.writing(path):
        durable.make_folder(path.parent)
        file = durable.NewFile(path)
        try_lock(file.fileno())
        file.write(json.dumps(about).encode())
    _held.append(file)
    holder = read_lease(layout.lock)
    run_folders.enter(output_dir, _mark_in(holder))
    if "pid" in holder and holder["pid"] not in (os.getpid(), os.getppid()):
        raise RunLockedError(output_dir, json.dumps(holder))


def take_part(output_dir: Path) -> None:
    """Mark what this process and its workers write as the files of the run that holds the folder, on another host."""
    run_folders.enter(output_dir, _mark_in(read_lease(RunLayout(output_dir).lock)))


@contextmanager
def taking_part(output_dir: Path) -> Iterator[None]:
    """``take_part`` for the time of the block."""
    take_part(output_dir)
    try:
        yield
    finally:
        run_folders.leave(output_dir)


def end_orphans(output_dir: Path) -> None:
    """Under the folder's lock, kill workers of an earlier run; ``RunLockedError`` where one cannot be ended."""
    for path in sorted(RunLayout(output_dir).worker_locks()):
        deadline_s = time.monotonic() + END_TIMEOUT_S
        while not _removed(path):
            about = read_lease(path)
            pid: Any = about.get("pid")
            if pid == os.getpid():  # a worker function called in this process
                break
            if time.monotonic() > deadline_s:
                orphan = f"a worker of a run that has ended, by {path}: {json.dumps(about)}"
                raise RunLockedError(output_dir, orphan)
            is_alive = isinstance(pid, int) and is_same_space(about) and not is_gone(about)
            if is_alive and run_folders.is_worker_for(pid, output_dir):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)  # SIGKILL also ends a stopped process
            time.sleep(0.01)


def forget_workers(output_dir: Path) -> None:
    """Remove the lock files of ended workers."""
    for path in RunLayout(output_dir).worker_locks():
        with suppress(OSError):
            _removed(path)


def _removed(path: Path) -> bool:
    """Remove the lock file of an ended worker; return whether it had ended."""
    try:
        descriptor = run_folders.only_regular(os.fspath(path), os.O_RDWR | os.O_NOFOLLOW)
    except OSError as error:
        return error.errno in {errno.ENOENT, errno.ELOOP, errno.EINVAL, errno.EISDIR}  # gone, or not a lock of a worker
    try:
        if not try_lock(descriptor) and is_same_space(about := read_lease(path)) and not is_gone(about):
            return False
        durable.remove(path)
    except BlockingIOError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)


def _mark_in(holder: dict[str, Any]) -> str:
    mark = holder.get("mark")
    return mark if isinstance(mark, str) and mark.isalnum() else "norun"


def try_lock(descriptor: int) -> bool:
    """Lock an open file; return whether the file system has locks. BlockingIOError where another process holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True
