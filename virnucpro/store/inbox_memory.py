"""
Which contents of an inbox have been taken: one small durable file for each, under the folder of the results.

A claim is on disk before a run is asked for, with a key under which the server makes one run only, and gets the run's
id afterwards. So a scan that is killed between any two steps has neither lost a file nor taken one twice: the next one
asks again with the same key. Removing a claim makes the content new again. Whoever uses the memory holds its lock.
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
"""Folder of the memory under that of the results."""
LOCK = "lock"
_SEEN = "seen.json"
_RACY_NS = 2_000_000_000
"""A change this soon after the last one may leave the times as they are: clocks of file systems tick that slowly."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A content that was taken."""

    sha256: str
    """Of the content, in hex."""
    source: str
    """The file it was first found in."""
    run_folder: str
    """Name of the folder, among the results, that its run writes to."""
    key: str
    """The server makes one run only with this key."""
    flow_run_id: str | None = None
    """The run; None: it has not been asked for, or the answer was never seen."""


class InboxMemory:
    """
    The memory of one folder of results.

    Args:
        output_root: That folder.
    """

    def __init__(self, output_root: Path) -> None:
        self.folder = output_root / MEMORY_DIR
        self._seen: dict[str, list[object]] = {}
        self._seen_now: dict[str, list[object]] = {}
        with suppress(OSError, ValueError, TypeError):  # it only saves reading: without it every file is hashed again
            self._seen = dict(json.loads(read_bytes(self.folder / _SEEN)))

    @property
    def lock(self) -> Path:
        """What the one scan that uses the memory holds."""
        return self.folder / LOCK

    def content_seen(self, path: Path, identity: Sequence[int]) -> str | None:
        """Return the sha256 of a file that an earlier scan has read, if nothing about it has changed since."""
        seen = self._seen.get(str(path))
        if not isinstance(seen, list) or seen[:-1] != list(identity):
            return None
        self._seen_now[str(path)] = seen
        return str(seen[-1])

    def note_content(self, path: Path, identity: Sequence[int], sha256: str) -> None:
        """
        Note the content of a file that was read, unless it changed so lately that a change could go unseen.

        Args:
            path: The file.
            identity: What tells that nothing about it has changed; last the time of its last change, in nanoseconds.
            sha256: Of its content.
        """
        if time.time_ns() - identity[-1] > _RACY_NS:
            self._seen_now[str(path)] = [*identity, sha256]

    def save_contents(self) -> None:
        """Keep what was noted of the files that are still there."""
        if self._seen_now != self._seen:
            durable.write_bytes(self.folder / _SEEN, json.dumps(self._seen_now).encode())

    def claim_of(self, sha256: str) -> Claim | None:
        """
        Return the claim of a content, or None: it is new.

        Raises:
            ResultError: The claim cannot be read.
        """
        path = self.path_of(sha256)
        try:
            claim = Claim(**json.loads(read_bytes(path)))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            what = f"not a readable claim ({error}): remove it, and the content is taken once more"
            raise ResultError(path, what) from error
        if claim.sha256 != sha256:
            raise ResultError(path, f"the claim of another content: rename it to {claim.sha256}.json")
        return claim

    def take(self, source: Path, sha256: str) -> Claim:
        """Claim a new content, durably, before its run is asked for."""
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
        """Note the run of a claim."""
        noted = replace(claim, flow_run_id=flow_run_id)
        self._write(noted)
        return noted

    def path_of(self, sha256: str) -> Path:
        """Return the file of a claim."""
        return self.folder / f"{sha256}.json"

    def _write(self, claim: Claim) -> None:
        durable.write_bytes(self.path_of(claim.sha256), json.dumps(asdict(claim), indent=1).encode() + b"\n")
