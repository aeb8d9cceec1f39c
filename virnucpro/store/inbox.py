"""
An inbox: which files of a folder have arrived completely, and which contents were taken already.

Nothing in the folder is written, moved or removed. A file has arrived when its change time, which no copying program
can set, is old enough. Every skipped file has a reason; only regular files are opened.

A content that was taken has a claim, one small durable file in the results folder. It is on disk before its run is
created, with an idempotency key, and gets the run's id afterwards. A scan killed at any step therefore neither loses a
file nor takes it twice. Removing a claim makes the content new again. Users of the memory hold its lock.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import stat
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from virnucpro import durable
from virnucpro.errors import BadInputError, InputProblem, ResultError
from virnucpro.run_folders import read_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


FASTA_PATTERNS = ["*.fasta", "*.fa", "*.fna", "*.fasta.gz", "*.fa.gz", "*.fna.gz"]
"""Names of FASTA files, of either case."""
UNFINISHED_SUFFIXES = (".part", ".partial", ".filepart", ".tmp", ".crdownload", "~")
"""What copying programs and editors append to names of incomplete files."""
STILL_CHANGING = "still changing"
MEMORY_DIR = ".inbox"
LOCK = "lock"
_SEEN = "seen.json"
_RACY_NS = 2_000_000_000
"""Two changes within this time may have the same timestamp: clocks of file systems are coarse."""

Identity = tuple[int, int, int, int]
"""Inode, bytes, and the times of the last change of content and of anything, in nanoseconds: every write changes it."""


@dataclass(frozen=True, slots=True)
class ArrivedFile:
    path: Path
    target: Path
    """The same with links resolved."""
    identity: Identity


@dataclass(frozen=True, slots=True)
class SkippedFile:
    path: Path
    reason: str
    """Without a full stop."""
    is_later: bool = False
    """Whether a later scan may take it."""


class FileChangedError(Exception): ...


def scan_inbox(
    inbox_dir: Path,
    *,
    patterns: Sequence[str],
    idle_s: float,
    subfolders: bool,
    is_allowed: Callable[[str], bool],
) -> tuple[list[ArrivedFile], list[SkippedFile]]:
    """
    Return the files that can be taken, the oldest change first, and those that cannot.

    Args:
        patterns: Shell patterns of file names; others are ignored.
        idle_s: Seconds for which a file must not have changed.
        subfolders: Whether to look into folders; links to folders are never followed.
        is_allowed: Whether the target of a link that leads out of the inbox may be read.

    Raises:
        BadInputError: The inbox cannot be read.
    """
    folder = Path(os.path.realpath(inbox_dir))
    arrived: list[ArrivedFile] = []
    skipped: list[SkippedFile] = []
    for path in _files(inbox_dir, patterns, subfolders=subfolders):
        try:
            found = _look_at(path, folder, idle_s=idle_s, is_allowed=is_allowed)
        except OSError as error:
            found = SkippedFile(path, f"cannot be read: {error.strerror or error}")
        if isinstance(found, ArrivedFile):
            arrived.append(found)
        else:
            skipped.append(found)
    arrived.sort(key=lambda file: (file.identity[-1], os.fsencode(file.path)))
    skipped.sort(key=lambda file: os.fsencode(file.path))
    return arrived, skipped


def content_of(file: ArrivedFile) -> str:
    """Return the hex sha256 of a file's content; FileChangedError if it changed or disappeared since the scan."""
    try:
        # without O_NONBLOCK a FIFO that has taken the name would block for ever
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
        after = file.path.stat()  # by its name: another file may have it now
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
        links = [name for name in folders if Path(folder, name).is_symlink()]  # reported; a folder is simply no file
        for name in [*names, *links]:
            if any(fnmatchcase(name.lower(), pattern) for pattern in wanted):
                yield Path(folder, name)
        folders[:] = [name for name in folders if not name.startswith(".")] if subfolders else []


