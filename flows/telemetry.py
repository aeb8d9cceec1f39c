"""What shows a flow run: metrics, status file, and progress in Prefect's UI."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from flows.progress import ProgressArtifacts
from virnucpro.config import MetricsOptions
from virnucpro.telemetry.run_telemetry import RunTelemetry

_CURRENT: ContextVar[RunTelemetry | None] = ContextVar("_CURRENT", default=None)


@contextmanager
def run_telemetry(metrics: MetricsOptions) -> Iterator[RunTelemetry]:
    """Yield what shows this flow run: within another flow of ours that one's, so that a run is shown as a whole."""
    current = _CURRENT.get()
    if current is not None:
        yield current
        return
    with RunTelemetry(metrics, [ProgressArtifacts()]) as telemetry:
        token = _CURRENT.set(telemetry)
        try:
            yield telemetry
        finally:
            _CURRENT.reset(token)
