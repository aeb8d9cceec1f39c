"""
Where a worker's log lines go: one file of JSON lines a rank, bound with run, rank and device.

Event names are fixed text; everything that came from the input is a value, and JSON escapes it. Lines of other
libraries and Python's warnings land in the same file and the same form.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from virnucpro.errors import OutputError

if TYPE_CHECKING:
    from structlog.typing import Processor

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
        The file, ``worker_{rank}.log``; a retry appends to it.

    Raises:
        OutputError: The file cannot be written.
    """
    path = Path(log_dir) / f"worker_{rank}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(path, encoding="utf-8")
    except OSError as error:
        raise OutputError(path, error.strerror or str(error)) from error
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
    return path
