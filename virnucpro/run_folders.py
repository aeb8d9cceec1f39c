"""
The folders of this process's runs, and safe access to files below them.

Links below a run's folder are not followed, because their targets may be another user's. A folder has a mark, kept in
its lock file and in the names of its temporary files; workers carry the folder's identity in their environment. By
these a later start recognises its own.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

WORKER_VARIABLE = "VIRNUCPRO_WORKER"
"""Environment variable of workers: identities of their folders, separated by commas."""

_marks: dict[Path, list[str]] = {}
"""Absolute folder of a run -> its mark, once for each user of it in this process."""
_changing = threading.Lock()


def enter(folder: Path, mark: str) -> None:
    """Begin to work for the run in *folder*."""
    with _changing:
        _marks.setdefault(folder.absolute(), []).append(mark)


def leave(folder: Path) -> None:
    """End the work for the run in *folder*."""
    with _changing:
        _marks[folder.absolute()].pop()
        if not _marks[folder.absolute()]:
            del _marks[folder.absolute()]


def mark_of(folder: Path) -> str | None:
    """Return the mark of the folder's run, None when it is not a run of this process."""
    with _changing:
        return next((_marks[one][-1] for one in _upwards(folder) if one in _marks), None)


def worker_environment() -> dict[str, str | None]:
    """Return the variables that identify workers of this process."""
    with _changing:
        folders = list(_marks)
    return {WORKER_VARIABLE: ",".join(_identity(folder) for folder in folders if folder.is_dir()) or None}


def is_worker_for(pid: int, folder: Path) -> bool:
    """Whether a process of this host is ours, and a worker of a run in *folder*."""
    try:
        if Path(f"/proc/{pid}").stat().st_uid != os.geteuid():
            return False
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    prefix = f"{WORKER_VARIABLE}=".encode()
    folders = [item.removeprefix(prefix) for item in environment if item.startswith(prefix)]
    return any(_identity(folder).encode() in item.split(b",") for item in folders)


@contextmanager
def opened(folder: Path) -> Iterator[int]:
    """
    Yield a descriptor of *folder*; below a run's folder no link is followed.

    Raises:
        OSError: It is absent, not a folder, or behind a link.
    """
    with _changing:
        runs = [one for one in _upwards(folder) if one in _marks]
    base = runs[-1] if runs else folder
    descriptor = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in folder.absolute().relative_to(base.absolute()).parts:
            above = descriptor
            try:
                descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
            except OSError as error:
                if error.errno in {errno.ENOTDIR, errno.ELOOP}:
                    raise OSError(error.errno, f"{name} is a link or not a folder: remove it") from error
                raise
            finally:
                if descriptor != above:
                    os.close(above)
        yield descriptor
    finally:
        os.close(descriptor)


def only_regular(path: str, flags: int) -> int:
    """
    Open a regular file without blocking; for use as an *opener*, where a pipe would wait for a writer.

    Raises:
        OSError: It is of another kind, or cannot be opened.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise OSError(errno.EINVAL, "not a regular file (a pipe, socket or device)", path)


def read_bytes(path: Path) -> bytes:
    """
    Return the content of a regular file.

    Raises:
        OSError: It is of another kind, or cannot be read.
    """
    with open(path, "rb", opener=only_regular) as file:
        return file.read()


def read_at(descriptor: int, num_bytes: int, offset: int) -> bytes:
    """Read *num_bytes* from *offset*, fewer only at the end of the file: one call of pread may return less."""
    data = os.pread(descriptor, num_bytes, offset)
    while len(data) < num_bytes and (more := os.pread(descriptor, num_bytes - len(data), offset + len(data))):
        data += more
    return data


def _upwards(folder: Path) -> tuple[Path, ...]:
    absolute = folder.absolute()
    return (absolute, *absolute.parents)


def _identity(folder: Path) -> str:
    found = folder.stat()
    return f"{found.st_dev}:{found.st_ino}"
