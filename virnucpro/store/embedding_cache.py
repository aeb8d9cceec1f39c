"""
The embedding cache: rows of earlier runs on this machine, by what was embedded and by what.

One SQLite file in write-ahead mode. It was chosen over the others at hand: ``diskcache`` is no longer maintained and
unpickles what it reads (CVE-2025-69872); LMDB is one more dependency and reserves its whole size up front; segment
files of our own would have to solve again what SQLite has solved: several processes that write at once, a process
killed at any instruction, space that is used again after eviction. Pages have 64 KiB, so that rows of 2560 numbers
waste little of them; what changes on every use (when a row was last used) stands apart from the rows.

Every row carries a checksum over the model's key, the sequence's hash and the numbers, so that a flipped bit, in the
row or in the tables that lead to it, is a row that is not there and never a wrong one. The checksum is no signature:
whoever can write to the folder decides what runs read from it.

The file must be on a disk of this machine: write-ahead mode needs memory that all processes share, which network file
systems do not give, so there it is refused. Every failure is a ``CacheError``; the caller goes on without the cache.

This module knows hashes and rows; it does not know sequences, blocks, models or runs.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sqlite3
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from virnucpro.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    FloatArray = np.ndarray[Any, np.dtype[np.float32]]
    ByteArray = np.ndarray[Any, np.dtype[np.uint8]]

FILE_NAME = "embeddings.sqlite"
FORMAT = 1
LOCK_TIMEOUT_S = 5.0
"""Seconds that we wait for another process's write; a process that was stopped in the middle of one holds it on."""
_PAGE_BYTES = 1 << 16
_DIGEST_BYTES = 16
_HASHES_AT_ONCE = 1000
"""Hashes in one question, far below SQLite's limit."""
_UNSAVED_USES = 20_000
"""Rows read whose use is not written down yet, at the most."""
_ENTRY_BYTES = 120
"""Bytes that a row costs beside its numbers: its entry and its place in two indexes, rounded up."""
_NETWORK_FILE_SYSTEMS = frozenset(
    ("9p", "afs", "beegfs", "ceph", "cifs", "fuse.glusterfs", "fuse.sshfs", "gpfs", "lustre", "nfs", "nfs4", "smb3")
)

_SCHEMA = """
CREATE TABLE entries (id INTEGER PRIMARY KEY, space INTEGER NOT NULL, hash BLOB NOT NULL, bytes INTEGER NOT NULL,
    used INTEGER NOT NULL);
CREATE UNIQUE INDEX entries_by_hash ON entries (space, hash);
CREATE INDEX entries_by_use ON entries (used);
CREATE TABLE vectors (id INTEGER PRIMARY KEY, data BLOB NOT NULL);
"""


