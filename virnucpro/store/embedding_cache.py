"""
The embedding cache: rows of earlier runs on this machine, by model settings and sequence hash.

One SQLite file in write-ahead mode. Rejected: ``diskcache`` (unmaintained, unpickles what it reads, CVE-2025-69872),
LMDB (one more dependency, reserves its full size up front) and segment files of our own (concurrent writers, kills and
reuse of space, all solved by SQLite). Pages have 64 KiB, so that rows of 2560 numbers waste little.

Each row has a checksum over model key, hash and numbers: a flipped bit is a miss, never a wrong row. It is no
signature: who can write to the folder decides what runs read. The file must be on a local disk, since write-ahead mode
needs shared memory. Every failure is a ``CacheError``; the caller continues without the cache.
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

    from virnucpro.arrays import ByteArray, FloatArray

FILE_NAME = "embeddings.sqlite"
FORMAT = 1
LOCK_TIMEOUT_S = 5.0
"""Seconds to wait for another process's write; one stopped in the middle holds the lock."""
_PAGE_BYTES = 1 << 16
_DIGEST_BYTES = 16
_KEYS_AT_ONCE = 1000
"""Keys in one query, far below SQLite's limit."""
_UNSAVED_USES = 20_000
"""Most uses kept in memory before they are saved."""
_ENTRY_BYTES = 120
"""Bytes of a row beside its numbers: its entry and two index entries, rounded up."""
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
    The rows of one space (a model and the settings that decide its numbers); a context manager.

    For one thread at a time; open one in each process.

    Args:
        space: Text of everything but the sequence that decides a row.
        max_bytes: Most bytes of the file over all spaces; least recently used rows go first. The write-ahead file comes
            on top, about 64 MiB while runs write.
        clock: Seconds since a fixed time, the same for all users of the folder.
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
        """Return float32 (n, hidden_dim) for *hashes*, uint8 (n, 16), or None unless all are present and intact."""
        wanted = [item.tobytes() for item in hashes]
        with self._errors():
            ids = self._ids_of(wanted)
            if len(ids) < len(wanted):
                return None
            data = self._found("SELECT id, data FROM vectors WHERE id", list(ids.values()))
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
        """Store *rows*, float32 (n, hidden_dim), under *hashes*, uint8 (n, 16), each once; existing rows stay."""
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
                (
                    (last + number, self._digest(item, row.tobytes()) + row.tobytes())
                    for number, (item, row) in enumerate(fresh.items(), 1)
                ),
            )

    def close(self) -> None:
        """Save the uses and close the file; a failure only affects the order of eviction."""
        if self._used or self._damaged:
            with suppress(CacheError), self._errors(), self._writing():
                pass
        self._database.close()

    def _check_format(self) -> None:
        """Raise ``CacheError`` for another format or a read-only file."""
        if (found := self._pragma("user_version")) != FORMAT:
            raise CacheError(self.path, f"it is of format {found}, not {FORMAT}: name another folder")
        self._database.execute("BEGIN IMMEDIATE")
        self._database.execute("ROLLBACK")

    def _found(self, query: str, keys: list[Any], *given: Any) -> dict[Any, Any]:
        """Return what *query* finds for *keys*, the first column of it by the second; it ends before ``IN``."""
        found: dict[Any, Any] = {}
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            some = keys[start : start + _KEYS_AT_ONCE]
            found.update(self._database.execute(f"{query} IN ({','.join('?' * len(some))})", (*given, *some)))
        return found

    def _ids_of(self, hashes: list[bytes]) -> dict[bytes, int]:
        return self._found("SELECT hash, id FROM entries WHERE space = ? AND hash", hashes, self._space)

    def _checked(self, sequence_hash: bytes, sealed: bytes) -> bytes | None:
        """Return the bytes of a row, None when its checksum does not match."""
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
        """Write the times of use, and remove damaged rows."""
        now = int(self._clock())
        self._database.executemany("UPDATE entries SET used = ? WHERE id = ?", ((now, number) for number in self._used))
        self._remove(self._damaged)
        self._used, self._damaged = [], []

    def _remove(self, ids: list[int]) -> None:
        for table in ("entries", "vectors"):
            self._database.executemany(f"DELETE FROM {table} WHERE id = ?", ((number,) for number in ids))  # noqa: S608

    def _make_room(self, needed_bytes: int) -> bool:
        """Evict the least recently used rows until *needed_bytes* fit; return whether they do."""
        query = "SELECT id, coalesce(CAST(bytes AS INTEGER), 0) FROM entries ORDER BY used, id"
        while (excess := self._filled_bytes() + needed_bytes - self._max_bytes) > 0:
            ids = []
            target = max(excess, self._max_bytes // 64)  # a little more, so that not every put evicts
            for number, row_bytes in self._database.execute(query):
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

    def _pragma(self, name: str) -> int:
        (value,) = self._database.execute(f"PRAGMA {name}").fetchone()
        return int(value)

    def _filled_bytes(self) -> int:
        return (self._pragma("page_count") - self._pragma("freelist_count")) * _PAGE_BYTES

    def _give_back_pages(self) -> None:
        """Shrink a file above its bound; freed pages alone do not."""
        excess = self._pragma("page_count") - self._max_bytes // _PAGE_BYTES
        for _ in range(excess):  # Python's module takes one step of a statement without rows, which is one page
            self._database.execute("PRAGMA incremental_vacuum(1)")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A transaction that saves the uses and keeps the file within its bound."""
        self._database.execute("BEGIN IMMEDIATE")
        try:
            self._save_uses()
            yield
            self._make_room(0)
            self._give_back_pages()
        except BaseException:
            with suppress(sqlite3.Error):  # the error may have ended it already
                self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            damaged = type(error) is sqlite3.DatabaseError  # subclasses have other causes
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
    """Return Linux's name of the type of the file system of *folder*, None where unknown."""
    device = folder.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError), Path("/proc/self/mountinfo").open(encoding="utf-8", errors="replace") as file:
        for line in file:
            fields = line.split()
            if fields[2] == wanted:
                return fields[fields.index("-") + 1]
    return None


def _create(path: Path) -> None:
    """Make an empty cache under a temporary name and link it to *path*, unless another process was first."""
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
