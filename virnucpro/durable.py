"""
Files that are absent or whole: temporary name, plain writes, fsync, rename, fsync of the folder.

A sealed file ends with the sha256 of everything before, so a flipped bit or a lost write is detected on reading; HDF5
ignores the trailer. Every file that a run relies on is written here: index, unpacked input, weights, parts, shards,
result, manifest. Each step is a failpoint.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from virnucpro import failpoints, run_folders
from virnucpro.errors import OutputError, ResultError, of_surroundings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import FileIO
    from pathlib import Path
    from typing import Self

SEAL_MAGIC = b"VNPSEAL1"
SEAL_BYTES = len(SEAL_MAGIC) + hashlib.sha256().digest_size
_TEMPORARY_NAME = re.compile(r"\..+\.(?P<mark>[0-9a-z]+)\.(?P<pid>\d+)\.[0-9a-f]{8}\.tmp")
_NO_RUN = "norun"
_COPY_BYTES = 1 << 20
_SYNC_BYTES = 1 << 28
_RESERVE_BYTES = 1 << 30
"""Most bytes synced or allocated by one call: no signal is handled meanwhile."""
_CANNOT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of file systems without fsync of folders or reservation of space."""

_being_written: set[str] = set()
"""Temporary names of this process."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise OutputError, of *path*, where the system refuses something."""
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(path, error.strerror or str(error)) from error


@contextmanager
def surroundings_named(place: Path) -> Iterator[None]:
    """Raise SurroundingsError, of *place* or a better known file, where memory, a disk or a limit fails."""
    try:
        yield
    except Exception as error:
        if (found := of_surroundings(error, place)) is not None:
            raise found from error
        raise


