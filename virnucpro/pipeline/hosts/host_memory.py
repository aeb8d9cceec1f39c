"""
What takes long to find out about this host's files, found out by one process and remembered for the others.

Several workers share a host, and each needs to know that the input and the weights there are the run's. The memory is
in a folder of the user's own below the system's temporary one, and is asked about one very file in one very run: its
size, its inode and the time of its last change are part of the question.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
from pathlib import Path

from virnucpro import durable


def sha256_once(path: Path, *, run_id: str) -> str:
    """
    Return the hex sha256 of a file, read by the first process of this host that asks in this start of a run.

    Args:
        path: The file.
        run_id: Of the start of the run.

    Raises:
        OSError: It cannot be read.
    """
    about = path.stat()
    question = f"{run_id}\n{path.absolute()}\n{about.st_dev} {about.st_ino} {about.st_size} {about.st_mtime_ns}"
    folder = _own_folder()
    if folder is None:
        return durable.sha256_of(path)
    answer = folder / hashlib.sha256(question.encode("utf-8", "surrogateescape")).hexdigest()
    descriptor = os.open(answer, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        known = os.pread(descriptor, 64, 0).decode("ascii", "replace")
        if len(known) == 64:
            return known
        found = durable.sha256_of(path)
        os.pwrite(descriptor, found.encode(), 0)
        return found
    finally:
        os.close(descriptor)


def _own_folder() -> Path | None:
    """Return our folder, which no other user can write into; None where there is something else in its place."""
    folder = Path(tempfile.gettempdir()) / f"virnucpro-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
    except OSError:
        return None
    is_ours = stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o077
    return folder if is_ours else None