def _look_at(path: Path, inbox: Path, *, idle_s: float, is_allowed: Callable[[str], bool]) -> ArrivedFile | SkippedFile:
    name = path.name
    if name.startswith(".") or name.lower().endswith(UNFINISHED_SUFFIXES):
        return SkippedFile(path, "hidden, or named like a file that is not yet whole")
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return SkippedFile(path, "its name is not UTF-8")
    target = Path(os.path.realpath(path))
    if not target.is_relative_to(inbox) and not is_allowed(str(target)):
        return SkippedFile(path, "a link to somewhere that flows may not read")
    found = target.stat()
    if not stat.S_ISREG(found.st_mode):
        return SkippedFile(path, "not a regular file")
    if time.time() - found.st_ctime < idle_s:
        return SkippedFile(path, STILL_CHANGING, is_later=True)
    if not found.st_size:
        return SkippedFile(path, "empty")
    return ArrivedFile(path, target, _identity(found))


def _identity(found: os.stat_result) -> Identity:
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


@dataclass(frozen=True, slots=True)
class Claim:
    """A content that was taken."""

    sha256: str
    source: str
    """The file where it was first found."""
    run_folder: str
    """Name of its run's folder among the results."""
    key: str
    """Idempotency key of the run."""
    flow_run_id: str | None = None
    """None until the server has confirmed the run."""


class InboxMemory:
    """The memory of one results folder."""

    def __init__(self, output_root: Path) -> None:
        self.folder = output_root / MEMORY_DIR
        self._seen: dict[str, list[object]] = {}
        self._seen_now: dict[str, list[object]] = {}
        with suppress(OSError, ValueError, TypeError):  # only a cache: without it every file is hashed again
            self._seen = dict(json.loads(read_bytes(self.folder / _SEEN)))

    @property
    def lock(self) -> Path:
        """Held by the one scan that uses the memory."""
        return self.folder / LOCK

    def content_seen(self, path: Path, identity: Sequence[int]) -> str | None:
        """Return the sha256 of a file that an earlier scan read, if the file is unchanged."""
        seen = self._seen.get(str(path))
        if not isinstance(seen, list) or seen[:-1] != list(identity):
            return None
        self._seen_now[str(path)] = seen
        return str(seen[-1])

    def note_content(self, path: Path, identity: Sequence[int], sha256: str) -> None:
        """
        Record the sha256 of a file, unless it changed so recently that a further change could be missed.

        *identity* is what shows a change; its last item is the time of the last change in nanoseconds.
        """
        if time.time_ns() - identity[-1] > _RACY_NS:
            self._seen_now[str(path)] = [*identity, sha256]

    def save_contents(self) -> None:
        """Save the records of files that still exist."""
        if self._seen_now != self._seen:
            durable.write_bytes(self.folder / _SEEN, json.dumps(self._seen_now).encode())

    def claim_of(self, sha256: str) -> Claim | None:
        """Return the claim of a content, None when it is new."""
        path = self.path_of(sha256)
        try:
            claim = Claim(**json.loads(read_bytes(path)))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            reason = f"not a readable claim ({error}): remove it to process the content again"
            raise ResultError(path, reason) from error
        if claim.sha256 != sha256:
            raise ResultError(path, f"the claim of another content: rename it to {claim.sha256}.json")
        return claim

    def take(self, source: Path, sha256: str) -> Claim:
        """Claim a new content durably, before its run is created."""
        stem = re.sub(r"[^A-Za-z0-9._-]+", "_", source.name).strip("._")[:80]
        claim = Claim(
            sha256=sha256,
            source=str(source),
            run_folder=f"{stem or 'file'}-{sha256[:16]}",
            key=f"virnucpro-inbox-{sha256[:16]}-{secrets.token_hex(8)}",
        )
        self._write(claim)
        return claim

    def note_run(self, claim: Claim, flow_run_id: str) -> Claim:
        noted = replace(claim, flow_run_id=flow_run_id)
        self._write(noted)
        return noted

    def path_of(self, sha256: str) -> Path:
        return self.folder / f"{sha256}.json"

    def _write(self, claim: Claim) -> None:
        durable.write_bytes(self.path_of(claim.sha256), json.dumps(asdict(claim), indent=1).encode() + b"\n")
