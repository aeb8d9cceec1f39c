"""
One line of a worker's log: parsed from JSON, and formatted for users.

``log_sentence`` is the one form shown on the terminal and under Prefect: a single line without control characters, with
ambiguous values in quotes.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from virnucpro.errors import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
"""Least severe first."""
BOUND = ("run_id", "flow_run", "deployment", "task", "host", "rank", "device", "attempt")
"""Fields that every line of a worker carries."""
NO_TIME = datetime.min.replace(tzinfo=UTC)
"""Time of text before the first line that has one."""

_PLAIN_VALUE = re.compile(r"[^\s\"'`=|\\]+")


@dataclass(frozen=True, kw_only=True)
class LogEntry:
    event: str
    """Event name; of a line of text, the line itself."""
    level: str = "INFO"
    """One of ``LEVELS``."""
    time: datetime = NO_TIME
    """UTC."""
    bound: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    exception: Sequence[Mapping[str, Any]] = ()
    """The exception raised last, then its causes, as structlog's ``ExceptionDictTransformer`` gives them."""
    is_text: bool = False
    """Not a JSON line of ours: torn, or written by another program."""

    @property
    def process(self) -> tuple[Any, Any]:
        """Run and attempt of the process that wrote the line."""
        return self.bound.get("run_id"), self.bound.get("attempt")


def parse_line(line: bytes) -> LogEntry:
    """Parse a line without its line end; foreign text becomes an entry of text."""
    try:
        found = json.loads(line)
        time = datetime.fromisoformat(found.pop("timestamp"))
        event, level = found.pop("event"), str(found.pop("level", "info")).upper()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return _text(line)
    if not isinstance(event, str) or time.tzinfo is None:
        return _text(line)
    exception = found.pop("exception", ())
    if not isinstance(exception, list) or not all(isinstance(item, dict) for item in exception):
        found, exception = ({**found, "exception": exception} if exception else found), []
    return LogEntry(
        event=event,
        level=level if level in LEVELS else "INFO",
        time=time.astimezone(UTC),
        bound={name: found.pop(name) for name in BOUND if name in found},
        fields=found,
        exception=exception,
    )


def _text(line: bytes) -> LogEntry:
    return LogEntry(event=line.decode("utf-8", "backslashreplace"), is_text=True)


def log_sentence(message: Mapping[str, Any]) -> str:
    """Return the line shown for a message's ``event`` and ``fields``."""
    fields = dict(message.get("fields") or {})
    logger = fields.pop("logger", None)  # set for lines of libraries, whose event is free text
    event = printable(str(message["event"]))
    parts = [event if logger is None else f"{_shown(logger)}: {event}"]
    parts += [f"{_shown(name)}={_shown(value)}" for name, value in fields.items()]
    return " ".join(parts)


def entry_line(entry: LogEntry) -> str:
    """Return the line shown for *entry*, without rank, device and the frames of its exception."""
    time = "" if entry.time == NO_TIME else f"{entry.time:%Y-%m-%d %H:%M:%S}.{entry.time.microsecond // 1000:03d}Z"
    head = f"{time:24} {entry.level if not entry.is_text else '':7}"
    if entry.is_text:
        return f"{head} | {printable(entry.event)}"
    fields = dict(entry.fields)
    if entry.event == "worker.started":  # once for each process
        fields |= {name: entry.bound[name] for name in ("host", "run_id", "task") if entry.bound.get(name)}
    if entry.exception:
        fields["exception"] = exception_sentence(entry.exception)
    return f"{head} {log_sentence({'event': entry.event, 'fields': fields})}"


def exception_sentence(exception: Sequence[Mapping[str, Any]]) -> str:
    return _kind_and_text(exception[0])


def frame_lines(exception: Sequence[Mapping[str, Any]], *, frames: int) -> Iterator[str]:
    """Yield the frames of an exception, innermost first and at most *frames* each, then those of its causes."""
    for number, one in enumerate(exception):
        if number:
            yield f"{'caused by' if one.get('is_cause') else 'while handling'} {printable(_kind_and_text(one))}"
        found = one.get("frames")
        for frame in list(reversed(found if isinstance(found, list) else []))[:frames]:
            if isinstance(frame, dict):
                where = f"{frame.get('filename')}:{frame.get('lineno')} in {frame.get('name')}"
                yield f"  at {printable(where)}"


def _kind_and_text(one: Mapping[str, Any]) -> str:
    return f"{one.get('exc_type')}: {one.get('exc_value')}".removesuffix(": ")


def _shown(value: object) -> str:
    if isinstance(value, str):
        if _PLAIN_VALUE.fullmatch(value) and value.isprintable():
            return value
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{printable(escaped)}"'
    return printable(json.dumps(value, ensure_ascii=False, default=str))
