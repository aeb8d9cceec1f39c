"""
A lock for folders on file systems without ``flock``: a file naming its owner, host and process, renewed while held.

The file is made by a link, which succeeds once. A holder that has ended, or whose lease has expired, loses the lock to
the next one, so a start after a crash on another host waits for the length of a lease. A holder that was suspended for
longer and finds the lock taken is stopped as by SIGTERM.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import structlog

from virnucpro.errors import RunLockedError
from virnucpro.run_folders import read_bytes
from virnucpro.store.locks.lease import LEASE_S, RENEWALS_IN_A_LEASE, ExpiryWatch, Lease, lease_bytes
from virnucpro.this_host import is_gone, is_same_space, own_process

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

log = structlog.get_logger(__name__)


class LeaseLock:
    """
    The lock of one folder.

    Args:
        about: Shown to others, ready for JSON.
        on_lost: Called once when another process has taken the lock; by default sends SIGTERM to this process.
    """

    def __init__(
        self,
        path: Path,
        about: dict[str, Any],
        *,
        lease_s: float = LEASE_S,
        on_lost: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGTERM),
    ) -> None:
        self.path = path
        self._owner = secrets.token_hex(8)
        self._about = {**own_process(), **about, "owner": self._owner, "expires_after_s": lease_s}
        self._lease_s = lease_s
        self._on_lost = on_lost
        self._is_lost = False
        self._lease = Lease(path, self._about, lease_s=lease_s, guard=self._is_ours)

    def acquire(self) -> None:
        """
        Take the lock; waits only while it is unknown whether the holder is alive.

        Raises:
            RunLockedError: Another process holds it.
            OSError: The folder cannot be written.
        """
        watch = ExpiryWatch(self._lease_s)
        while not self._made():
            content = _read(self.path)
            holder = _parsed(content)
            if is_same_space(holder):
                has_expired = is_gone(holder)
                renewed = b"" if has_expired else content
            else:
                has_expired = watch.has_expired(self.path)
                time.sleep(self._lease_s / RENEWALS_IN_A_LEASE)
                after = _read(self.path)
                renewed = b"" if after == content else after
            if renewed:
                raise RunLockedError(self.path.parent, renewed.decode("utf-8", "replace"))
            if has_expired:
                self._take_away(content)
        self._lease.__enter__()

    def release(self) -> None:
        """Release the lock, unless another process holds it by now."""
        self._is_lost = True  # a loss from now on needs no report
        self._lease.__exit__()

    def _made(self) -> bool:
        """Whether the file is ours now, also where NFS made the link but reported a failure."""
        private = self.path.with_name(f".{self.path.name}.{self._owner}")
        private.write_bytes(lease_bytes(self._about, 0))
        try:
            os.link(private, self.path)
        except FileExistsError:
            return self._owner_in(_read(self.path)) == self._owner
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
            content = read_bytes(self.path)
        except FileNotFoundError:
            content = b""
        except OSError:  # the folder is unreachable: no other process can take it either
            return True
        if self._owner_in(content) == self._owner:
            return True
        if not self._is_lost:
            self._is_lost = True
            log.error("lock.lost", path=str(self.path), taken_by=content.decode("utf-8", "replace"))
            self._on_lost()
        return False

    @staticmethod
    def _owner_in(content: bytes) -> object:
        return _parsed(content).get("owner")


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
