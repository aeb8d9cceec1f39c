"""
Which contents of an inbox were taken: one small durable file for each, in the results folder.

A claim is on disk before its run is created, with an idempotency key, and gets the run's id afterwards. A scan killed
at any step therefore neither loses a file nor takes it twice. Removing a claim makes the content new again. Users of
the memory hold its lock.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from virnucpro import durable
from virnucpro.errors import ResultError
from virnucpro.run_folders import read_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MEMORY_DIR = ".inbox"
LOCK = "lock"
_SEEN = "seen.json"
_RACY_NS = 2_000_000_000
"""Two changes within this time may have the same timestamp: clocks of file systems are coarse."""


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
