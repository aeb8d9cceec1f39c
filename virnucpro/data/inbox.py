"""
Which files of a folder have arrived whole, and what their content is.

Nothing in the folder is written, moved or removed. A file counts as arrived when nothing about it has changed for a
while by its change time, which no copying program can set. What is not taken is said with its reason; nothing that is
no regular file is ever opened.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from virnucpro.errors import BadInputError, InputProblem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

FASTA_PATTERNS = ["*.fasta", "*.fa", "*.fna", "*.fasta.gz", "*.fa.gz", "*.fna.gz"]
"""Names of FASTA files, letter case aside."""
UNFINISHED_SUFFIXES = (".part", ".partial", ".filepart", ".tmp", ".crdownload", "~")
"""What copying programs and editors append to names of files that are not yet whole."""
STILL_CHANGING = "still changing"

Identity = tuple[int, int, int, int]
"""Inode, bytes, and the times of the last change of content and of anything, in nanoseconds: no write leaves it so."""


@dataclass(frozen=True, slots=True)
class ArrivedFile:
    """A file that has come to rest."""

    path: Path
    """As it was found in the inbox."""
    target: Path
    """The same without links."""
    identity: Identity
    """Of its content."""

    @property
    def changed_ns(self) -> int:
        """Time of its last change, in nanoseconds since 1970."""
        return self.identity[3]


@dataclass(frozen=True, slots=True)
class LeftFile:
    """A file that is not taken."""

    path: Path
    """As it was found in the inbox."""
    why: str
    """The reason, without a full stop."""
    is_later: bool = False
    """Whether the next scan may take it."""


class FileChangedError(Exception):
    """A file is not what it was when the inbox was scanned."""


def scan_inbox(
    inbox_dir: Path,
    *,
    patterns: Sequence[str],
    settle_s: float,
    subfolders: bool,
    is_allowed: Callable[[str], bool],
) -> tuple[list[ArrivedFile], list[LeftFile]]:
    """
    Look through an inbox.

    Args:
        inbox_dir: The folder.
        patterns: Shell patterns; a file whose name matches none of them is not looked at.
        settle_s: Seconds for which nothing about a file must have changed.
        subfolders: Whether folders in it are looked into; links to folders never are.
        is_allowed: Whether the target of a link that leads out of the inbox may be read.

    Returns:
        The files that can be taken, those that came to rest first before the others, and those that cannot.

    Raises:
        BadInputError: The inbox cannot be read.
    """
    folder = Path(os.path.realpath(inbox_dir))
    arrived: list[ArrivedFile] = []
    left: list[LeftFile] = []
    for path in _files(inbox_dir, patterns, subfolders=subfolders):
        try:
            found = _look_at(path, folder, settle_s=settle_s, is_allowed=is_allowed)
        except OSError as error:
            found = LeftFile(path, f"cannot be read: {error.strerror or error}")
        if isinstance(found, ArrivedFile):
            arrived.append(found)
        else:
            left.append(found)
    arrived.sort(key=lambda file: (file.changed_ns, os.fsencode(file.path)))
    left.sort(key=lambda file: os.fsencode(file.path))
    return arrived, left


def content_of(file: ArrivedFile) -> str:
    """
    Return the hex sha256 of a file's content, as it was when the inbox was scanned.

    Raises:
        FileChangedError: It was changed, replaced or removed meanwhile.
        OSError: It cannot be read.
    """
    try:
        # without O_NONBLOCK a FIFO that took the name meanwhile would hold us up for good
        descriptor = os.open(file.target, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO):
            raise FileChangedError from error
        raise
    with os.fdopen(descriptor, "rb", buffering=0) as content:
        if _identity(os.fstat(descriptor)) != file.identity:
            raise FileChangedError
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    try:
        after = file.path.stat()  # by its name: it may be another file by now
    except FileNotFoundError as error:
        raise FileChangedError from error
    if _identity(after) != file.identity:
        raise FileChangedError
    return digest


def _files(inbox_dir: Path, patterns: Sequence[str], *, subfolders: bool) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        problem = InputProblem(
            str(error.filename), None, error.strerror or str(error), "give a folder that can be read"
        )
        raise BadInputError([problem]) from error

    wanted = [pattern.lower() for pattern in patterns]
    for folder, folders, names in os.walk(inbox_dir, onerror=refuse):
        links = [name for name in folders if Path(folder, name).is_symlink()]  # said; a folder is just no file
        for name in [*names, *links]:
            if any(fnmatchcase(name.lower(), pattern) for pattern in wanted):
                yield Path(folder, name)
        folders[:] = [name for name in folders if not name.startswith(".")] if subfolders else []


def _look_at(path: Path, inbox: Path, *, settle_s: float, is_allowed: Callable[[str], bool]) -> ArrivedFile | LeftFile:
    name = path.name
    if name.startswith(".") or name.lower().endswith(UNFINISHED_SUFFIXES):
        return LeftFile(path, "hidden, or named like a file that is not yet whole")
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return LeftFile(path, "its name is not UTF-8")
    target = Path(os.path.realpath(path))
    if not target.is_relative_to(inbox) and not is_allowed(str(target)):
        return LeftFile(path, "a link to somewhere that flows may not read")
    found = target.stat()
    if not stat.S_ISREG(found.st_mode):
        return LeftFile(path, "not a regular file")
    if time.time() - found.st_ctime < settle_s:
        return LeftFile(path, STILL_CHANGING, is_later=True)
    if not found.st_size:
        return LeftFile(path, "empty")
    return ArrivedFile(path, target, _identity(found))


def _identity(found: os.stat_result) -> Identity:
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
