"""Probes the run's GPUs before it is planned, each in an isolated process: attention kernel and token budget."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from virnucpro.config import RunLimits
from virnucpro.errors import ConfigurationError, DeviceError, StoppedError
from virnucpro.pipeline.failures import FailureClass
from virnucpro.pipeline.work.rank_runner import run_rank
from virnucpro.telemetry.ranks import Rank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virnucpro.pipeline.devices import Device
    from virnucpro.pipeline.work.worker_process import WorkerFunction

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
) -> list[DeviceProbe]:
    """
    Probe every device; return the results of those that can be used.

    Args:
        devices: GPUs of the ranks; a shared one is probed once, alone.
        least: GPUs that must be usable; unusable ones are skipped with a warning. By default all.

    Raises:
        StoppedError: *stop* was set.
        ConfigurationError: Too few devices can be used; names one that cannot, and the reason.
    """
    stop = stop or threading.Event()
    gpus = list(dict.fromkeys(devices))
    reports: dict[int, dict[str, Any]] = {}

    def on_message(rank: int, message: dict[str, Any]) -> None:
        if "kind" not in message:
            reports[rank] = message

    def probe(rank: int) -> Rank:
        return run_rank(
            probe_fn,
            worker_args,
            rank=Rank(rank=rank, device=gpus[rank].label),
            world_size=len(gpus),
            device=gpus[rank],
            limits=RunLimits(),
            stop=stop,
            on_message=on_message,
        )

    with ThreadPoolExecutor(len(gpus), thread_name_prefix="probe") as threads:
        try:
            outcomes = list(threads.map(probe, range(len(gpus))))
        except BaseException:
            stop.set()  # or the executor would wait for processes of no use any more
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
            device=device.label,
            **{name: reports[rank][name] for name in DeviceProbe.__annotations__ if name != "device"},
        )
        for rank, device in enumerate(gpus)
        if outcomes[rank].state == "complete"
    ]


def _error_of(outcome: Rank) -> ConfigurationError:
    if outcome.failure == FailureClass.CONFIGURATION:
        return ConfigurationError(f"{outcome.device}: {outcome.reason}")
    return DeviceError(
        f"{outcome.device} could not be tried out ({outcome.failure}: {outcome.reason}): "
        "see logs/worker_*.log in the output folder, or leave that device out with --devices"
    )
