"""
Sends the program's own log lines to Prefect while it runs as a flow.

The library logs with structlog. Here its lines become records of the logger ``virnucpro``, which Prefect sends to its
API: through ``PREFECT_LOGGING_EXTRA_LOGGERS`` when our command runs the flow, through the handler added here when
Prefect's worker does.
"""

import logging
from collections.abc import MutableMapping
from typing import Any

import structlog
from prefect.logging.handlers import APILogHandler

from virnucpro.errors import VirNucProError
from virnucpro.telemetry.log_lines import log_sentence

_OF_PREFECT = ("prefect.flow_runs", "prefect.task_runs", "prefect.engine")
"""Prefect's loggers for the end of runs and tasks."""


def send_lines_to_prefect() -> None:
    """Send the lines of this process from INFO on to Prefect; called at the start of a flow."""
    logger = logging.getLogger("virnucpro")
    logger.setLevel(logging.INFO)
    if not any(isinstance(handler, APILogHandler) for handler in logger.handlers):
        logger.addHandler(APILogHandler())
    for name in _OF_PREFECT:
        logging.getLogger(name).addFilter(_without_our_tracebacks)  # added once only
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, structlog.contextvars.merge_contextvars, _to_record],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )


def log_level(name: str) -> int:
    """Return the standard library's number of a level."""
    return logging.getLevelNamesMapping()[name.upper()]


def _without_our_tracebacks(record: logging.LogRecord) -> bool:
    """Keep Prefect's lines without tracebacks of expected errors, whose message is logged anyway."""
    error = record.exc_info[1] if record.exc_info else None
    if record.exc_info and (error is None or isinstance(error, VirNucProError)):
        record.exc_info = None  # None would be logged as "NoneType: None"
    return not (isinstance(error, VirNucProError) and "unexpected exception" in record.getMessage())


def _to_record(_logger: object, _method: str, event: MutableMapping[str, Any]) -> tuple[tuple[str], dict[str, Any]]:
    fields = {name: value for name, value in event.items() if name not in {"event", "exc_info"}}
    return (log_sentence({"event": event["event"], "fields": fields}),), {"exc_info": event.get("exc_info")}
