"""
Messages of workers on other hosts, on their way to the driver's telemetry: files of JSON lines in the run's folder.

A host appends what its workers send about once a second; the driver reads on where it stopped and applies each message
to its own record of the rank, as if the worker's pipe ended there. No work depends on it, only what is shown.
"""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol, Self

import structlog

from virnucpro.pipeline.work.recovery import RankObserver
from virnucpro.telemetry.snapshot import ProcessEnd

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from virnucpro.telemetry.ranks import Rank

log = structlog.get_logger(__name__)

WRITE_INTERVAL_S = 1.0
"""Seconds between two appends."""
_OF_THE_HOST = frozenset({"heartbeat", "step"})
"""Kinds of messages that mean nothing elsewhere."""


class MessageWriter:
    """A ``RankObserver`` that appends everything to a file, whose folder exists. A context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: list[str] = []
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="messages", daemon=True)

    def assigned(self, rank: int, blocks: Sequence[int] | None) -> None:
        self._note({"rank": rank, "assigned": None if blocks is None else list(blocks)})

    def on_message(self, rank: int, message: dict[str, Any]) -> None:
        if message.get("kind") not in _OF_THE_HOST:
            self._note({"rank": rank, "message": message})

    def ended(self, rank: int, end: ProcessEnd) -> None:
        self._note({"rank": rank, "ended": asdict(end)})

    def _note(self, entry: dict[str, Any]) -> None:
        line = json.dumps(entry, default=str)
        with self._lock:
            self._lines.append(line + "\n")

    def _keep(self) -> None:
        while not self._ending.wait(WRITE_INTERVAL_S):
            self._write()

    def _write(self) -> None:
        with self._lock:
            lines, self._lines = self._lines, []
        if lines:
            try:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write("".join(lines))
            except OSError as error:  # the work continues; only what is shown of it is late
                log.warning("messages.not_written", path=str(self.path), reason=error.strerror)
                with self._lock:
                    self._lines = [*lines, *self._lines]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()
        self._write()


class RemoteRanks(RankObserver, Protocol):
    """The records of ranks on other hosts, and what observes them."""

    ranks: Sequence[Rank]


class MessageReader:
    """Follows the files of all owners in *folder*; *run* gets everything, in the order of each file."""

    def __init__(self, folder: Path, run: RemoteRanks) -> None:
        self._folder = folder
        self._run = run
        self._read_bytes: dict[Path, int] = {}

    def read_on(self) -> None:
        """Apply what has come since the last call."""
        with suppress(OSError):  # a network file system may be away for a while
            for path in sorted(self._folder.glob("*.jsonl")):
                self._read(path)

    def _read(self, path: Path) -> None:
        at = self._read_bytes.get(path, 0)
        with path.open("rb") as file:
            file.seek(at)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read_bytes[path] = at + len(whole)
        for line in whole.splitlines():
            try:
                self._apply(json.loads(line))
            except (ValueError, LookupError, TypeError) as error:  # torn by a host that died as it wrote
                log.warning("messages.not_understood", path=str(path), reason=f"{type(error).__name__}: {error}")

    def _apply(self, entry: dict[str, Any]) -> None:
        number = int(entry["rank"])
        rank = self._run.ranks[number]
        if "message" in entry:
            message = {name: value for name, value in entry["message"].items() if name != "gpu_uuid"}  # not ours
            rank.apply(message)
            self._run.on_message(number, message)
        elif "assigned" in entry:
            rank.begin_attempt()
            self._run.assigned(number, entry["assigned"])
        else:
            end = entry["ended"]
            quarantined = {int(position): why for position, why in end["quarantined"].items()}
            rank.state = end["state"]
            rank.end_attempt()
            self._run.ended(number, ProcessEnd(**{**end, "quarantined": quarantined}))
