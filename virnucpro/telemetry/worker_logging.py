"""
Where a worker's log lines go: one file of JSON lines a rank, bound with run, rank and device.

Event names are fixed text; everything that came from the input is a value, and JSON escapes it. Lines of other
libraries and Python's warnings land in the same file and the same form. Warnings and errors are told to the parent as
well, as far as they fit its pipe: a run must not end for want of its log, nor for too much of it. How a process ended
stands there in its parent's words: one that was killed could not say it.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from virnucpro.run_folders import only_regular
from virnucpro.telemetry.log_lines import BOUND, exception_sentence

if TYPE_CHECKING:
    from collections.abc import Mapping
    from io import TextIOWrapper

    from structlog.typing import Processor

log = structlog.get_logger(__name__)

HANDLER_NAME = "virnucpro-worker"
MOST_TOLD = 50
"""Lines that a process tells its parent at the most."""
_MAX_TOLD_BYTES = 3000
"""Bytes of one of them: less than the pipe takes in one piece."""
_MAX_VALUE_CHARACTERS = 300


class Reports(Protocol):
    """What a worker tells its parent through."""

    def put(self, message: dict[str, Any], /) -> None:
        """Send a small record."""
        ...


def setup_worker_logging(
    rank: int, log_dir: Path | str, *, level: str = "INFO", reports: Reports | None = None, **bound: object
) -> Path:
    """
    Send everything that this process logs to the rank's file; called first thing in a worker.

    Args:
        rank: Bound to every line.
        log_dir: Folder of the files; made when absent.
        level: Least severe level that is kept.
        reports: Takes lines from WARNING on for the parent, ``{'kind': 'log', 'level', 'event', 'fields'}``, at most
            ``MOST_TOLD`` and then one that says so.
        bound: More values for every line, such as run_id and device.

    Returns:
        The file, ``worker_{rank}.log``; a retry appends to it. Where it cannot be written, which standard error is
        told, the lines from WARNING on go there: a run does not end for want of its log.
    """
    path = Path(log_dir) / f"worker_{rank}.log"
    refused: OSError | None = None
    handler: logging.Handler
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = _LogFile(path, encoding="utf-8")
    except OSError as error:
        refused, handler = error, logging.StreamHandler(sys.stderr)
        handler.setLevel(logging.WARNING)
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    handlers = [handler] if reports is None else [handler, _ToParent(reports)]
    for item in handlers:
        item.setFormatter(
            structlog.stdlib.ProcessorFormatter(
                foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
                processors=[
                    structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                    structlog.processors.ExceptionRenderer(
                        structlog.tracebacks.ExceptionDictTransformer(show_locals=False, max_frames=30)
                    ),
                    structlog.processors.JSONRenderer(),
                ],
            )
        )
        item.set_name(HANDLER_NAME)
    root = logging.getLogger()
    others = (logging.getLogger(name) for name in logging.root.manager.loggerDict)
    for logger in (root, *(logger for logger in others if not logger.propagate)):  # torch keeps its lines to itself
        for old in [item for item in logger.handlers if item.get_name() == HANDLER_NAME]:
            logger.removeHandler(old)
            old.close()
        for item in handlers:
            logger.addHandler(item)
    root.setLevel(level)
    logging.captureWarnings(capture=True)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(rank=rank, **bound)
    if refused is not None:
        log.warning("log.unwritable", path=str(path), reason=refused.strerror or str(refused))
    return path


def log_end_of_process(path: Path, *, level: str, bound: Mapping[str, object], **fields: object) -> None:
    """
    Add ``worker.ended`` to the log of a process that has gone, in its parent's words.

    Args:
        path: Log of its rank; where it cannot be written, nothing happens: the terminal has been told the same.
        level: ``warning`` or ``error``.
        bound: What the lines of the process are bound with.
        fields: Why it ended.
    """
    line = {**fields, **bound, "event": "worker.ended", "level": level, "timestamp": f"{datetime.now(UTC):%FT%T.%fZ}"}
    with suppress(OSError), os.fdopen(_opened(path), "w", encoding="utf-8") as file:
        file.write(f"{json.dumps(line)}\n")


def _opened(path: Path | str) -> int:
    """Return a descriptor that appends to *path*, which is never followed as a link, on a new line."""
    descriptor = only_regular(os.fspath(path), os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW)
    size_bytes = os.fstat(descriptor).st_size
    if size_bytes and os.pread(descriptor, 1, size_bytes - 1) != b"\n":  # a process was killed while it wrote
        with suppress(OSError):
            os.write(descriptor, b"\n")
    return descriptor


class _LogFile(logging.FileHandler):
    """A log file that is never made or written through a link, and whose full disk is told once."""

    _told = False

    def _open(self) -> TextIOWrapper:
        return os.fdopen(_opened(self.baseFilename), "w", encoding=self.encoding)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's name
        """Say once that lines are lost, instead of a traceback for each."""
        del record
        if not self._told:
            self._told = True
            with suppress(OSError):
                print(f"virnucpro: lines of {self.baseFilename} are lost: {sys.exc_info()[1]}", file=sys.stderr)


class _ToParent(logging.Handler):
    """Tells the parent what went wrong, in lines that fit its pipe; what cannot be told is in the file."""

    def __init__(self, reports: Reports) -> None:
        super().__init__(logging.WARNING)
        self._reports = reports
        self._told = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Send the line, as long as there are not too many."""
        self._told += 1
        if self._told > MOST_TOLD + 1:
            return
        try:
            message = _message(json.loads(self.format(record)))
            if self._told > MOST_TOLD:
                message = _message({"level": "warning", "event": "log.more", "told": MOST_TOLD, "rest": "in the file"})
            self._reports.put(message)
        except (OSError, ValueError, TypeError, KeyError):  # the parent has gone, or the line cannot be put together
            pass

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's name
        """Say nothing: the line is in the file."""


def _message(line: dict[str, Any]) -> dict[str, Any]:
    """Return what the parent is told of a line of the file, cut to what its pipe takes."""
    exception = line.pop("exception", None)
    fields = {name: _cut(value) for name, value in line.items() if name not in {*BOUND, "level", "event", "timestamp"}}
    if exception:
        fields["exception"] = _cut(exception_sentence(exception))
    message = {"kind": "log", "level": line["level"], "event": _cut(line["event"]), "fields": fields}
    while len(json.dumps(message, ensure_ascii=False).encode("utf-8", "backslashreplace")) > _MAX_TOLD_BYTES:
        fields.pop("cut", None)
        fields.popitem()
        fields["cut"] = True
    return message


def _cut(value: object) -> object:
    if isinstance(value, (bool, int, float)) or value is None:
        return value
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _MAX_VALUE_CHARACTERS else text[:_MAX_VALUE_CHARACTERS] + "..."
