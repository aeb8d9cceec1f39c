"""Shows a flow run: metrics, status file, and progress in Prefect's UI."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from flows.run.progress import ProgressArtifacts
from virnucpro.telemetry.metrics.options import MetricsOptions
from virnucpro.telemetry.run_telemetry import RunTelemetry
from virnucpro.telemetry.show.progress import PlainView


class _Lines(PlainView):
    """Lines on standard error, as without a flow: a command's embedded server has no UI."""

    def say(self, text: str) -> None:
        """Ignore it: the flow run's log shows the same line."""


_CURRENT: ContextVar[RunTelemetry | None] = ContextVar("_CURRENT", default=None)


@contextmanager
def run_telemetry(metrics: MetricsOptions) -> Iterator[RunTelemetry]:
    """Yield the telemetry of this flow run, shared with an enclosing flow of ours."""
    current = _CURRENT.get()
    if current is not None:
        yield current
        return
    with RunTelemetry(metrics, [ProgressArtifacts(), _Lines()]) as telemetry:
        token = _CURRENT.set(telemetry)
        try:
            yield telemetry
        finally:
            _CURRENT.reset(token)