@contextmanager
def temporary_name(path: Path) -> Iterator[Path]:
    """Yield a name beside *path* with the mark of its run; a file left under it is removed."""
    mark = run_folders.mark_of(path.parent) or _NO_RUN
    temporary = path.with_name(f".{path.name[:40]}.{mark}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    _being_written.add(temporary.name)
    try:
        yield temporary
    finally:
        with suppress(OSError):  # it has been renamed, or the cause of the failed write remains
            temporary.unlink()
        _being_written.discard(temporary.name)


class NewFile:
    """
    A file under its temporary name, written with plain writes.

    Args:
        path: The temporary name; links are refused.
        exists: Continue an existing file; otherwise it must be absent.
    """

    def __init__(self, path: Path, *, exists: bool = False) -> None:
        self.path = path
        failpoints.reach("file.open")
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (0 if exists else os.O_CREAT | os.O_EXCL)
        self._descriptor = os.open(path, flags, 0o666)  # minus the umask
        self._unsynced_bytes = 0
        self.seal = b""
        """sha256 of what stands before the trailer, once that is written."""

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: bytes | memoryview) -> int:
        """Append all of *data*; return its bytes."""
        return self.write_at(data, os.lseek(self._descriptor, 0, os.SEEK_END))

    def write_at(self, data: bytes | memoryview, at_bytes: int) -> int:
        """Write all of *data* at byte *at_bytes*; return its bytes."""
        view = memoryview(data)
        num_bytes = view.nbytes
        view = view.cast("B") if num_bytes else view
        while view.nbytes:
            failpoints.reach("file.write")
            written = os.pwrite(self._descriptor, view, at_bytes)
            view, at_bytes = view[written:], at_bytes + written
        self._unsynced_bytes += num_bytes
        if self._unsynced_bytes >= _SYNC_BYTES:
            self._unsynced_bytes = 0
            os.fdatasync(self._descriptor)
        return num_bytes

    def reserve(self, size_bytes: int) -> None:
        """Allocate disk space for the first *size_bytes*, and extend the file to them."""
        reserve(self._descriptor, size_bytes)

    def sha256(self) -> bytes:
        """Return the digest of the content."""
        return _digest(self._descriptor, os.fstat(self._descriptor).st_size).digest()

    def sync(self) -> None:
        """Make the content durable."""
        failpoints.reach("file.fsync")
        os.fsync(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


@contextmanager
def replacing(path: Path, *, seal: bool = False) -> Iterator[NewFile]:
    """
    Yield a file under a temporary name; when the block succeeds it is made durable and renamed to *path*.

    Args:
        seal: Append the trailer before the rename.
    """
    with writing(path), temporary_name(path) as temporary:
        make_folder(path.parent)
        with NewFile(temporary) as file:
            yield file
            if seal:
                file.seal = file.sha256()
                file.write(SEAL_MAGIC + file.seal)
            file.sync()
        failpoints.reach("file.rename")
        temporary.replace(path)
        sync_folder(path.parent)


def write_bytes(path: Path, data: bytes, *, seal: bool = False) -> bytes:
    """Write *data* to *path*, whole or not at all; return the sha256 in the seal."""
    with replacing(path, seal=seal) as file:
        file.write(data)
    return file.seal


def remove(path: Path) -> None:
    """Remove a file if it exists; no link is followed in a run's folder."""
    with writing(path):
        failpoints.reach("file.unlink")
        with suppress(FileNotFoundError), run_folders.opened(path.parent) as folder:
            os.unlink(path.name, dir_fd=folder)


def remove_tree(folder: Path) -> None:
    """Remove a folder that only runs write to, as far as possible."""
    with suppress(OSError), run_folders.opened(folder.parent) as above:
        shutil.rmtree(folder.name, ignore_errors=True, dir_fd=above)


def remove_empty(folder: Path) -> None:
    with suppress(OSError), run_folders.opened(folder.parent) as above:
        os.rmdir(folder.name, dir_fd=above)


def reserve(descriptor: int, size_bytes: int) -> None:
    """
    Allocate disk space for the first *size_bytes* of an open file, where the file system can.

    Raises:
        OSError: There is not enough space.
    """
    failpoints.reach("file.reserve")
    try:
        for at in range(0, size_bytes, _RESERVE_BYTES):
            os.posix_fallocate(descriptor, at, min(_RESERVE_BYTES, size_bytes - at))
    except OSError as error:
        if error.errno not in _CANNOT:
            raise


def make_folder(folder: Path) -> None:
    """
    Make a folder and its parents durably.

    Raises:
        OSError: It cannot be made.
    """
    if folder.is_dir():
        return
    make_folder(folder.parent)
    failpoints.reach("folder.make")
    folder.mkdir(exist_ok=True)
    with suppress(PermissionError):  # a parent that we may enter but not read
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in *folder* durable."""
    failpoints.reach("folder.fsync")
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """Return the hex sha256 of a file's content."""
    with open(path, "rb", buffering=0, opener=run_folders.only_regular) as file:
        return _digest(file.fileno(), os.fstat(file.fileno()).st_size).hexdigest()


def check_sha256(path: Path, digest: str | None) -> None:
    """Raise ResultError unless the file is there with this hex sha256; reads all of it, about 1 s a GB."""
    try:
        found = sha256_of(path)
    except OSError as error:
        what = "is missing" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
        raise ResultError(path, what) from error
    if found != digest:
        raise ResultError(path, "damaged: its sha256 is not the one that run.json recorded")


def check_seal(path: Path) -> bytes:
    """Check a sealed file against its trailer, and return the sha256 of everything before it."""
    with regular_or_result_error(path) as file:  # opened once: the name may be replaced while we read
        digest = seal_of(file.fileno())
        if digest is None:
            raise ResultError(path, "truncated: no checksum at its end")
        if _digest(file.fileno(), os.fstat(file.fileno()).st_size - SEAL_BYTES).digest() != digest:
            raise ResultError(path, "damaged: its bytes do not match its checksum")
    return digest


def seal_of(descriptor: int) -> bytes | None:
    """Return the sha256 in the trailer of an open file, None without a trailer."""
    size = os.fstat(descriptor).st_size
    trailer = run_folders.read_at(descriptor, SEAL_BYTES, max(0, size - SEAL_BYTES))
    return trailer[len(SEAL_MAGIC) :] if size >= SEAL_BYTES and trailer.startswith(SEAL_MAGIC) else None


def remove_strays(folder: Path) -> int:
    """
    Remove the temporary files in *folder* of ended processes of its run; return how many.

    Only names with the mark of the folder's run are touched. The caller holds the folder's lock, so processes of other
    hosts have ended too. A name with a live process number of this host stays, unless it is this process and not in
    use.
    """
    mark, removed = run_folders.mark_of(folder), 0
    with suppress(OSError), run_folders.opened(folder) as descriptor:
        for name in os.listdir(descriptor):  # noqa: PTH208  Path knows no descriptors
            found = _TEMPORARY_NAME.fullmatch(name)
            if found is None or found["mark"] != mark or _is_in_use(name, int(found["pid"])):
                continue
            with suppress(OSError):  # harmless; the next start tries again
                if stat.S_ISREG(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
                    os.unlink(name, dir_fd=descriptor)
                    removed += 1
    return removed


def _is_in_use(name: str, pid: int) -> bool:
    return name in _being_written if pid == os.getpid() else process_exists(pid)


def process_exists(pid: int) -> bool:
    """Whether a process of this host has the number *pid*."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def regular_or_result_error(path: Path) -> FileIO:
    """
    Open a regular file for plain reads.

    Raises:
        FileNotFoundError: There is no such file.
    """
    try:
        return open(path, "rb", buffering=0, opener=run_folders.only_regular)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ResultError(path, error.strerror or str(error)) from error


def _digest(descriptor: int, num_bytes: int) -> hashlib._Hash:
    digest = hashlib.sha256()
    at = 0
    while at < num_bytes and (data := os.pread(descriptor, min(num_bytes - at, _COPY_BYTES), at)):
        digest.update(data)
        at += len(data)
    return digest
