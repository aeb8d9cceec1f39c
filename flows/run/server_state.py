"""
The state of this flow run on the server: a run that is no longer to run there stops, and can be resumed.

Prefect stops a running process on cancellation alone. A run that is suspended, marked as Crashed by an automation, or
cancelled while it is suspended would compute to its end. So a thread reads the run's own state every ten seconds, and
the main thread gets an error, as by a time limit. A server that does not answer stops nothing.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from flows.run.time_limit import AGAIN_S
from virnucpro.errors import StoppedError, VirNucProError

LOOK_S = 10.0
"""Seconds between two looks at the run's state."""
CANCELLING_S = 60.0
"""Seconds that Prefect's own cancellation has: its worker sends SIGTERM within ten, and SIGKILL thirty later."""
_REQUEST_TIMEOUT_S = 10.0
_SIGNAL = signal.SIGUSR1


class NotToRunError(StoppedError):
    """The server no longer has the run as running in this process: it was stopped, and can be resumed."""

    def __init__(self, state: State[Any]) -> None:
        super().__init__()
        self.state = state
        what = "another process runs it now" if state.is_running() else f"the run is {state.name} on the Prefect server"
        sentence = f"{what}, so it was stopped here; finished work is kept"
        VirNucProError.__init__(self, sentence)


@contextmanager
def watched() -> Iterator[None]:
    """
    Interrupt the block once the server no longer has this flow run as running here.

    Does nothing for a part of another run, which is watched as a whole, and outside of the main thread.

    Raises:
        NotToRunError: So it is.
    """
    context = FlowRunContext.get()
    run = None if context is None else context.flow_run
    if run is None or run.parent_task_run_id is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    watch = _Watch(run)
    handler = signal.signal(_SIGNAL, watch.ring)
    thread = threading.Thread(target=copy_context().run, args=(watch.look,), name="server-state", daemon=True)
    thread.start()
    try:
        yield
    finally:
        try:
            watch.end()
        finally:
            signal.signal(_SIGNAL, handler)


class _Watch:
    """Looks at a run in a thread, and interrupts the main thread."""

    def __init__(self, run: FlowRun) -> None:
        self._run_id = run.id
        self._state_id = None if run.state is None else run.state.id
        """Of its Running here: after a resume or a retry another process has its own."""
        self._found: State[Any] | None = None
        self._cancelling_s: float | None = None
        self._over = threading.Event()
        self._sending = threading.Lock()

    def look(self) -> None:
        """Look every now and then until the block is over."""
        while not self._over.wait(LOOK_S if self._found is None else AGAIN_S):
            self._found = self._found or self._not_to_run()
            with self._sending:
                if self._found is not None and not self._over.is_set():
                    signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)

    def ring(self, _number: int, _frame: object) -> None:
        """Handle the signal in the main thread."""
        assert self._found is not None
        raise NotToRunError(self._found)

    def end(self) -> None:
        """Send no further signal."""
        with self._sending:
            self._over.set()

    def _not_to_run(self) -> State[Any] | None:
        """Return the run's state if the process is to stop."""
        try:
            with (
                temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
                get_client(httpx_settings={"timeout": _REQUEST_TIMEOUT_S}, sync_client=True) as client,
            ):
                run = client.read_flow_run(self._run_id)
        except Exception:  # noqa: BLE001  whatever the API does, only its answer stops a run
            return None
        state = run.state
        if state is None or (state.is_running() and state.id == self._state_id):
            return None
        if not state.is_cancelling():
            return state
        self._cancelling_s = self._cancelling_s or time.monotonic()
        return state if time.monotonic() - self._cancelling_s >= CANCELLING_S else None
