"""
What workers on other hosts say, on its way to the process that shows the run: files of JSON lines in the folder.

The host's side appends what its worker said, about once a second; the driver's side reads on where it stopped and
hands each word to its telemetry, as if the worker's pipe ended there. So a run over many hosts is counted, shown and
logged by the same code as one on one machine. Nobody waits for it, and nothing depends on it but what is shown.
"""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self

import structlog

from virnucpro.telemetry.embedding_facts import ProcessEnd

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from virnucpro.pipeline.recovery import RankObserver

log = structlog.get_logger(__name__)

WRITE_INTERVAL_S = 1.0
"""Seconds between two appends."""
_OF_THE_HOST = frozenset({"heartbeat", "step"})
"""Kinds of messages that mean nothing elsewhere: process numbers, and signs of life."""


class MessageWriter:
    """
    A ``RankObserver`` that appends everything to a file. Use it as a context manager.

    Args:
        path: The file; its folder exists.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: list[str] = []
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="words", daemon=True)

    def assigned(self, rank: int, blocks: Sequence[int] | None) -> None:
        """Note that a process starts."""
        self._note({"rank": rank, "assigned": None if blocks is None else list(blocks)})

    def on_message(self, rank: int, message: dict[str, Any]) -> None:
        """Note what a worker said."""
        if message.get("kind") not in _OF_THE_HOST:
            self._note({"rank": rank, "said": message})

    def ended(self, rank: int, end: ProcessEnd) -> None:
        """Note how a process ended."""
        self._note({"rank": rank, "ended": asdict(end)})

    def _note(self, word: dict[str, Any]) -> None:
        line = json.dumps(word, default=str)
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
            except OSError as error:  # the work goes on; only what is shown of it lags behind
                log.warning("words.not_written", path=str(self.path), reason=error.strerror)
                with self._lock:
                    self._lines = [*lines, *self._lines]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()
        self._write()


class MessageReader:
    """
    Reads on in the files of all owners.

    Args:
        folder: Where they are.
        observer: Is told everything, in the order of each file.
    """

    def __init__(self, folder: Path, observer: RankObserver) -> None:
        self._folder = folder
        self._observer = observer
        self._read_bytes: dict[Path, int] = {}

    def read_on(self) -> None:
        """Hand on what has come since the last call."""
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
                self._tell(json.loads(line))
            except (ValueError, LookupError, TypeError) as error:  # torn by a host that died as it wrote
                log.warning("words.not_understood", path=str(path), reason=f"{type(error).__name__}: {error}")

    def _tell(self, word: dict[str, Any]) -> None:
        rank = int(word["rank"])
        if "said" in word:
            message = {name: value for name, value in word["said"].items() if name != "gpu_uuid"}  # not a GPU of ours
            self._observer.on_message(rank, message)
        elif "assigned" in word:
            self._observer.assigned(rank, word["assigned"])
        else:
            end = word["ended"]
            quarantined = {int(position): why for position, why in end["quarantined"].items()}
            self._observer.ended(rank, ProcessEnd(**{**end, "quarantined": quarantined}))
