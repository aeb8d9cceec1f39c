"""
Worker processes of a run that has died must not write into the folder of the next one.

A worker normally ends within milliseconds of its parent, but one that is stopped (SIGSTOP, a frozen container) does
not. So each worker holds a lock (``flock``) on a file of its own for as long as it lives. A new run first takes the
folder's lock and then looks for workers that still hold theirs: it kills those of this host, and refuses the folder
when one is elsewhere. A worker first takes its lock and then looks whether the folder is still its parent's: whichever
comes first, one of the two sees the other.

What such a file says may be made up. A process is killed only if it started when the file says, is our user's, and
carries in its environment that it was started as a worker of this very folder (``run_folders.is_worker_for``).

Where the file system knows no locks, a worker's file tells its process: one of this host is asked about by its number,
and one of another host is left to itself, which ends when it misses its driver's sign of life.
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
from virnucpro.errors import OutputError, RunLockedError
from virnucpro.run_layout import RunLayout
from virnucpro.this_host import is_gone, is_same_space, own_process

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

END_TIMEOUT_S = 10.0
"""Seconds that a killed process may take to go; one that hangs in the kernel does not go."""

NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""What file systems say that know no locks."""

_held: list[durable.NewFile] = []
"""Open until this process ends."""


def hold_worker_lock(output_dir: Path, rank: int, *, run_id: str | None = None) -> None:
    """
    Hold the lock of this worker process until it ends; called once, before it writes anything.

    Args:
        output_dir: The run's folder.
        rank: Of this worker.
        run_id: Of our run, where not our parent but another host holds the folder for it.

    Raises:
        RunLockedError: The folder belongs to another run than our parent's: ours is dead.
        OutputError: The folder cannot be written.
    """
    layout = RunLayout(output_dir)
    path = layout.worker_locks_dir / f"{rank}.{os.getpid()}.{secrets.token_hex(4)}.lock"
    about = {"rank": rank, **own_process()}
    try:
        durable.make_folder(path.parent)
        file = durable.NewFile(path)
        _lock(file.fileno())
        file.write(json.dumps(about).encode())
    except OSError as error:
        raise OutputError(path, error.strerror or str(error)) from error
    _held.append(file)
    holder = _read(layout.lock)
    run_folders.enter(output_dir, _mark_in(holder))
    if "pid" in holder:
        of_our_parent = holder.get("pid") in (os.getpid(), os.getppid())
        if not (of_our_parent if run_id is None else holder.get("run_id") == run_id):
            raise RunLockedError(output_dir, json.dumps(holder))


@contextmanager
def taking_part(output_dir: Path) -> Iterator[None]:
    """Work in the block for the run whose lock another process holds, so that our workers are known as that run's."""
    run_folders.enter(output_dir, _mark_in(_read(RunLayout(output_dir).lock)))
    try:
        yield
    finally:
        run_folders.leave(output_dir)


def end_orphans(output_dir: Path) -> None:
    """
    Kill every worker that an earlier run has left in this folder; the caller holds the folder's lock.

    Raises:
        RunLockedError: One does not go in time, as one on another host, which only its own parent's end can end.
    """
    for path in sorted(RunLayout(output_dir).worker_locks()):
        deadline_s = time.monotonic() + END_TIMEOUT_S
        while not _removed(path):
            about = _read(path)
            pid: Any = about.get("pid")
            if pid == os.getpid():  # a worker function that was called here, not in a process of its own
                break
            if time.monotonic() > deadline_s:
                what = f"a worker of a run that has ended, by {path}: {json.dumps(about)}"
                raise RunLockedError(output_dir, what)
            is_alive = isinstance(pid, int) and is_same_space(about) and not is_gone(about)
            if is_alive and run_folders.is_worker_for(pid, output_dir):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)  # SIGKILL also ends what is stopped
            time.sleep(0.01)


def forget_workers(output_dir: Path) -> None:
    """Remove the lock files of workers that have ended."""
    for path in RunLayout(output_dir).worker_locks():
        with suppress(OSError):
            _removed(path)


def _removed(path: Path) -> bool:
    """Remove the lock file of a worker that has ended; return whether it had."""
    try:
        descriptor = run_folders.only_regular(os.fspath(path), os.O_RDWR | os.O_NOFOLLOW)
    except OSError as error:
        return error.errno in {errno.ENOENT, errno.ELOOP, errno.EINVAL, errno.EISDIR}  # gone, or none of ours
    try:
        if not _lock(descriptor) and is_same_space(about := _read(path)) and not is_gone(about):
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


def _read(path: Path) -> dict[str, Any]:
    try:
        about = json.loads(run_folders.read_bytes(path))
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def _lock(descriptor: int) -> bool:
    """
    Lock an open file; whether the file system knows locks.

    Raises:
        BlockingIOError: Another process holds it.
        OSError: The system refused for another reason.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in NO_LOCKS:
            return False
        raise
    return True
