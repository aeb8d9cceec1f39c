"""
``prefect worker start`` for process workers that first stop their runs: ``python -m flows.worker --pool NAME``.

Prefect's process worker ends within a second of SIGTERM, kills its runs and leaves them Running. This program runs it
as a child. On SIGTERM, SIGHUP or SIGINT (systemd, a container's end, SLURM's limit) the worker is suspended, so that it
takes no more; each run gets SIGTERM and stops at a batch boundary; then the worker ends, and unfinished runs await
another worker, which resumes them. A second signal does not wait for runs.

A run whose process was killed is reported as Crashed twice, before and after its hooks. Where Retry was pressed in
between and no worker has taken the run yet, the second report would undo it: the run awaits its retry again. In a run
that has begun again, ``interrupts`` undoes the report.

CONTRIBUTING.md lists the Prefect versions and issues that make it necessary.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any
from uuid import UUID

import psutil

from flows.run.metrics_by_default import TARGETS, serve_by_default
from virnucpro.pipeline.work.worker_process import end_with_parent
from virnucpro.telemetry.metrics.exposition import remove_forgotten_targets
from virnucpro.this_host import open_standard_streams, terminating_signals

GRACE_S = 25.0
"""Seconds for the runs to stop; workers of a run take at most ten."""
SIGNED_S = 5.0
"""Seconds within which a worker labels a run that it has taken."""
REQUEST_TIMEOUT_S = 10.0
"""Seconds to wait for the API."""
WORKER_GRACE_S = 15.0
"""Seconds for Prefect's worker to end after its runs."""
LOOK_S = 3.0
"""Seconds between two looks at the processes of runs."""
REPORTED_S = 60.0
"""Seconds within which Prefect's worker reports, for the second time, a run whose process has ended."""
RUN_ID = "PREFECT__FLOW_RUN_ID"
CLIENT_METRICS = "PREFECT_CLIENT_METRICS_ENABLED"
_WORKER_LABEL = "prefect.worker.name"
_POLL_S = 0.1
_SIGNALS = (signal.SIGINT, *terminating_signals())


class _StopSignal(BaseException):
    """A signal has arrived."""


def main(arguments: Sequence[str]) -> int:
    """Run Prefect's worker until it ends or a signal arrives; return its exit code, 0 after a signal."""

    def leave(_number: int, _frame: FrameType | None) -> None:
        raise _StopSignal

    open_standard_streams()
    _say(f"metrics of runs: {serve_by_default()}")
    if folder := os.environ.get(TARGETS):
        with suppress(OSError):  # left by a killed worker
            remove_forgotten_targets(Path(folder))
    if os.environ.pop(CLIENT_METRICS, None) not in {None, "", "0", "false"}:
        _say(f"{CLIENT_METRICS} is ignored: each run would ask for the worker's port, and crash")
    name = _option(arguments, "--name", "-n")
    if name is None:  # a label of its runs
        name = f"{socket.gethostname()} {os.getpid()}"
        arguments = [*arguments, "--name", name]
    command = [sys.executable, "-m", "prefect", "worker", "start", "--type", "process", *arguments]
    for number in _SIGNALS:
        signal.signal(number, leave)
    worker = subprocess.Popen(
        command,
        start_new_session=True,  # Ctrl-C reaches only us
        preexec_fn=end_with_parent,  # noqa: PLW1509  there is one thread
    )
    over = threading.Event()
    threading.Thread(target=_keep_retries, args=(worker.pid, over), name="retries", daemon=True).start()
    runs: dict[str, int] = {}
    signalled: datetime | None = None
    try:
        try:
            return worker.wait()
        except _StopSignal:
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until the runs are known
            signalled = datetime.now(UTC)
            runs = _halt(worker.pid)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            _say(f"stopping {len(runs)} runs at their next batch boundary; once more not to wait for them")
            _end_runs(runs)
    except _StopSignal:
        _say("not waiting for runs")
        signalled = signalled or datetime.now(UTC)  # both signals may arrive at once
        runs = runs or _halt(worker.pid)
    over.set()
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    for group in runs.values():
        _signal_group(group, signal.SIGKILL)
    _end_worker(worker)
    _hand_back(list(runs), name, _option(arguments, "--pool", "-p"), signalled)
    return 0


def _option(arguments: Sequence[str], *names: str) -> str | None:
    for option, value in pairwise([*arguments, ""]):
        if option in names:
            return value
        if option.startswith(f"{names[0]}="):
            return option.removeprefix(f"{names[0]}=")
    return None


def _halt(worker: int) -> dict[str, int]:
    """Suspend the worker and return its runs."""
    with suppress(psutil.Error):
        psutil.Process(worker).suspend()
    return _runs_of(worker)


def _runs_of(worker: int) -> dict[str, int]:
    """Return the runs of a worker: id -> process group; each run has its own session."""
    runs: dict[str, int] = {}
    with suppress(psutil.Error):
        for child in psutil.Process(worker).children():
            with suppress(psutil.Error, ProcessLookupError):
                run_id = child.environ().get(RUN_ID)
                if run_id and os.getpgid(child.pid) == child.pid:
                    runs[run_id] = child.pid
    return runs


