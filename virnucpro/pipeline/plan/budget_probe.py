"""Probes the run's GPUs before it is planned, each in a process that then waits for a rank: kernel and token budget."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from virnucpro.config import RunLimits
from virnucpro.errors import ConfigurationError, DeviceError, StoppedError
from virnucpro.pipeline.failures import FailureClass
from virnucpro.pipeline.work.rank_runner import run_rank
from virnucpro.pipeline.work.warm_process import BECOMES, leave_waiting
from virnucpro.telemetry.ranks import Rank

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from virnucpro.pipeline.devices import Device
    from virnucpro.pipeline.work.worker_process import WorkerFunction, WorkerProcess

log = structlog.get_logger(__name__)

PROBE_WORKER = "virnucpro.pipeline.plan.probe_worker:probe_worker"
"""By name, so that the parent does not import the framework."""


@dataclass(frozen=True, kw_only=True)
class DeviceProbe:
    device: str
    """The device's label."""
    device_name: str
    """What the driver calls it."""
    attention_kernel: str
    attention_reason: str
    token_budget: int
    """Tokens in one block that suit it."""
    trials: list[dict[str, int]]
    """tokens, tokens_per_second and peak_mib of each block size tried; empty where the budget was given."""


def probe_devices(
    devices: Sequence[Device],
    worker_args: tuple[Any, ...],
    *,
    probe_fn: WorkerFunction = PROBE_WORKER,
    stop: threading.Event | None = None,
    least: int | None = None,
    run_id: str = "",
) -> list[DeviceProbe]:
    """
    Probe every device; return the results of those that can be used.

    Args:
        devices: GPUs of the ranks; a shared one is probed once, alone.
        least: GPUs that must be usable; unusable ones are skipped with a warning. By default all.
        run_id: Of the run within whose ``kept_warm`` the processes wait; otherwise they end.

    Raises:
        StoppedError: *stop* was set.
        ConfigurationError: Too few devices can be used; names one that cannot, and the reason.
    """
    stop = stop or threading.Event()
    gpus = list(dict.fromkeys(devices))
    futures = [Future[Rank]() for _ in gpus]
    for rank, device in enumerate(gpus):
        probe = partial(
            run_rank,
            probe_fn,
            worker_args,
            rank=Rank(rank=rank, device=device.label),
            world_size=len(gpus),
            device=device,
            limits=RunLimits(),
            stop=stop,
            may_wait=True,
        )
        args = probe, futures[rank], run_id, device
        threading.Thread(target=_probe, args=args, name=f"probe-{rank}", daemon=True).start()
    try:
        outcomes = [outcome.result() for outcome in futures]
    except BaseException:
        stop.set()
        wait(futures)
        raise
    if stop.is_set():
        raise StoppedError
    errors = [_error_of(outcome) for outcome in outcomes if outcome.state != "complete"]
    if errors and len(gpus) - len(errors) < (len(gpus) if least is None else least):
        raise errors[0]
    for error in errors:
        log.warning("device.left_out", reason=str(error))
    return [
        DeviceProbe(
            device=outcome.device, **{name: report[name] for name in DeviceProbe.__annotations__ if name in report}
        )
        for outcome in outcomes
        if outcome.state == "complete" and (report := outcome.attempt.report)
    ]


def _probe(probe: Callable[..., Rank], outcome: Future[Rank], run_id: str, device: Device) -> None:
    """Do a probe, and stay: the kernel ends a process with the thread that started it."""
    started: list[WorkerProcess] = []
    try:
        record = probe(on_start=started.append)
        if record.state == "complete" and (becomes := (record.attempt.report or {}).get(BECOMES)):
            leave_waiting(run_id, device, started[0], becomes)
        outcome.set_result(record)
        for worker in started:
            worker.outlive()
    except BaseException as error:  # noqa: BLE001  # raised where the outcome is waited for
        outcome.set_exception(error)


def _error_of(outcome: Rank) -> ConfigurationError:
    if outcome.failure == FailureClass.CONFIGURATION:
        return ConfigurationError(f"{outcome.device}: {outcome.reason}")
    return DeviceError(
        f"{outcome.device} could not be tried out ({outcome.failure}: {outcome.reason}): "
        "see logs/worker_*.log in the output folder, or leave that device out with --devices"
    )
