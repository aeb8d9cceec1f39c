"""A run as a command has it: shown on the terminal, with its metrics, stopped by signals and by its time limit."""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import threading
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from virnucpro.commands.output import ignoring_closed_output
from virnucpro.config import RunLimits
from virnucpro.errors import ConfigurationError, StoppedError, TimeLimitError, printable
from virnucpro.pipeline.hardware.device_claim import claim_for
from virnucpro.telemetry.metrics.options import metrics_options
from virnucpro.telemetry.run_telemetry import RunTelemetry
from virnucpro.telemetry.show.progress import DownloadProgress, say, terminal_view
from virnucpro.this_host import terminating_signals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from virnucpro.pipeline.hardware.device_claim import DeviceClaim
    from virnucpro.pipeline.prediction.result import PredictionResult
    from virnucpro.pipeline.run.run_result import RunResult
    from virnucpro.settings import RunSettings

INSTALLED_FLOWS = "virnucpro_flows"
"""What a wheel names the folder ``flows`` of a checkout, see ``hatch_build.py``."""

_RUNNER_PACKAGES = {"ray": "ray", "dask": "distributed"}

Config = TypeVar("Config")
Outcome = TypeVar("Outcome")
Result = TypeVar("Result", "RunResult", "PredictionResult")


def configured(
    configure: Callable[..., Config], settings: RunSettings, *, is_quiet: bool
) -> tuple[DeviceClaim, Config]:
    """Return this machine's devices for a run, and what *configure* makes of its settings for them."""
    claim = claim_for(settings.hardware)
    with DownloadProgress(is_quiet=is_quiet) as download:
        return claim, configure(settings, device_type=claim.type, on_download=download.advance)


def report(
    result: Result,
    print_summary: Callable[[Result], None],
    *,
    as_json: bool,
    quiet: bool,
    allow_partial: bool,
    parts: str,
) -> None:
    """
    Print the outcome of a run.

    Args:
        parts: What a partial result lacks some of, such as sequences.

    Raises:
        WorkersFailedError: It is partial, and that was not allowed.
    """
    with ignoring_closed_output():
        if as_json:
            print(json.dumps(result.to_json()))
        elif not quiet:
            print_summary(result)
    result.raise_unless(allow_partial=allow_partial)
    if result.state == "partial":
        say(printable(f"partial: the missing {parts} are listed in {result.output_dir / 'failed_sequences.tsv'}"))


class _Interrupts:
    """
    Stops workers at a batch boundary on the first SIGINT, SIGTERM or SIGHUP, or at the time limit; at once on the second.

    Without workers (while the input is read or the result merged) the first signal ends the run. A context manager, for
    the main thread.

    Args:
        event: Set on the first signal, after the terminal shows that the run stops.
        has_workers: Whether workers compute now.
        time_limit_minutes: Of the wall clock; 0 is no limit.
    """

    def __init__(self, event: threading.Event, has_workers: Callable[[], bool], time_limit_minutes: float) -> None:
        self._event = event
        self._has_workers = has_workers
        self._time_limit_minutes = time_limit_minutes
        self._first: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGALRM, *terminating_signals()):
            self._before[number] = signal.signal(number, self._handle)
        signal.setitimer(signal.ITIMER_REAL, self._time_limit_minutes * 60)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def error(self) -> StoppedError:
        return TimeLimitError(self._time_limit_minutes) if self._first == signal.SIGALRM else StoppedError(self._first)

    def _handle(self, number: int, _frame: object) -> None:
        if number in {signal.SIGALRM, signal.SIGHUP} and self._first is not None:
            return  # it is stopping already; of a terminal that closes, shell and kernel both send SIGHUP
        if self._first not in {None, signal.SIGALRM}:
            with suppress(OSError):
                os.write(2, b"\nstopped at once: start the same command again to continue\n")
            raise SystemExit(int(StoppedError(number).exit_code))
        self._first = number
        has_workers = self._has_workers()
        if has_workers:
            with suppress(OSError):  # standard error may be closed
                os.write(2, b"\nstopping as soon as what is finished is safe; once more to stop at once\n")
        self._event.set()
        if not has_workers:
            raise self.error()


@contextmanager
def shown_run(run: Callable[..., Outcome], settings: RunSettings, *, is_quiet: bool, notes: bool) -> Iterator[Outcome]:
    """
    Run, and yield the outcome while the run's metrics can still be scraped.

    Args:
        run: Called with ``telemetry``, ``stop`` and ``limits``.
        settings: Where metrics go, and how long and how often.
        is_quiet: Show no progress.
        notes: Show what is neither an error nor a warning.

    Raises:
        StoppedError: A signal asked for it, or the time limit has passed.
    """
    limits = RunLimits.of(settings.limits)
    stop = threading.Event()
    view = terminal_view(is_quiet=is_quiet, stop=stop)
    with RunTelemetry(metrics_options(settings.monitoring), [view], notes=notes) as telemetry:
        with _Interrupts(stop, telemetry.has_workers, settings.limits.time_limit_minutes) as stopping:
            try:
                outcome = run(telemetry=telemetry, stop=stop, limits=limits)
            except StoppedError:
                raise stopping.error() from None
            if getattr(outcome, "state", "") == "stopped":
                raise stopping.error()
        yield outcome


def _check_runner(runner: str) -> None:
    """Raise ConfigurationError where a runner's package is not installed, before a server is started for its flow."""
    engine = runner.partition(":")[0]
    if engine in _RUNNER_PACKAGES and find_spec(_RUNNER_PACKAGES[engine]) is None:
        raise ConfigurationError(f"the runner {engine} needs the package {engine}: pip install 'virnucpro[{engine}]'")


def _check_home() -> None:
    """Raise ConfigurationError where Prefect, as it is imported, finds no home folder, and would not go without one."""
    try:
        Path.home()
    except RuntimeError:
        if not (home := os.environ.get("PREFECT_HOME")):
            raise ConfigurationError("no home folder: set PREFECT_HOME to a folder that can be written") from None
        os.environ["HOME"] = home


def run_as_flow(name: str, settings: RunSettings, *, is_quiet: bool, **parameters: Any) -> Any:
    """Run the Prefect flow *name* in this process with the same settings, and return its outcome."""
    _check_runner(settings.hardware.runner)
    _check_home()
    beside_us = Path(__file__).parents[2] / INSTALLED_FLOWS
    flows = INSTALLED_FLOWS if beside_us.is_dir() else "flows"
    boxes = {field: getattr(settings, field) for field in type(settings).model_fields}
    gc.disable()  # what Prefect's import makes stays: looking through it again and again is a fifth of its CPU time
    run = importlib.import_module(f"{flows}.{name}").run_from_command_line
    gc.freeze()
    gc.enable()
    return run(is_quiet=is_quiet, **parameters, **boxes)
