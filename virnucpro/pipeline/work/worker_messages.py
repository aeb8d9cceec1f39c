"""
What a worker on another host has to say, as its driver takes it in: as if the worker's pipe ended there.

No work depends on it, only what is shown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

from virnucpro.telemetry.snapshot import GpuSample

if TYPE_CHECKING:
    from collections.abc import Mapping

    from virnucpro.telemetry.work_telemetry import WorkTelemetry

log = structlog.get_logger(__name__)


def apply_entry(telemetry: WorkTelemetry, entry: Mapping[str, Any]) -> None:
    """Take in an entry of ``UnitWorker.messages``; one that makes no sense costs a warning."""
    try:
        _apply(telemetry, entry)
    except (ValueError, LookupError, TypeError) as error:
        log.warning("messages.not_understood", reason=f"{type(error).__name__}: {error}")


def _apply(telemetry: WorkTelemetry, entry: Mapping[str, Any]) -> None:
    number = int(entry["rank"])
    rank = telemetry.rank(number)
    match entry:
        case {"message": message}:
            rank.apply(message)
            telemetry.on_message(number, message)
        case {"assigned": _}:
            rank.begin_attempt()
        case {"ended": end}:
            rank.state, rank.failure = end["state"], end["failure"]
            rank.reason, rank.exit_code = end["reason"], end["exit_code"]
            rank.end_attempt()
            telemetry.ended(number, bool(end["starts_again"]), dict(end["quarantined"]))
        case {"used": used, "gpus": gpus}:
            telemetry.sampled(number, used, tuple(GpuSample(**sample) for sample in gpus))
        case _:
            raise LookupError("an entry of no known kind")
