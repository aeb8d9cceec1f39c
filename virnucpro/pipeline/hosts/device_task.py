"""
One device of one host in a cluster run: the task that an orchestrator starts there.

``run_device_task`` checks the host, takes a device, finds the weights and keeps one worker process running, which
claims units in the shared folder. It needs no messages: it ends when every unit is done, or when the driver stops or
its lease expires. Its result is small and picklable. It knows no orchestrator and no framework.
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from virnucpro.config import RunLimits
from virnucpro.errors import ConfigurationError, DeviceError, HostCheckError, OutputError, VirNucProError
from virnucpro.models.registry import resolve_model
from virnucpro.pipeline.devices import CPU, VISIBLE_VARIABLE, Device, count_gpus, visible_tokens
from virnucpro.pipeline.failures import FailureClass
from virnucpro.pipeline.hardware.device_locks import DeviceLocks, lock_names
from virnucpro.pipeline.hosts.host_check import check_host
from virnucpro.pipeline.hosts.host_memory import sha256_once
from virnucpro.pipeline.hosts.host_metrics import host_metrics
from virnucpro.pipeline.hosts.host_watch import watching_driver
from virnucpro.pipeline.plan.budget_probe import PROBE_WORKER, probe_devices
from virnucpro.pipeline.work.rank_runner import run_rank
from virnucpro.pipeline.work.recovery import Recovery
from virnucpro.pipeline.work.unit_claims import UnitClaims, UnitSource, all_done, new_owner, read_units
from virnucpro.pipeline.work.worker_messages import MessageWriter
from virnucpro.store.locks.lease import Lease
from virnucpro.store.locks.worker_lock import taking_part
from virnucpro.telemetry.ranks import Rank
from virnucpro.this_host import host_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from virnucpro.config import ModelConfig
    from virnucpro.pipeline.plan.budget_probe import DeviceProbe
    from virnucpro.pipeline.run.run_preparation import PreparedRun
    from virnucpro.pipeline.work.rank_runner import MessageHandler
    from virnucpro.pipeline.work.worker_process import WorkerFunction
    from virnucpro.telemetry.metrics.options import HostMetricsOptions

log = structlog.get_logger(__name__)

GPU_WORKER = "virnucpro.pipeline.gpu_worker:gpu_worker"


@dataclass(frozen=True, kw_only=True)
class DeviceOutcome:
    """Outcome of a device task; small and picklable."""

    host: str
    owner: str
    """Owner of its claims; empty when it made none."""
    rank: Rank
    quarantined: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Index position of each sequence quarantined here -> (failure class, attempts)."""


def run_device_task(
    run: PreparedRun,
    rank: int,
    *,
    limits: RunLimits | None = None,
    stop: threading.Event | None = None,
    task: str = "",
    metrics: HostMetricsOptions | None = None,
    on_message: MessageHandler | None = None,
    worker_fn: WorkerFunction = GPU_WORKER,
) -> DeviceOutcome:
    """
    Work for a run with one device of this host until all its units are done; no process remains.

    The calling thread must be the waiting one: the worker ends with it.

    Args:
        run: As prepared by its driver, under a path to the same folder; ``world_size`` is the number of device tasks.
        rank: Of this task, unique among the running ones.
        limits: Attempts and timeouts of the worker.
        stop: Set to stop at the next batch boundary.
        task: The orchestrator's name of the task, for the log.
        metrics: Where to serve this host's metrics; None serves none.

    Returns:
        The outcome; a worker that failed for good is a state in it, and its units are free for others.
    """
    stop = threading.Event() if stop is None else stop
    owner = new_owner()
    check_host(run, owner)
    units = run.layout.units(run.run_id)
    if all_done(units.folder):  # this task had to wait until the others were done
        idle = Rank(rank=rank, device=run.devices[rank].label, host=host_name(), state="complete")
        return DeviceOutcome(host=host_name(), owner="", rank=idle)
    lease_s = read_units(units.folder).lease_s
    with (
        watching_driver(units.driver, stop, lease_s=lease_s),
        device_here(run.devices[0].type, run_id=run.run_id, stop=stop) as device,
    ):
        outcome = Rank(
            rank=rank, device=device.label, host=host_name(), state="stopped", failure=FailureClass.STOPPED.value
        )
        if stop.is_set():
            return DeviceOutcome(host=host_name(), owner="", rank=outcome)
        config = weights_here(run.model_config, run_id=run.run_id)
        place = {"host": host_name(), "device": device.label}
        source = UnitSource(units.folder, owner)
        messages = MessageWriter(units.messages_of(owner))
        others = [] if on_message is None else [on_message]
        tell = partial(_tell, [messages.on_message, *others])
        reading = host_metrics(
            metrics, units, owner, rank=rank, device=device, model=config.model_name, on_message=tell
        )
        about = {**place, "pid": os.getpid(), "rank": rank}
        lease = Lease(units.owner(owner), about, lease_s=lease_s)
        with taking_part(run.output_dir), lease, messages, reading as seen_here:
            messages.on_message(rank, {"kind": "placed", **place})
            recovery = Recovery(
                [outcome],
                num_blocks=run.num_blocks,
                limits=limits or RunLimits(),
                run_id=run.run_id,
                observer=messages,
                units=source,
            )
            args = (str(run.layout.index), str(run.output_dir), config)
            to_all = partial(_tell, [recovery.on_message, seen_here, *others])
            try:
                _run_processes(recovery, args, outcome, device, stop, task, to_all, worker_fn, run.world_size)
            finally:
                if outcome.state != "complete":
                    _release(source)
        return DeviceOutcome(host=host_name(), owner=owner, rank=outcome, quarantined=recovery.quarantined())


