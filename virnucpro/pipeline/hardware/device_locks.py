"""
Which GPUs of this host are in use, across runs and users: one lock file (``flock``) for each GPU, named by its UUID.

The kernel's lock ends with its holder; the file only names the holder. Workers do not inherit it, and end with their
parent long before a worker of the next holder uses the GPU.

The folder is ``VIRNUCPRO_LOCK_DIR``, else ``/run/lock/virnucpro``, else one in ``/tmp``. All users may write there, so
nothing in it is trusted: links are not followed, and only the holder changes a file, only a regular one with a single
name. Files are never removed, or two processes could lock two files of one name.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pwd
import socket
import stat
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pynvml

from virnucpro.errors import DeviceError, OutputError
from virnucpro.telemetry.metrics.gpu_monitor import uuids_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from virnucpro.pipeline.devices import Device

LOCK_DIR_VARIABLE = "VIRNUCPRO_LOCK_DIR"
USUAL_DIRS = (Path("/run/lock/virnucpro"), Path("/tmp/virnucpro-locks"))  # noqa: S108  shared by all users, unlike TMPDIR
"""Tried in this order; an existing but unusable one is an error, or two users would lock in two places."""
OPEN_TO_ALL = 0o1777
_SAFELY = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_MOST_BYTES = 4096
_SOON_S = 2.0


@dataclass(frozen=True, kw_only=True)
class DeviceHolder:
    """The holder of a device, as it recorded itself."""

    host: str
    """Host or container."""
    pid: int
    user: str
    run_id: str
    since: str
    """UTC, ISO 8601."""

    @classmethod
    def ourselves(cls, run_id: str) -> DeviceHolder:
        """Return this process's record."""
        try:
            user = pwd.getpwuid(os.geteuid()).pw_name
        except KeyError:  # a container with an arbitrary user
            user = f"user {os.geteuid()}"
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(host=socket.gethostname(), pid=os.getpid(), user=user, run_id=run_id, since=now)


