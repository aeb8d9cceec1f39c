"""
How a flow run of ours ends: its state, its sentence, and its exit code as a label.

Completed; Completed and named ``Partial``; Failed with the sentence that the command line would print; Failed and named
``TimedOut`` when its own time limit has passed. The label ``virnucpro.exit_code`` says the same to programs, with the
plain command's numbers. A run that is cancelled or killed cannot say anything: its state is Prefect's, and it has no
label.
"""

import time
from collections.abc import Callable
from typing import Any

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.logging import get_run_logger
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Failed

from flows.time_limit import TimeLimitError, time_limit
from virnucpro.errors import ExitCode, VirNucProError

LABEL = "virnucpro.exit_code"
"""Of a flow run that came to its own end."""
PATIENCE_S = 15.0
"""Seconds for which an API that does not take the label is asked again."""
_REQUEST_TIMEOUT_S = 10.0


def ended(work: Callable[[], State[Any]], *, time_limit_minutes: float = 0) -> State[Any]:
    """
    Return the final state of a flow run: what *work* returns, or its error of ours as a state.

    Args:
        work: The run; called in the thread that the flow runs in, which is the main thread of its process.
        time_limit_minutes: After which it is interrupted, and workers are stopped, then killed; 0 is none.
    """
    try:
        with time_limit(time_limit_minutes):
            state = work()
        code = ExitCode.PARTIAL if state.name == "Partial" else ExitCode.COMPLETE
    except VirNucProError as error:
        name = "TimedOut" if isinstance(error, TimeLimitError) else "Failed"
        state, code = Failed(name=name, message=str(error), data=error), error.exit_code
    _label(code)
    return state


def _label(code: ExitCode) -> None:
    """Write the exit code to the flow run; an API that does not answer for a while cannot be told."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return None
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            with (
                temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
                get_client(httpx_settings={"timeout": _REQUEST_TIMEOUT_S}, sync_client=True) as client,
            ):
                return client.update_flow_run_labels(context.flow_run.id, {LABEL: int(code)})
        except Exception as error:  # noqa: BLE001  whatever the API does, the state that follows is worth more
            if time.monotonic() > deadline_s:
                get_run_logger().warning("the label %s could not be written: %s", LABEL, error or repr(error))
                return None
            time.sleep(1)  # a busy server answers 503 now and then
