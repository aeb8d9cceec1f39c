"""
Files that are absent or whole: temporary name, plain writes, fsync, rename, fsync of the folder.

A sealed file carries a trailer with the sha256 of everything before it, so that one flipped bit or one lost write is
seen by whoever reads it. HDF5 ignores bytes behind its own end, so a sealed HDF5 file opens like any other.

Everything that writes a file which somebody will rely on does it through here: index, unpacked input, weights, parts,
shards, result, manifest.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from virnucpro.errors import OutputError, ResultError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import FileIO
    from pathlib import Path

SEAL_MAGIC = b"VNPSEAL1"
SEAL_BYTES = len(SEAL_MAGIC) + hashlib.sha256().digest_size
TEMPORARY_SUFFIX = ".tmp"
"""Suffix of names that are still being written; whoever finds one of a run that has ended may remove it."""
_COPY_BYTES = 1 << 20


@contextmanager
def replacing(path: Path, *, seal: bool = False) -> Iterator[Path]:
    """
    Yield a temporary path beside *path*; when the block ends well its file is made durable and takes the name.

    Args:
        path: The final name.
        seal: Append the trailer before the rename.

    Raises:
        OutputError: The system refused a write; the temporary file is gone and *path* is as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        if seal:
            _append_seal(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(path, error.strerror or str(error)) from error
    finally:
        with suppress(OSError):  # it is gone, or what refused the write refuses this too
            temporary.unlink()


def write_bytes(path: Path, data: bytes, *, seal: bool = False) -> None:
    """
    Write *data* under the name *path*, whole or not at all.

    Raises:
        OutputError: The system refused.
    """
    with replacing(path, seal=seal) as temporary, temporary.open("wb", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]


def sync_folder(folder: Path) -> None:
    """Make the names in *folder* durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """Return the hex sha256 of a file's content."""
    with path.open("rb", buffering=0) as file:
        return _digest(file, os.fstat(file.fileno()).st_size).hexdigest()


def check_seal(path: Path) -> None:
    """
    Compare a sealed file with its trailer.

    Raises:
        ResultError: There is no trailer, or a byte differs.
    """
    with path.open("rb", buffering=0) as file:  # opened once: the name may be replaced while we read
        size = os.fstat(file.fileno()).st_size
        trailer = os.pread(file.fileno(), SEAL_BYTES, max(0, size - SEAL_BYTES))
        if size < SEAL_BYTES or not trailer.startswith(SEAL_MAGIC):
            raise ResultError(path, "cut short: no checksum at its end")
        if _digest(file, size - SEAL_BYTES).digest() != trailer[len(SEAL_MAGIC) :]:
            raise ResultError(path, "damaged: its bytes do not match its checksum")


def remove_strays(folder: Path) -> int:
    """Remove temporary files that a killed run left in *folder*; return how many. Only the lock's holder may."""
    strays = [path for path in folder.glob(f".*{TEMPORARY_SUFFIX}") if path.is_file()]
    for path in strays:
        path.unlink(missing_ok=True)
    return len(strays)


def _append_seal(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        digest = _digest(file, os.fstat(file.fileno()).st_size).digest()
    with path.open("ab") as file:
        file.write(SEAL_MAGIC + digest)


def _digest(file: FileIO, num_bytes: int) -> hashlib._Hash:
    digest = hashlib.sha256()
    left = num_bytes
    while left and (data := file.read(min(left, _COPY_BYTES))):
        digest.update(data)
        left -= len(data)
    return digest