def _keep_retries(worker: int, over: threading.Event) -> None:
    """Until *over*, let runs whose process has ended await their retry where the worker's second report undid it."""
    running: dict[str, int] = {}
    ended_s: dict[str, float] = {}
    while not over.wait(LOOK_S):
        before, running = running, _runs_of(worker)
        now_s = time.monotonic()
        ended_s |= dict.fromkeys(before.keys() - running.keys(), now_s)
        ended_s = {run_id: at_s for run_id, at_s in ended_s.items() if now_s - at_s < REPORTED_S}
        for run_id in ended_s:
            with suppress(Exception):  # the API is asked again
                _restore_retry(run_id)


def _restore_retry(run_id: str) -> None:
    from prefect.client.orchestration import get_client  # noqa: PLC0415  takes seconds, needed where a run has ended

    from flows.run.interrupts import is_second_report  # noqa: PLC0415

    with get_client(httpx_settings={"timeout": REQUEST_TIMEOUT_S}, sync_client=True) as client:
        states = sorted(client.read_flow_run_states(UUID(run_id)), key=lambda state: state.timestamp)
        if len(states) > 1 and states[-2].is_scheduled() and is_second_report(states[-1]):
            client.set_flow_run_state(UUID(run_id), states[-2], force=True)
            _say(f"run {run_id} awaits its retry again, which the report of its crash had undone")


def _end_runs(runs: dict[str, int]) -> None:
    """Send SIGTERM to the runs, and wait for their end within ``GRACE_S``."""
    for group in runs.values():
        _signal_group(group, signal.SIGTERM)
    deadline_s = time.monotonic() + GRACE_S
    while any(_is_alive(group) for group in runs.values()) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)


def _is_alive(pid: int) -> bool:
    """Whether a process still runs; the suspended worker does not reap its children."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def _end_worker(worker: subprocess.Popen[bytes]) -> None:
    worker.terminate()
    worker.send_signal(signal.SIGCONT)
    try:
        worker.wait(WORKER_GRACE_S)
    except subprocess.TimeoutExpired:
        worker.kill()
        worker.wait()


def _hand_back(run_ids: Sequence[str], worker: str, pool: str | None, signalled: datetime) -> None:
    """
    Make stopped runs available to other workers, and record those cancelled meanwhile.

    A run that was suspended or final on the server at the time of the signal gets that state again.
    """
    from prefect.client.orchestration import get_client  # noqa: PLC0415  takes seconds, needed only here
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings  # noqa: PLC0415
    from prefect.states import AwaitingRetry, Cancelled  # noqa: PLC0415

    message = "The worker was stopped; finished work is kept, and another worker resumes the run."
    with (
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 1}),
        get_client(httpx_settings={"timeout": REQUEST_TIMEOUT_S}, sync_client=True) as client,
    ):
        for run_id in dict.fromkeys([*run_ids, *_not_started(client, worker, pool)]):
            try:
                state = client.read_flow_run(UUID(run_id)).state
                before = [found for found in client.read_flow_run_states(UUID(run_id)) if found.timestamp < signalled]
                stays = max(before, key=lambda found: found.timestamp, default=None)
                if state is not None and state.is_cancelling():
                    client.set_flow_run_state(UUID(run_id), Cancelled(message="Cancelled while its worker stopped."))
                elif stays is not None and (stays.is_paused() or stays.is_final()):
                    if state is None or state.id != stays.id:
                        client.set_flow_run_state(UUID(run_id), stays, force=True)
                elif state is None or not state.is_final() or state.is_crashed():
                    client.set_flow_run_state(UUID(run_id), AwaitingRetry(message=message))
            except Exception as error:  # noqa: BLE001  try the next run in any case
                _say(f"run {run_id} could not be handed back: {error}")
            else:
                _say(f"run {run_id} is {client.read_flow_run(UUID(run_id)).state_name} now")


def _not_started(client: Any, worker: str, pool: str | None) -> list[str]:
    """Return the runs that the suspended worker had taken but not started."""
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType  # noqa: PLC0415
    from prefect.client.schemas.objects import FlowRun, StateType  # noqa: PLC0415

    is_pending = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.PENDING])))

    def taken() -> dict[UUID, FlowRun]:
        found = client.read_flow_runs(flow_run_filter=is_pending)
        ours = [run for run in found if run.work_pool_name == pool and run.labels.get(_WORKER_LABEL, worker) == worker]
        return {run.id: run for run in ours}

    try:
        runs = taken()
        if any(_WORKER_LABEL not in run.labels for run in runs.values()):  # other workers label theirs within SIGNED_S
            time.sleep(SIGNED_S)
            runs = {run_id: run for run_id, run in taken().items() if run_id in runs}
    except Exception as error:  # noqa: BLE001  the known runs are still handed back
        _say(f"cannot tell whether a run was about to start: {error}")
        return []
    return [str(run_id) for run_id in runs]


def _say(text: str) -> None:
    with suppress(OSError):
        sys.stderr.write(f"flows.worker: {text}\n")
        sys.stderr.flush()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
