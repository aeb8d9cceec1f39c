"""A run as a command has it: shown on the terminal, with its metrics, stopped by signals and by its time limit."""

from __future__ import annotations

import importlib
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from virnucpro.config import RunLimits
from virnucpro.errors import StoppedError
from virnucpro.interrupts import stop_on_signals
from virnucpro.telemetry.metrics.options import metrics_options
from virnucpro.telemetry.run_telemetry import RunTelemetry
from virnucpro.telemetry.show.progress import terminal_view

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from virnucpro.settings import RunSettings

Outcome = TypeVar("Outcome")


@contextmanager
def shown_run(run: Callable[..., Outcome], settings: RunSettings, *, is_quiet: bool) -> Iterator[Outcome]:
    """
    Run, and yield the outcome while the run's metrics can still be scraped.

    Args:
        run: Called with ``telemetry``, ``stop`` and ``limits``.
        settings: Where metrics go, and how long and how often.
        is_quiet: Show nothing while it runs.

    Raises:
        StoppedError: A signal asked for it, or the time limit has passed.
    """
    limits = RunLimits.of(settings.limits)
    minutes = settings.limits.time_limit_minutes
    stop = threading.Event()
    with RunTelemetry(metrics_options(settings.monitoring), [terminal_view(is_quiet=is_quiet, stop=stop)]) as telemetry:
        with stop_on_signals(stop, telemetry.has_workers, time_limit_minutes=minutes) as stopping:
            try:
                outcome = run(telemetry=telemetry, stop=stop, limits=limits)
            except StoppedError:
                raise stopping.error() from None
            if getattr(outcome, "state", "") == "stopped":
                raise stopping.error()
        yield outcome


def run_as_flow(name: str, settings: RunSettings, **parameters: Any) -> Any:
    """Run the Prefect flow *name* in this process with the same settings, and return its outcome."""
    boxes = {field: getattr(settings, field) for field in type(settings).model_fields}
    return importlib.import_module(f"flows.{name}").run_from_command_line(**parameters, **boxes)
