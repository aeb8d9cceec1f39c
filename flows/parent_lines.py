"""
What the program itself logs while it runs as a flow goes where Prefect's users look.

The library logs with structlog and knows nothing of Prefect. Here its lines become records of the standard library's
logger ``virnucpro``, which Prefect sends to its API: because ``PREFECT_LOGGING_EXTRA_LOGGERS`` says so where our
command runs the flow, and because of the handler added here where Prefect's own worker was there before us.
"""

import logging
from collections.abc import MutableMapping
from typing import Any

import structlog
from prefect.logging.handlers import APILogHandler

from virnucpro.errors import VirNucProError
from virnucpro.telemetry.log_lines import log_sentence

_OF_PREFECT = ("prefect.flow_runs", "prefect.task_runs", "prefect.engine")
"""Loggers of Prefect that write how runs and tasks end."""


def send_lines_to_prefect() -> None:
    """Let Prefect have the lines of this process from INFO on; called when a flow begins."""
    logger = logging.getLogger("virnucpro")
    logger.setLevel(logging.INFO)
    if not any(isinstance(handler, APILogHandler) for handler in logger.handlers):
        logger.addHandler(APILogHandler())
    for name in _OF_PREFECT:
        logging.getLogger(name).addFilter(_without_our_tracebacks)  # the same one is added once
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, structlog.contextvars.merge_contextvars, _to_record],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )


def log_level(name: str) -> int:
    """Return the standard library's number of a worker's level."""
    return logging.getLevelNamesMapping()[name.upper()]


def _without_our_tracebacks(record: logging.LogRecord) -> bool:
    """Keep a line of Prefect's, but no traceback of an expected error: its message is the run's, and is logged."""
    error = record.exc_info[1] if record.exc_info else None
    if record.exc_info and (error is None or isinstance(error, VirNucProError)):
        record.exc_info = None  # of None Prefect would log "NoneType: None"
    return not (isinstance(error, VirNucProError) and "unexpected exception" in record.getMessage())


def _to_record(_logger: object, _method: str, event: MutableMapping[str, Any]) -> tuple[tuple[str], dict[str, Any]]:
    fields = {name: value for name, value in event.items() if name not in {"event", "exc_info"}}
    return (log_sentence({"event": event["event"], "fields": fields}),), {"exc_info": event.get("exc_info")}
