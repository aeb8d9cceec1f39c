"""
A lease: the lock of a folder on a file system without ``flock``.

It is a small file that its owner keeps rewriting. No clocks are compared: it has expired when an observer has seen
the same content for the length of the lease, by the observer's own clock. An owner may have been suspended and resume
later; whatever a lease protects must tolerate that.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from virnucpro.errors import RunLockedError
from virnucpro.run_folders import only_regular, read_bytes
from virnucpro.this_host import is_gone, is_same_space, own_process

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

LEASE_S = 60.0
"""Seconds without a change after which an owner counts as gone. Network file systems show writes of other hosts within
seconds, but may need this long for a new name."""
RENEWALS_IN_A_LEASE = 6


def read_lease(path: Path) -> dict[str, Any]:
    """Return the owner that a lease or lock file records; empty when unreadable or being written."""
    try:
        return _parsed(read_bytes(path))
    except OSError:
        return {}


def write_over(descriptor: int, about: Mapping[str, Any]) -> None:
    """Replace the content of an open lease or lock file without ever emptying it."""
    content = json.dumps(about).encode()
    os.pwrite(descriptor, content, 0)
    os.ftruncate(descriptor, len(content))


class LeaseLock:
    """
    The lock of one folder on a file system without ``flock``.

    It is made by a link, which succeeds once. A holder that has ended, or whose lease has expired, loses the lock to
    the next one, so a start after a crash on another host waits for the length of a lease. A holder that was suspended
    for longer and finds the lock taken is stopped as by SIGTERM.

    Args:
        on_lost: Called once when another process has taken the lock; by default sends SIGTERM to this process.
    """

    def __init__(
        self,
        path: Path,
        about: dict[str, Any],
        *,
        lease_s: float = LEASE_S,
        on_lost: Callable[[], None] = lambda: signal.pthread_kill(_main_thread(), signal.SIGTERM),
    ) -> None:
        self.path = path
        self._owner = secrets.token_hex(8)
        self._about = {**own_process(), **about, "owner": self._owner, "expires_after_s": lease_s}
        self._lease_s, self._interval_s = lease_s, lease_s / RENEWALS_IN_A_LEASE
        self._on_lost = on_lost
        self._is_lost = False
        self._renewals = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    def acquire(self) -> None:
        """Take the lock, or raise ``RunLockedError``; waits only while it is unknown whether the holder is alive."""
        seen, seen_s = None, 0.0
        while not self._made():
            began_s = time.monotonic()
            content, now_s = _read(self.path), time.monotonic()
            holder = _parsed(content)
            if is_same_space(holder):
                has_expired = is_gone(holder)
                renewed = b"" if has_expired else content
            else:
                has_hung = now_s - began_s > self._lease_s / 3  # the file system hung, for the owner too
                if content != seen or has_hung:
                    seen, seen_s = content, now_s
                has_expired = now_s - seen_s > self._lease_s
                time.sleep(self._interval_s)
                after = _read(self.path)
                renewed = b"" if after == content else after
            if renewed:
                raise RunLockedError(self.path.parent, renewed.decode("utf-8", "replace"))
            if has_expired:
                self._take_away(content)
        self._renew()
        self._thread.start()

    def release(self) -> None:
        """Release the lock, unless another process has taken it."""
        self._is_lost = True  # a loss from now on needs no report
        self._ending.set()
        self._thread.join()
        if self._is_ours():
            with suppress(OSError):
                self.path.unlink()

    def _renew(self) -> None:
        """Write new content in place, so that the file always names an owner."""
        self._renewals += 1
        descriptor = only_regular(os.fspath(self.path), os.O_WRONLY | os.O_CREAT)
        try:
            write_over(descriptor, {**self._about, "renewals": self._renewals})
        finally:
            os.close(descriptor)

    def _keep(self) -> None:
        while not self._ending.wait(self._interval_s) and self._is_ours():
            try:
                self._renew()
            except OSError as error:  # the folder may come back; if not, another owner rightly takes over
                _log().warning("lease.not_renewed", path=str(self.path), reason=error.strerror)

    def _made(self) -> bool:
        """Whether this lock owns the file now, also where NFS made the link but reported a failure."""
        private = self.path.with_name(f".{self.path.name}.{self._owner}")
        private.write_text(json.dumps({**self._about, "renewals": 0}))
        try:
            os.link(private, self.path)
        except FileExistsError:
            return read_lease(self.path).get("owner") == self._owner
        else:
            return True
        finally:
            private.unlink()

    def _take_away(self, content: bytes) -> None:
        """Remove the file of a dead holder, unless another process has replaced it meanwhile."""
        private = self.path.with_name(f".{self.path.name}.{self._owner}.taken")
        with suppress(FileNotFoundError):
            self.path.rename(private)
            if _read(private) != content:
                with suppress(FileExistsError):
                    os.link(private, self.path)
            private.unlink()

    def _is_ours(self) -> bool:
        try:
            content = _read(self.path)
        except OSError:  # the folder is unreachable: no other process can take it either
            return True
        if _parsed(content).get("owner") == self._owner:
            return True
        if not self._is_lost:
            self._is_lost = True
            _log().error("lock.lost", path=str(self.path), taken_by=content.decode("utf-8", "replace"))
            self._on_lost()
        return False


def _log() -> Any:
    import structlog  # noqa: PLC0415  workers, which only read leases, start sooner without

    return structlog.get_logger(__name__)


def _main_thread() -> int:
    """Return the thread that runs signal handlers; the kernel may give the process's signal to another one."""
    number = threading.main_thread().ident
    assert number is not None
    return number


def _read(path: Path) -> bytes:
    try:
        return read_bytes(path)
    except FileNotFoundError:
        return b""


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