class EmbeddingCache:
    """
    The rows of one space (one model with the settings that decide its numbers) in the cache of one folder.

    For one thread at a time; open one in each process. Use it as a context manager, or ``close`` it.

    Args:
        folder: Where the cache lives; made when it is not there.
        space: Everything beside the sequence that decides a row, as text.
        max_bytes: Bytes of the cache's file at the most, over all spaces; the least recently used rows make room. The
            write-ahead file beside it comes on top, some 64 MiB while runs write.
        clock: Seconds since any fixed time, the same for all who use the folder.

    Raises:
        CacheError: It cannot be opened here.
    """

    def __init__(self, folder: Path, space: str, *, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self.path = folder / FILE_NAME
        self._max_bytes = max_bytes
        self._clock = clock
        self._checksum_start = hashlib.sha256(f"{space}\n".encode())
        self._space = int.from_bytes(self._checksum_start.digest()[:8], "little", signed=True)
        self._used: list[int] = []
        self._damaged: list[int] = []
        with self._errors():
            folder.mkdir(parents=True, exist_ok=True)
            if (kind := file_system_of(folder)) in _NETWORK_FILE_SYSTEMS:
                raise CacheError(self.path, f"it is on a network file system ({kind}): name a folder on a local disk")
            if not self.path.exists():
                _create(self.path)
            self._database = _connect(self.path)
        try:
            with self._errors():
                self._check_format()
        except CacheError:
            self._database.close()
            raise

    def get(self, hashes: ByteArray) -> FloatArray | None:
        """
        Return the rows of sequences, or nothing unless every one of them is there and undamaged.

        Args:
            hashes: uint8 (n, 16): of the sequences, each once, n at least 1.

        Returns:
            float32 (n, hidden_dim) in the order of *hashes*, or None.

        Raises:
            CacheError: The file cannot be read.
        """
        wanted = [item.tobytes() for item in hashes]
        with self._errors():
            ids = self._ids_of(wanted)
            if len(ids) < len(wanted):
                return None
            data = self._data_of(list(ids.values()))
        rows = []
        for item in wanted:
            vector = self._checked(item, data.get(ids[item], b""))
            if vector is None:
                self._damaged.append(ids[item])
                return None
            rows.append(vector)
        if len({len(row) for row in rows}) != 1:
            return None
        self._used.extend(ids.values())
        if len(self._used) >= _UNSAVED_USES:
            with self._errors(), self._writing():
                pass
        return np.frombuffer(b"".join(rows), dtype="<f4").reshape(len(rows), -1).astype(np.float32, copy=False)

    def put(self, hashes: ByteArray, rows: FloatArray) -> None:
        """
        Keep the rows of sequences; those that are there already stay as they are.

        Args:
            hashes: uint8 (n, 16): of the sequences, each once.
            rows: float32 (n, hidden_dim).

        Raises:
            CacheError: They could not be written; the cache is as it was.
        """
        assert len(hashes) == len(rows), "one row for each hash"
        given = {item.tobytes(): row for item, row in zip(hashes, np.ascontiguousarray(rows, "<f4"), strict=True)}
        with self._errors(), self._writing():
            known = self._ids_of(list(given))
            fresh = {item: row for item, row in given.items() if item not in known}
            row_bytes = rows.shape[1] * 4 + _DIGEST_BYTES
            needed_bytes = len(fresh) * (row_bytes + _ENTRY_BYTES)
            if not fresh or needed_bytes > self._max_bytes - 8 * _PAGE_BYTES or not self._make_room(needed_bytes):
                return
            (last,) = self._database.execute("SELECT coalesce(max(id), 0) FROM entries").fetchone()
            if not 0 <= last < 1 << 60:
                raise CacheError(self.path, "it is damaged: remove it")
            now = int(self._clock())
            self._database.executemany(
                "INSERT INTO entries (id, space, hash, bytes, used) VALUES (?, ?, ?, ?, ?)",
                ((last + number, self._space, item, row_bytes, now) for number, item in enumerate(fresh, 1)),
            )
            self._database.executemany(
                "INSERT OR REPLACE INTO vectors (id, data) VALUES (?, ?)",
                ((last + number, self._sealed(item, row)) for number, (item, row) in enumerate(fresh.items(), 1)),
            )

    def close(self) -> None:
        """Write down what was used, and close the file; a failure to do so costs nothing but the order of eviction."""
        if self._used or self._damaged:
            with suppress(CacheError), self._errors(), self._writing():
                pass
        self._database.close()

    def _check_format(self) -> None:
        """Raise ``CacheError`` where the file is of another format, or where we may not write to it."""
        (found,) = self._database.execute("PRAGMA user_version").fetchone()
        if found != FORMAT:
            raise CacheError(self.path, f"it is of format {found}, not {FORMAT}: name another folder")
        self._database.execute("BEGIN IMMEDIATE")
        self._database.execute("ROLLBACK")

    def _ids_of(self, hashes: list[bytes]) -> dict[bytes, int]:
        found: dict[bytes, int] = {}
        for start in range(0, len(hashes), _HASHES_AT_ONCE):
            some = hashes[start : start + _HASHES_AT_ONCE]
            question = f"SELECT hash, id FROM entries WHERE space = ? AND hash IN ({_marks(some)})"  # noqa: S608
            found.update(self._database.execute(question, (self._space, *some)))
        return found

    def _data_of(self, ids: list[int]) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        for start in range(0, len(ids), _HASHES_AT_ONCE):
            some = ids[start : start + _HASHES_AT_ONCE]
            question = f"SELECT id, data FROM vectors WHERE id IN ({_marks(some)})"  # noqa: S608
            found.update(self._database.execute(question, some))
        return found

    def _sealed(self, sequence_hash: bytes, row: FloatArray) -> bytes:
        data = row.tobytes()
        return self._digest(sequence_hash, data) + data

    def _checked(self, sequence_hash: bytes, sealed: bytes) -> bytes | None:
        """Return the numbers of a row as bytes, or None when they are not those that were put there for it."""
        if not isinstance(sealed, bytes) or len(sealed) <= _DIGEST_BYTES:
            return None
        data = sealed[_DIGEST_BYTES:]
        return data if self._digest(sequence_hash, data) == sealed[:_DIGEST_BYTES] else None

    def _digest(self, sequence_hash: bytes, data: bytes) -> bytes:
        checksum = self._checksum_start.copy()
        checksum.update(sequence_hash)
        checksum.update(data)
        return checksum.digest()[:_DIGEST_BYTES]

    def _save_uses(self) -> None:
        """Write down which rows were used, and take out damaged ones."""
        now = int(self._clock())
        self._database.executemany("UPDATE entries SET used = ? WHERE id = ?", ((now, number) for number in self._used))
        self._remove(self._damaged)
        self._used, self._damaged = [], []

    def _remove(self, ids: list[int]) -> None:
        for table in ("entries", "vectors"):
            self._database.executemany(f"DELETE FROM {table} WHERE id = ?", ((number,) for number in ids))  # noqa: S608

    def _make_room(self, needed_bytes: int) -> bool:
        """Remove the least recently used rows until *needed_bytes* fit; return whether they do."""
        question = "SELECT id, coalesce(CAST(bytes AS INTEGER), 0) FROM entries ORDER BY used, id"
        while (excess := self._filled_bytes() + needed_bytes - self._max_bytes) > 0:
            ids = []
            target = max(excess, self._max_bytes // 64)  # a little more, so that not every put has to
            for number, row_bytes in self._database.execute(question):
                ids.append(number)
                target -= row_bytes
                if target <= 0:
                    break
            if not ids:
                return False
            before = self._database.total_changes
            self._remove(ids)
            if self._database.total_changes == before:
                raise CacheError(self.path, "it is damaged: remove it")
        return True

    def _filled_bytes(self) -> int:
        (pages,) = self._database.execute("PRAGMA page_count").fetchone()
        (free,) = self._database.execute("PRAGMA freelist_count").fetchone()
        return int(pages - free) * _PAGE_BYTES

    def _give_back_pages(self) -> None:
        """Shorten a file that is over its bound, which freed pages alone do not."""
        (pages,) = self._database.execute("PRAGMA page_count").fetchone()
        excess = pages - self._max_bytes // _PAGE_BYTES
        for _ in range(excess):  # Python's module takes one step of a statement without rows, which is one page
            self._database.execute("PRAGMA incremental_vacuum(1)")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A transaction that writes down what was used before, and leaves the file within its bound."""
        self._database.execute("BEGIN IMMEDIATE")
        try:
            self._save_uses()
            yield
            self._make_room(0)
            self._give_back_pages()
        except BaseException:
            with suppress(sqlite3.Error):  # what went wrong may have ended it already
                self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            damaged = type(error) is sqlite3.DatabaseError  # its subclasses tell of anything else
            raise CacheError(self.path, f"{error}{': remove it' if damaged else ''}") from error
        except CacheError:
            raise
        except OSError as error:
            raise CacheError(self.path, error.strerror or str(error)) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def file_system_of(folder: Path) -> str | None:
    """Return the type of the file system that holds *folder*, as Linux names it; None where that is not known."""
    device = folder.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError), Path("/proc/self/mountinfo").open(encoding="utf-8", errors="replace") as file:
        for line in file:
            fields = line.split()
            if fields[2] == wanted:
                return fields[fields.index("-") + 1]
    return None


def _create(path: Path) -> None:
    """Make an empty cache under a name of its own, then give it *path*, unless another process was first."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        database = _connect(temporary, mode="rwc")
        try:
            database.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
            database.execute("PRAGMA auto_vacuum = INCREMENTAL")
            database.execute("PRAGMA journal_mode = WAL")
            database.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {FORMAT}; COMMIT")
        finally:
            database.close()
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _connect(path: Path, *, mode: str = "rw") -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    database = sqlite3.connect(uri, uri=True, timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    database.execute("PRAGMA synchronous = NORMAL")  # a power cut may cost the last rows, never the file
    database.execute("PRAGMA journal_size_limit = 67108864")
    database.execute("PRAGMA trusted_schema = OFF")
    return database


def _marks(values: list[Any]) -> str:
    return ",".join("?" * len(values))
