"""
How a flow run ends: its state, its message, and its exit code as a label.

Completed; Completed and named ``Partial``; Failed with the message that the command line would print; Failed and named
``TimedOut`` when its own time limit has passed. The label ``virnucpro.exit_code`` has the plain command's number for
programs. A run that is cancelled or killed has no label, and its state is Prefect's; likewise one that stopped because
the server no longer had it as running.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NoReturn

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.context import FlowRunContext
from prefect.exceptions import Abort, Pause
from prefect.logging import get_run_logger
from prefect.states import Cancelled, Crashed, Failed

from flows.run.api import client_that_asks_once
from flows.run.hooks import end_what_is_open
from flows.run.interrupts import NotToRunError, time_limit, watched
from flows.run.telemetry import send_lines_to_prefect
from virnucpro.errors import ExitCode, TimeLimitError, VirNucProError
from virnucpro.settings import Limits

LABEL = "virnucpro.exit_code"
"""Of a flow run that ended by itself."""
PATIENCE_S = 15.0
"""Seconds for which an API that does not take the label is asked again."""


def ended(work: Callable[[], State[Any]], limits: Limits | None = None) -> State[Any]:
    """
    Return the final state of a flow run: what *work* returns, or its error as a state.

    At the time limit *work* is interrupted; it runs in this thread, the main thread of its process, and what the
    program logs meanwhile goes to Prefect. Raises Prefect's Abort or Pause where the server no longer has the run as
    running: its state there stays.
    """
    send_lines_to_prefect()
    run = _flow_run()
    if run is not None and run.run_count > 1:  # the process before may have been killed, with its worker
        end_what_is_open(run.id, Crashed, before=datetime.now(UTC))
    try:
        with watched(), time_limit(limits.time_limit_minutes if limits is not None else 0):
            state = work()
        code = ExitCode.PARTIAL if state.name == "Partial" else ExitCode.COMPLETE
    except (NotToRunError, Pause) as stopped:
        if stopped.state is not None and run is not None and run.parent_task_run_id is None:
            _leave(stopped.state)
        if isinstance(stopped, Pause):
            raise
        return Cancelled(message=str(stopped), data=stopped)  # the whole run leaves
    except VirNucProError as error:
        name = "TimedOut" if isinstance(error, TimeLimitError) else "Failed"
        state, code = Failed(name=name, message=str(error), data=error), error.exit_code
    _label(ExitCode.CONFIGURATION if code is ExitCode.USAGE else code)  # a flow has no command line
    return state


def _flow_run() -> FlowRun | None:
    context = FlowRunContext.get()
    return None if context is None else context.flow_run


def _leave(state: State[Any]) -> NoReturn:
    """End the run's process with the state that the server has, after the hooks of a cancelled run."""
    context = FlowRunContext.get()
    assert context is not None
    flow, run = context.flow, context.flow_run
    assert flow is not None
    assert run is not None
    stopped = NotToRunError(state)
    get_run_logger().warning("%s", stopped)
    if state.is_cancelling():  # what should have ended the process has not
        state = Cancelled(message=str(stopped))
        with suppress(Exception), get_client(sync_client=True) as client:
            client.set_flow_run_state(run.id, state, force=True)
    for hook in flow.on_cancellation_hooks:
        hook(flow, run, state)
    raise (Pause(state=state) if state.is_paused() else Abort(str(stopped))) from stopped


def _label(code: ExitCode) -> None:
    """Write the exit code to the flow run; given up when the API does not answer for a while."""
    run = _flow_run()
    if run is None:
        return None
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            with client_that_asks_once() as client:
                return client.update_flow_run_labels(run.id, {LABEL: int(code)})
        except Exception as error:  # noqa: BLE001  whatever the API does, the state that follows is worth more
            if time.monotonic() > deadline_s:
                get_run_logger().warning("the label %s could not be written: %s", LABEL, error or repr(error))
                return None
            time.sleep(1)  # a busy server answers 503 now and then
