"""
A heartbeat visible to other hosts: a small file that its owner keeps rewriting.

No clocks are compared: a lease has expired when an observer has seen the same content for the length of the lease, by
the observer's own clock. An owner may have been suspended and resume later; whatever a lease protects must tolerate
that.
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
"""Seconds without a change after which an owner counts as gone. Network file systems show writes of other hosts within
seconds, but may need this long for a new name."""
RENEWALS_IN_A_LEASE = 6


class Lease:
    """
    Context manager that renews a lease file in a thread and removes it at its end.

    Args:
        path: The file; its folder exists.
        about: The owner, ready for JSON.
        guard: Called before each renewal; False means another owner has the file, which is then left alone.
        is_kept: Keep the file at the end, with its last content.
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
        Write new content in place, so that the file always names an owner.

        Raises:
            OSError: The file cannot be written.
        """
        with self._lock:
            self._renewals += 1
            _write_over(self.path, lease_bytes(self._about, self._renewals))

    def update(self, **fields: str | int | bool) -> None:
        """
        Add fields to the file and renew it.

        Raises:
            OSError: The file cannot be written.
        """
        self._about |= fields
        self.renew()

    def _keep(self) -> None:
        while not self._ending.wait(self._interval_s):
            if not self._guard():
                return
            try:
                self.renew()
            except OSError as error:  # the folder may come back; if not, another owner rightly takes over
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


class ExpiryWatch:
    """Finds expired leases of other owners by looking repeatedly."""

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self.lease_s = lease_s
        self._seen: dict[Hashable, tuple[bytes, float]] = {}

    def has_expired(self, path: Path) -> bool:
        """Look at a lease file; whether it was unchanged or absent for the length of a lease."""
        began_s = time.monotonic()
        content, now_s = _bytes_of(path), time.monotonic()
        before = self._seen.get(path)
        has_hung = now_s - began_s > self.lease_s / 3  # the file system hung, for the owner too
        if before is None or before[0] != content or has_hung:
            self._seen[path] = content, now_s
            return False
        return now_s - before[1] > self.lease_s


def read_lease(path: Path) -> dict[str, Any]:
    """Return the content of a lease; empty when unreadable or being written."""
    try:
        found = json.loads(_bytes_of(path))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def lease_bytes(about: Mapping[str, Any], renewals: int) -> bytes:
    """Return the content of a lease file after *renewals* renewals."""
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
