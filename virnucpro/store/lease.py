"""
A sign of life that other hosts can see: a small file that its owner rewrites again and again.

Whether an owner is gone is judged without comparing clocks: somebody who waits looks at the file now and then, and an
owner whose file has not changed for the length of the lease, by the clock of the one who looks, has lost it. An owner
that stood still for so long and goes on afterwards is therefore possible, and whatever a lease protects must stand it.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

import structlog

from virnucpro.errors import OutputError
from virnucpro.run_folders import only_regular, read_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping
    from pathlib import Path

log = structlog.get_logger(__name__)

LEASE_S = 60.0
"""Seconds without a change after which an owner counts as gone. Network file systems show others' writes within
seconds, but may take as long to show a new name."""
RENEWALS_IN_A_LEASE = 6


class Lease:
    """
    Context manager that keeps a lease file alive with a thread, and removes it at its end.

    Args:
        path: The file; its folder exists.
        about: Who the owner is, ready for JSON.
        lease_s: Seconds that the lease lasts without a change.
        guard: Called before each renewal; once it is False, the file is somebody else's and left alone.
        is_kept: The file stays at the end, with its last words.

    Raises:
        OutputError: The file cannot be written.
    """

    def __init__(
        self,
        path: Path,
        about: Mapping[str, Any],
        *,
        lease_s: float = LEASE_S,
        guard: Callable[[], bool] = lambda: True,
        is_kept: bool = False,
    ) -> None:
        self.path = path
        self._about = dict(about)
        self._interval_s = lease_s / RENEWALS_IN_A_LEASE
        self._guard = guard
        self._is_kept = is_kept
        self._renewals = 0
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    def renew(self) -> None:
        """
        Write the file with other bytes than before, in place and without emptying it: there is always an owner in it.

        Raises:
            OSError: The system refused.
        """
        with self._lock:
            self._renewals += 1
            _write_over(self.path, lease_bytes(self._about, self._renewals))

    def say(self, **words: str | int | bool) -> None:
        """
        Write more into the file, which whoever watches the lease reads as well.

        Raises:
            OSError: The system refused.
        """
        self._about |= words
        self.renew()

    def _keep(self) -> None:
        while not self._ending.wait(self._interval_s):
            if not self._guard():
                return
            try:
                self.renew()
            except OSError as error:  # the folder may come back; if not, others will take over, which is right
                log.warning("lease.not_renewed", path=str(self.path), reason=error.strerror)

    def __enter__(self) -> Self:
        try:
            self.renew()
        except OSError as error:
            raise OutputError(self.path, error.strerror or str(error)) from error
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()
        if not self._is_kept and self._guard():
            with suppress(OSError):
                self.path.unlink()


class LapseWatch:
    """
    Tells which of others' leases have lapsed, by looking again and again.

    Args:
        lease_s: Seconds without a change, by our own clock, after which one has.
    """

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self.lease_s = lease_s
        self._seen: dict[Hashable, tuple[bytes, float]] = {}

    def has_lapsed(self, path: Path) -> bool:
        """Look at a lease file; whether it has been the same, or absent, for as long as a lease lasts."""
        began_s = time.monotonic()
        content, now_s = _bytes_of(path), time.monotonic()
        before = self._seen.get(path)
        has_hung = now_s - began_s > self.lease_s / 3  # the file system was away, for the owner's words as well
        if before is None or before[0] != content or has_hung:
            self._seen[path] = content, now_s
            return False
        return now_s - before[1] > self.lease_s


def words_of(path: Path) -> dict[str, Any]:
    """Return what an owner has written into its lease; nothing where it cannot be read, or is being written."""
    try:
        found = json.loads(_bytes_of(path))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def lease_bytes(about: Mapping[str, Any], renewals: int) -> bytes:
    """Return what stands in the file of an owner that has renewed its lease so often."""
    return json.dumps({**about, "renewals": renewals}).encode()


def _write_over(path: Path, content: bytes) -> None:
    descriptor = only_regular(os.fspath(path), os.O_WRONLY | os.O_CREAT)
    try:
        os.pwrite(descriptor, content, 0)
        os.ftruncate(descriptor, len(content))
    finally:
        os.close(descriptor)


def _bytes_of(path: Path) -> bytes:
    try:
        return read_bytes(path)
    except OSError:
        return b""