class DeviceLocks:
    """The locks of one run, by default in ``lock_dir()``; used by one thread."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = lock_dir() if folder is None else folder
        self._held: list[int] = []

    def take(self, names: Sequence[str], *, least: int, most: int, run_id: str) -> list[str] | None:
        """
        Take the locks that are free now, in the order of *names*, without waiting; return their names.

        Only one process tries at a time, so two that need several locks cannot split them. Where fewer than *least* are
        free, none is taken, and None is returned.
        """
        with self._alone() as folder:
            if folder is None:
                return None
            taken: dict[str, int] = {}
            try:
                for name in names:
                    descriptor = self._try(folder, name) if len(taken) < most else None
                    if descriptor is not None:
                        taken[name] = descriptor
                if len(taken) < least:
                    return None
                about = json.dumps(asdict(DeviceHolder.ourselves(run_id))).encode()
                for descriptor in taken.values():
                    _write(descriptor, about)
                self._held = list(taken.values())
                return list(taken)
            finally:
                for descriptor in taken.values():
                    if descriptor not in self._held:
                        _release(descriptor)

    def release(self) -> None:
        while self._held:
            descriptor = self._held.pop()
            _write(descriptor, b"")
            _release(descriptor)

    def holder(self, name: str) -> DeviceHolder | None:
        """Return the recorded holder of a lock; None when unknown or invalid."""
        try:
            descriptor = os.open(self.folder / f"{name}.lock", os.O_RDONLY | _SAFELY)
        except OSError:
            return None
        try:
            about = json.loads(os.pread(descriptor, _MOST_BYTES, 0))
            kinds = {field: int if field == "pid" else str for field in DeviceHolder.__annotations__}
            if not isinstance(about, dict) or any(type(about.get(name)) is not kind for name, kind in kinds.items()):
                return None
            return DeviceHolder(**{name: about[name] for name in kinds})
        except (OSError, ValueError, RecursionError):
            return None
        finally:
            os.close(descriptor)

    def _try(self, folder: int, name: str) -> int | None:
        """Return a descriptor of a file that we have locked, None when another process holds it."""
        path = self.folder / f"{name}.lock"
        try:
            descriptor = _opened(folder, path.name)
        except OSError as error:
            raise _unusable(path, error) from error
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_nlink != 1:
            os.close(descriptor)
            raise OutputError(path, "it is not a regular file: remove it")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError as error:
            os.close(descriptor)
            raise _unusable(path, error) from error
        return descriptor

    @contextmanager
    def _alone(self) -> Iterator[int | None]:
        """Yield the folder, locked; None when another process keeps it for too long."""
        try:
            folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise _unusable(self.folder, error) from error
        try:
            if not _is_ready(folder) or not _locked_soon(folder):
                yield None
                return
            try:
                yield folder
            finally:
                fcntl.flock(folder, fcntl.LOCK_UN)  # also for a child between fork and exec
        except OSError as error:
            raise _unusable(self.folder, error) from error
        finally:
            os.close(folder)


def lock_dir(environ: Mapping[str, str] | None = None, usual: Sequence[Path] = USUAL_DIRS) -> Path:
    """Return the folder of the locks, made and opened to all users when absent."""
    named = (os.environ if environ is None else environ).get(LOCK_DIR_VARIABLE)
    for path in [Path(os.path.realpath(named))] if named else usual:
        try:
            path.mkdir()
            path.chmod(OPEN_TO_ALL)
        except FileExistsError:
            pass
        except OSError as error:
            problem = _unusable(path, error)
            continue
        return path
    raise problem


def lock_names(
    devices: Sequence[Device], *, nvml: Any = pynvml, environ: Mapping[str, str] | None = None
) -> dict[str, Device]:
    """
    Return lock name -> GPU, in the order given.

    A name is the UUID that the driver gives, else the token, which still separates devices named in one form.
    """
    uuids = uuids_of([device.token for device in devices], nvml=nvml, environ=environ)
    names: dict[str, Device] = {}
    for device in devices:
        name = uuids.get(device.token) or (f"GPU-{device.token}" if device.token.isdigit() else device.token)
        other = names.setdefault(name.replace("/", "_"), device)
        if other is not device:
            raise DeviceError(f"--devices: {other.token} and {device.token} are one GPU ({name})")
    return names


def _is_ready(folder: int) -> bool:
    """Whether a folder has its final mode: a user who has just made it opens it a moment later."""
    about = os.fstat(folder)
    is_new = abs(time.time() - about.st_ctime) < _SOON_S
    return bool(about.st_mode & stat.S_IWOTH) or about.st_uid == os.geteuid() or not is_new


def _locked_soon(folder: int) -> bool:
    """Lock a folder that others lock for milliseconds; return whether that succeeded."""
    deadline_s = time.monotonic() + _SOON_S
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.005)
        else:
            return True


def _opened(folder: int, name: str) -> int:
    """Open or make a lock file; the caller holds the folder."""
    try:
        return os.open(name, os.O_RDWR | _SAFELY, dir_fd=folder)
    except FileNotFoundError:
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFELY, 0o666, dir_fd=folder)
        os.fchmod(descriptor, 0o666)  # despite the umask
        return descriptor
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EROFS):  # can still be locked
            return os.open(name, os.O_RDONLY | _SAFELY, dir_fd=folder)
        raise


def _write(descriptor: int, about: bytes) -> None:
    """Record the holder of a locked file, where it is writable."""
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, about, 0)


def _release(descriptor: int) -> None:
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for a child between fork and exec
    os.close(descriptor)


def _unusable(path: Path, error: OSError) -> OutputError:
    return OutputError(
        path,
        f"{error.strerror or error} (for the GPU locks set {LOCK_DIR_VARIABLE} to a folder that all users can write)",
    )
