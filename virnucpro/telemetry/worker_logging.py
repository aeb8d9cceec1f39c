"""
Where a worker's log lines go: one file of JSON lines a rank, bound with run, rank and device.

Event names are fixed text; everything that came from the input is a value, and JSON escapes it. Lines of other
libraries and Python's warnings land in the same file and the same form.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from io import TextIOWrapper

    from structlog.typing import Processor

log = structlog.get_logger(__name__)

HANDLER_NAME = "virnucpro-worker"


def setup_worker_logging(rank: int, log_dir: Path | str, *, level: str = "INFO", **bound: object) -> Path:
    """
    Send everything that this process logs to the rank's file; called first thing in a worker.

    Args:
        rank: Bound to every line.
        log_dir: Folder of the files; made when absent.
        level: Least severe level that is kept.
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
    handler.setFormatter(
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
    handler.set_name(HANDLER_NAME)
    root = logging.getLogger()
    others = (logging.getLogger(name) for name in logging.root.manager.loggerDict)
    for logger in (root, *(logger for logger in others if not logger.propagate)):  # torch keeps its lines to itself
        for old in [item for item in logger.handlers if item.get_name() == HANDLER_NAME]:
            logger.removeHandler(old)
            old.close()
        logger.addHandler(handler)
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


class _LogFile(logging.FileHandler):
    """A log file that is never made or written through a link, and whose full disk is told once."""

    _told = False

    def _open(self) -> TextIOWrapper:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.fdopen(os.open(self.baseFilename, flags, 0o666), "w", encoding=self.encoding)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's name
        """Say once that lines are lost, instead of a traceback for each."""
        del record
        if not self._told:
            self._told = True
            with suppress(OSError):
                print(f"virnucpro: lines of {self.baseFilename} are lost: {sys.exc_info()[1]}", file=sys.stderr)
