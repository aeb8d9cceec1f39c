"""An identification as commands run it: shown on the terminal, stopped by signals."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from virnucpro.errors import StoppedError
from virnucpro.interrupts import stop_on_signals
from virnucpro.pipeline.prediction import run_prediction
from virnucpro.report.prediction.page import write_report
from virnucpro.telemetry.progress import terminal_view
from virnucpro.telemetry.run_telemetry import RunTelemetry

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from virnucpro.pipeline.device_claim import DeviceClaim
    from virnucpro.pipeline.prediction_result import PredictionResult
    from virnucpro.pipeline.prediction_settings import PredictionConfig
    from virnucpro.telemetry.metrics_options import MetricsOptions


@contextmanager
def shown_prediction(
    inputs: Sequence[Path],
    output: Path,
    config: PredictionConfig,
    claim: DeviceClaim,
    *,
    metrics: MetricsOptions | None = None,
    workers: int | None = None,
    restart: bool = False,
    is_quiet: bool = False,
) -> Iterator[PredictionResult]:
    """
    Run an identification, and yield what it came to while its metrics can still be asked for.

    Args:
        inputs: Contigs or reads.
        output: The run's folder.
        config: What to compute.
        claim: Where.
        metrics: Where metrics go.
        workers: CPU workers that were asked for.
        restart: Remove what the folder holds of earlier runs first.
        is_quiet: Show nothing while it runs.

    Raises:
        StoppedError: A signal asked for it.
        VirNucProError: As ``run_prediction`` does.
    """
    told_to_stop = threading.Event()
    with RunTelemetry(metrics, [terminal_view(is_quiet=is_quiet, stop=told_to_stop)]) as telemetry:
        with stop_on_signals(told_to_stop, telemetry.has_workers) as stopping:
            try:
                result = run_prediction(
                    inputs,
                    output,
                    config,
                    claim,
                    write_report=write_report,
                    workers=workers,
                    telemetry=telemetry,
                    stop=told_to_stop,
                    restart=restart,
                )
            except StoppedError:
                raise StoppedError(stopping.signal_number) from None
        yield result
