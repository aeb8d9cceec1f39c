"""A flow in the process of the command line, with the errors and the signals of the plain command."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from prefect import Flow
from prefect.exceptions import ParameterTypeError, PrefectSignal
from prefect.logging.handlers import APILogWorker

from flows.run.api import prefect_api
from virnucpro.errors import ConfigurationError, ExitCode

LOG_DRAIN_S = 10.0
"""Seconds that the last log lines have to reach the API."""


def run_here(flow: Flow[..., Any], /, **parameters: Any) -> Any:
    """
    Run a flow in this process, against the API that the environment names or an embedded server; return its outcome.

    Raises:
        VirNucProError: As the plain command would raise, with the same exit code.
    """
    with _terminable(), prefect_api():
        try:
            state = cast("Any", flow)(**parameters, return_state=True)
        except ParameterTypeError as error:  # where the form's bounds are narrower than the options'
            raise ConfigurationError(str(error)) from None
        except PrefectSignal as ended:  # the server no longer has it as running
            raise (ended.__cause__ or ended) from None
        # the last log lines leave while there is a server: at exit Prefect would try for a minute
        APILogWorker.drain_all(timeout=LOG_DRAIN_S, at_exit=False)
        outcome = state.result(raise_on_failure=False)
        if isinstance(outcome, ParameterTypeError):
            raise ConfigurationError(str(outcome)) from None
        if isinstance(outcome, BaseException):
            raise outcome
    return outcome


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM unwind the flow, so that workers and server are stopped on the way out, and end with its own code."""
    signals: list[int] = []

    def leave(number: int, _frame: object) -> None:
        signals.append(number)
        raise SystemExit(int(ExitCode.TERMINATED))

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    except Exception as error:
        if signals:  # in some of Prefect's own code the exit becomes another error
            raise SystemExit(int(ExitCode.TERMINATED)) from error
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
