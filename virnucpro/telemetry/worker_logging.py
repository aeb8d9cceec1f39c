"""
Logging of a worker process: one file of JSON lines for each rank, bound with run, rank and device.

Event names are fixed text; values from the input are escaped by JSON. Lines of other libraries and Python's warnings
use the same file and form. Warnings and errors also go to the parent, as far as its pipe takes them. The parent adds
how the process ended. A run never fails because of its log.
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
LABEL_VARIABLES = {"flow_run": "VIRNUCPRO_FLOW_RUN", "deployment": "VIRNUCPRO_DEPLOYMENT"}
"""Label -> environment variable: the flow run's id, and its deployment as FLOW/NAME."""
MAX_REPORTED = 50
"""Most lines that a process sends to its parent."""
_MAX_MESSAGE_BYTES = 3000
"""Below what a pipe writes atomically (4096)."""
_MAX_VALUE_CHARACTERS = 300


class Reports(Protocol):
    def put(self, message: dict[str, Any], /) -> None: ...


def setup_worker_logging(
    rank: int, log_dir: Path | str, *, level: str = "INFO", reports: Reports | None = None, **bound: object
) -> Path:
    """
    Send all log lines of this process to the rank's file; the first act of a worker.

    Args:
        reports: Takes lines of at least WARNING for the parent, ``{'kind': 'log', 'level', 'event', 'fields'}``: at
            most ``MAX_REPORTED``, then one that counts the rest.
        bound: More values for every line, such as run_id and device.

    Returns:
        Path of ``worker_{rank}.log``; a retry appends to it. When it cannot be written, lines of at least WARNING go to
        standard error instead.
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
        item.setFormatter(_json_lines(shared))
        item.set_name(HANDLER_NAME)
    root = logging.getLogger()
    others = (logging.getLogger(name) for name in logging.root.manager.loggerDict)
    for logger in (root, *(logger for logger in others if not logger.propagate)):  # torch's loggers do not propagate
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


def _json_lines(shared: list[Processor]) -> logging.Formatter:
    exceptions = structlog.tracebacks.ExceptionDictTransformer(show_locals=False, max_frames=30)
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.ExceptionRenderer(exceptions),
            structlog.processors.JSONRenderer(),
        ],
    )


def log_end_of_process(path: Path, *, level: str, bound: Mapping[str, object], **fields: object) -> None:
    """Append ``worker.ended`` to the log of an ended process, from its parent; an unwritable log is ignored."""
    line = {**fields, **bound, "event": "worker.ended", "level": level, "timestamp": f"{datetime.now(UTC):%FT%T.%fZ}"}
    with suppress(OSError), os.fdopen(_opened(path), "w", encoding="utf-8") as file:
        file.write(f"{json.dumps(line)}\n")


def _opened(path: Path | str) -> int:
    """Return a descriptor that appends to *path* on a new line; links are refused."""
    descriptor = only_regular(os.fspath(path), os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW)
    size_bytes = os.fstat(descriptor).st_size
    if size_bytes and os.pread(descriptor, 1, size_bytes - 1) != b"\n":  # a process was killed while it wrote
        with suppress(OSError):
            os.write(descriptor, b"\n")
    return descriptor


class _LogFile(logging.FileHandler):
    """A log file that is never opened through a link, and reports a full disk once."""

    _has_reported = False

    def _open(self) -> TextIOWrapper:
        return os.fdopen(_opened(self.baseFilename), "w", encoding=self.encoding)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's name
        """Report lost lines once, instead of a traceback for each."""
        del record
        if not self._has_reported:
            self._has_reported = True
            with suppress(OSError):
                print(f"virnucpro: lines of {self.baseFilename} are lost: {sys.exc_info()[1]}", file=sys.stderr)


class _ToParent(logging.Handler):
    """Sends warnings and errors to the parent, truncated to what its pipe takes."""

    def __init__(self, reports: Reports) -> None:
        super().__init__(logging.WARNING)
        self._reports = reports
        self._sent = 0

    def emit(self, record: logging.LogRecord) -> None:
        self._sent += 1
        if self._sent > MAX_REPORTED + 1:
            return
        try:
            message = _message(json.loads(self.format(record)))
            if self._sent > MAX_REPORTED:
                message = _message(
                    {"level": "warning", "event": "log.more", "shown": MAX_REPORTED, "rest": "in the file"}
                )
            self._reports.put(message)
        except (OSError, ValueError, TypeError, KeyError):  # the parent has ended, or the line has no JSON form
            pass

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's name
        """Do nothing: the line is in the file."""


def _message(line: dict[str, Any]) -> dict[str, Any]:
    """Return the message for a line of the file, truncated to what the pipe takes."""
    exception = line.pop("exception", None)
    fields = {
        name: _truncated(value) for name, value in line.items() if name not in {*BOUND, "level", "event", "timestamp"}
    }
    if exception:
        fields["exception"] = _truncated(exception_sentence(exception))
    message = {"kind": "log", "level": line["level"], "event": _truncated(line["event"]), "fields": fields}
    while len(json.dumps(message, ensure_ascii=False).encode("utf-8", "backslashreplace")) > _MAX_MESSAGE_BYTES:
        fields.pop("cut", None)
        fields.popitem()
        fields["cut"] = True
    return message


def _truncated(value: object) -> object:
    if isinstance(value, (bool, int, float)) or value is None:
        return value
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _MAX_VALUE_CHARACTERS else text[:_MAX_VALUE_CHARACTERS] + "..."


def started_by() -> dict[str, str]:
    """Return every label of ``LABEL_VARIABLES``; empty where nothing set it."""
    return {label: os.environ.get(variable, "") for label, variable in LABEL_VARIABLES.items()}


def known_labels() -> dict[str, str]:
    return {label: value for label, value in started_by().items() if value}