def _tell(handlers: Sequence[MessageHandler], rank: int, message: dict[str, Any]) -> None:
    for on_message in handlers:
        on_message(rank, message)


def _run_processes(
    recovery: Recovery,
    args: tuple[Any, ...],
    outcome: Rank,
    device: Device,
    stop: threading.Event,
    task: str,
    on_message: MessageHandler,
    worker_fn: WorkerFunction,
    world_size: int,
) -> None:
    """Start worker processes in succession until one is done or no retry is left."""
    is_wanted = True
    while is_wanted and not stop.is_set():
        with recovery.turn(outcome.rank, stop):
            run_rank(
                worker_fn,
                recovery.worker_args(outcome.rank, args, task=task),
                rank=outcome,
                world_size=world_size,
                device=device,
                limits=recovery.limits,
                stop=stop,
                on_message=on_message,
                oom_kills=recovery.oom_kills,
            )
        is_wanted = recovery.another_attempt(outcome)
        if outcome.state == "failed":
            log.warning(
                "rank.failed",
                rank=outcome.rank,
                failure=outcome.failure,
                reason=outcome.reason,
                starts_again=is_wanted,
            )


def _release(source: UnitSource) -> None:
    try:
        UnitClaims(source).release()
    except VirNucProError as error:  # the folder is gone; otherwise the units are free once our lease has expired
        log.warning("units.not_released", reason=str(error))


@contextmanager
def device_here(device_type: str, *, run_id: str, stop: threading.Event) -> Iterator[Device]:
    """
    Yield a device of this host: the only visible GPU, else a free one; no lock for the CPU.

    A single visible GPU was assigned by Ray or SLURM. Of several, one is locked, and awaited.

    Args:
        device_type: ``cpu`` or ``cuda``.
        stop: Ends the wait; the yielded device must not be used then.
    """
    if device_type == "cpu":
        yield CPU
        return
    try:
        visible = visible_tokens(os.environ, gpu_count=count_gpus())
    except DeviceError as error:
        raise HostCheckError(host_name(), VISIBLE_VARIABLE, str(error)) from error
    if not visible:
        raise HostCheckError(host_name(), VISIBLE_VARIABLE, "the run needs GPUs, but none is visible here")
    if len(visible) == 1:
        yield Device(visible[0])
        return
    names = lock_names([Device(token) for token in visible])
    locks = DeviceLocks()
    try:
        while not (taken := locks.take(list(names), least=1, most=1, run_id=run_id)) and not stop.wait(0.5):
            pass
        yield names[taken[0]] if taken else Device(visible[0])
    finally:
        locks.release()


def probe_device_here(
    index_path: str, output_dir: str, model_config: ModelConfig, *, run_id: str, probe_fn: WorkerFunction = PROBE_WORKER
) -> list[DeviceProbe]:
    """Probe a GPU of this host before a run is planned: its attention kernel and its best token budget."""
    with device_here("cuda", run_id=run_id, stop=threading.Event()) as device:
        config = weights_here(model_config, run_id=run_id)
        return probe_devices([device], (index_path, output_dir, config), probe_fn=probe_fn)


def weights_here(config: ModelConfig, *, run_id: str) -> ModelConfig:
    """Return *config* with the path of the weights on this host; absent ones are downloaded once."""
    if not config.weights_path:
        return config
    path = Path(config.weights_path)
    try:
        if path.is_file():
            sha256 = sha256_once(path, run_id=run_id)
        else:
            resolved = resolve_model(config.model_name)
            path, sha256 = resolved.weights_path, resolved.weights_sha256
    except ConfigurationError as error:
        raise HostCheckError(host_name(), path, str(error)) from error
    except OSError as error:
        if isinstance(error, OutputError):
            raise
        raise HostCheckError(host_name(), path, f"cannot be read ({error.strerror})") from error
    if sha256 != config.weights_sha256:
        difference = f"has sha256 {sha256}, but the run's weights have {config.weights_sha256}"
        raise HostCheckError(host_name(), path, difference)
    return replace(config, weights_path=str(path))
