"""
What interrupts a flow run, whatever it does: its time limit, and a server that no longer has it as running.

Prefect's own ``timeout_seconds`` is fixed where a flow is written, and its scopes do not nest. Here the clock of the
process rings and the main thread gets an error; the flow then stops as after a signal, and ends its workers on the way
out, and can be resumed.

Prefect stops a running process on cancellation alone. A run that is suspended, marked as Crashed by an automation, or
cancelled while it is suspended would compute to its end; so would one that is cancelled after the server was away for
half a minute, as Prefect's worker has given up listening by then. So a thread reads the run's own state every five
seconds, and the main thread gets an error likewise. A server that does not answer stops nothing. Nor does the second
report of an earlier crash, which comes after the hooks of that crash, when the run may have begun again.

CONTRIBUTING.md lists the Prefect versions and issues that make both necessary.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

from prefect.client.schemas.objects import FlowRun, State
from prefect.context import FlowRunContext
from prefect.states import Running

from flows.run.api import client_that_asks_once
from virnucpro.errors import ConfigurationError, StoppedError, TimeLimitError, VirNucProError

LOOK_S = 5.0
"""Seconds between two looks at the run's state."""
CANCELLING_S = 60.0
"""Seconds that Prefect's own cancellation has, unless the API was away: its worker sends SIGTERM within ten, SIGKILL
thirty later."""
AGAIN_S = 60.0
"""Seconds after which the clock rings again, for code that took the first ring for an error of its own. Stopping
workers takes less."""
_SIGNAL = signal.SIGUSR1


@contextmanager
def time_limit(minutes: float) -> Iterator[None]:
    """
    Interrupt the block after *minutes* with ``TimeLimitError``; 0 is no limit.

    Within another limit, that one continues after the block. Only the main thread can be interrupted: elsewhere a limit
    is a ConfigurationError.
    """
    if not minutes:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        raise ConfigurationError("a time limit needs a flow that runs in the main thread of its process")

    def ring(_number: int, _frame: object) -> None:
        raise TimeLimitError(minutes)

    began_s = time.monotonic()
    handler = signal.signal(signal.SIGALRM, ring)
    left_s, again_s = signal.setitimer(signal.ITIMER_REAL, minutes * 60, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left_s:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, left_s - (time.monotonic() - began_s)), again_s)


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
    Interrupt the block with ``NotToRunError`` once the server no longer has this flow run as running here.

    Does nothing for a part of another run, which is watched as a whole, and outside of the main thread.
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


def is_second_report(state: State[Any]) -> bool:
    """Whether Prefect's worker reports that a run's process has ended, as its runner did before the hooks."""
    return state.is_crashed() and (state.message or "").startswith("Flow run infrastructure exited")


class _Watch:
    def __init__(self, run: FlowRun) -> None:
        self._run_id = run.id
        self._state_id = None if run.state is None else run.state.id
        """Of its Running here: after a resume or a retry another process has its own."""
        self._found: State[Any] | None = None
        self._cancelling_s: float | None = None
        self._was_away = False
        self._over = threading.Event()
        self._sending = threading.Lock()

    def look(self) -> None:
        while not self._over.wait(LOOK_S if self._found is None else AGAIN_S):
            self._found = self._found or self._not_to_run()
            with self._sending:
                if self._found is not None and not self._over.is_set():
                    signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)

    def ring(self, _number: int, _frame: object) -> None:
        assert self._found is not None
        raise NotToRunError(self._found)

    def end(self) -> None:
        with self._sending:
            self._over.set()

    def _not_to_run(self) -> State[Any] | None:
        """Return the run's state if the process is to stop."""
        try:
            with client_that_asks_once() as client:
                run = client.read_flow_run(self._run_id)
                state = run.state
                if state is not None and is_second_report(state):  # of the process before: this one is alive
                    state = client.set_flow_run_state(run.id, Running(), force=True).state
                    self._state_id = state.id if state is not None else None
        except Exception:  # noqa: BLE001  whatever the API does, only its answer stops a run
            self._was_away = True
            return None
        if state is None or (state.is_running() and state.id == self._state_id):
            return None
        if not state.is_cancelling():
            return state
        self._cancelling_s = self._cancelling_s or time.monotonic()
        is_over = self._was_away or time.monotonic() - self._cancelling_s >= CANCELLING_S
        return state if is_over else None
