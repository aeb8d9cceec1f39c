"""What every worker does around its work, in its own process: it logs, reports why it failed, and stops on SIGTERM."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import structlog

from virnucpro.pipeline.devices import CPU_TOKEN, VISIBLE_VARIABLE, Device
from virnucpro.pipeline.failures import FailureClass, classify_error, exit_code_of
from virnucpro.pipeline.work.worker_process import error_sentence
from virnucpro.telemetry.worker_logging import known_labels, setup_worker_logging
from virnucpro.this_host import host_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from virnucpro.pipeline.work.assignment import Assignment
    from virnucpro.pipeline.work.worker_process import ReportPipe

log = structlog.get_logger(__name__)


def begin_logging(
    rank: int, log_dir: Path, reports: ReportPipe, *, level: str, assignment: Assignment | None = None
) -> None:
    """Send what this process logs to the rank's file, bound with what it belongs to; warnings to the parent as well."""
    bound: dict[str, object] = {"host": host_name(), "device": own_label(), **known_labels()}
    if assignment is not None:
        bound |= {"run_id": assignment.run_id, "attempt": assignment.attempt}
        bound |= {"task": assignment.task} if assignment.task else {}
    setup_worker_logging(rank, log_dir, level=level, reports=reports, **bound)


@contextmanager
def failure_reported(
    rank: int, reports: ReportPipe, class_of: Callable[[BaseException], FailureClass] = classify_error
) -> Iterator[None]:
    """Log an error of the block, report its class, and raise ``SystemExit`` with the exit code of that class."""
    try:
        yield
    except Exception as error:
        failure = class_of(error)
        if failure is FailureClass.STOPPED:
            log.info("worker.stopped")
        else:
            log.exception("worker.failed", failure=failure.value)
        reports.put({"rank": rank, "status": "failed", "error": error_sentence(error), "failure": failure.value})
        raise SystemExit(int(exit_code_of(failure))) from error


def stop_on_sigterm() -> threading.Event:
    stop = threading.Event()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
    return stop


def own_label() -> str:
    """Return the name of this process's device in logs."""
    return Device(os.environ.get(VISIBLE_VARIABLE, CPU_TOKEN)).label
