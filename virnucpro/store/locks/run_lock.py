"""
One run at a time in an output folder, and which process it is.

The kernel's lock (``flock``) ends with its holder, however that ends; the file only names the holder. Workers do not
inherit it, and orphans of an earlier run are ended first. On file systems without ``flock`` (some mounts of NFS and
Lustre) a lease replaces it.

The holder writes itself into the lock file and clears it at its end: ``holder.py`` reads it.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import tempfile
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Self

from virnucpro import durable, failpoints, run_folders
from virnucpro.allowed_roots import check_open
from virnucpro.errors import OutputError, RunLockedError
from virnucpro.run_layout import PredictionLayout, RunLayout
from virnucpro.store.locks.lease import LEASE_S, LeaseLock, write_over
from virnucpro.store.locks.worker_lock import end_orphans, forget_workers, try_lock
from virnucpro.this_host import own_process

if TYPE_CHECKING:
    from pathlib import Path


_MARK = re.compile(rb'"mark": "([0-9a-f]{16})"')
"""Kept from run to run: temporary names that carry it belong to the folder."""


class RunLock:
    """
    Context manager that holds *path* during a run.

    Raises:
        RunLockedError: Another process holds it, or a worker of a dead run cannot be ended.
    """

    def __init__(self, path: Path, *, run_id: str, lease_s: float = LEASE_S) -> None:
        self.path = path
        self.run_id = run_id
        self._lease_s = lease_s
        self._lease: LeaseLock | None = None
        self._descriptor: int | None = None
        self._made_folder = False
        self._mark = ""

    def __enter__(self) -> Self:
        with durable.writing(self.path.parent):
            self._made_folder = not self.path.parent.exists()  # raises when the name is too long
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with run_folders.opened(self.path.parent) as folder:  # raises when it is behind a link
                check_open(folder, self.path.parent)
                _refuse_foreign_work(RunLayout(self.path.parent))
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
                descriptor = run_folders.only_regular(os.fspath(self.path), flags)
        with ExitStack() as undo:
            undo.callback(os.close, descriptor)
            self._lock(descriptor)
            undo.callback(self._release_lease)
            if not _is_at(descriptor, self.path):
                raise RunLockedError(self.path.parent, "one that is just ending")
            with durable.writing(self.path):
                failpoints.reach("lock.write")
                self._name_holder(descriptor)
            undo.pop_all()
        self._descriptor = descriptor
        run_folders.enter(self.path.parent, self._mark)
        try:
            end_orphans(self.path.parent)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            forget_workers(self.path.parent)
            ours = {self.path} if self._lease is None else {self.path, self._lease.path}
            with suppress(OSError):
                if self._made_folder and set(self.path.parent.iterdir()) == ours:
                    self.path.unlink()  # leave nothing of a run that never began
                    self._release_lease()
                    self.path.parent.rmdir()
            with suppress(OSError):  # a full disk: the next run has another mark
                write_over(self._descriptor, {"mark": self._mark})
            run_folders.leave(self.path.parent)
            self._release_lease()
            with suppress(OSError):  # no locks here
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # also for a child between fork and exec
            with suppress(OSError):  # what ends the run is the reason to tell
                os.close(self._descriptor)
            self._descriptor = None

    def _lock(self, descriptor: int) -> None:
        try:
            has_locks = try_lock(descriptor)
        except BlockingIOError as error:
            holder = run_folders.read_at(descriptor, 4096, 0).decode("utf-8", "replace").strip()
            raise RunLockedError(self.path.parent, holder or "holder unknown") from error
        except OSError as error:
            raise OutputError(self.path, error.strerror or str(error)) from error
        if not has_locks:
            lease = LeaseLock(self.path.with_suffix(".lease"), {"run_id": self.run_id}, lease_s=self._lease_s)
            with durable.writing(lease.path):
                lease.acquire()
            self._lease = lease

    def _name_holder(self, descriptor: int) -> None:
        found = _MARK.search(run_folders.read_at(descriptor, 4096, 0))
        self._mark = found[1].decode() if found else secrets.token_hex(8)
        since = datetime.now(UTC).isoformat(timespec="seconds")
        write_over(descriptor, {**own_process(), "run_id": self.run_id, "since": since, "mark": self._mark})

    def _release_lease(self) -> None:
        if self._lease is not None:
            self._lease.release()
            self._lease = None


def _refuse_foreign_work(layout: RunLayout) -> None:
    """Refuse a ``work/`` that is a link or belongs to another user: a run acts on its content."""
    for folder in (
        layout.work_dir,
        layout.parts_dir,
        layout.worker_locks_dir,
        layout.unpacked_dir,
        layout.shared_rows_dir,
        PredictionLayout(layout.output_dir).contig_parts,
    ):
        try:
            found = folder.lstat()
        except FileNotFoundError:
            continue
        if not stat.S_ISDIR(found.st_mode):
            raise OutputError(folder, "it is a link or not a folder: remove it, or use another output folder")
        if found.st_uid != os.geteuid() and found.st_uid != _owner_of_new_files(layout.output_dir):
            raise OutputError(folder, f"it belongs to another user (number {found.st_uid}): use another output folder")


def _owner_of_new_files(folder: Path) -> int:
    """Return the user number that new files get; a network file system may map it."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_uid


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one at *path*; its last holder may have removed it meanwhile."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
