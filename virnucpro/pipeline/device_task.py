"""
One device of one host, for as long as a run over several hosts lasts: what an orchestrator starts there.

``run_device_task`` checks the host, takes a device, finds the weights, and then keeps one worker process at work, which
claims its units in the shared folder. It needs no message from anybody: it ends when every unit is done, or when the
driver says so or is gone. What it gives back is small and plain. It knows no orchestrator and no framework.
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
from virnucpro.pipeline.budget_probe import PROBE_WORKER, probe_devices
from virnucpro.pipeline.device_locks import DeviceLocks, lock_names
from virnucpro.pipeline.devices import CPU, VISIBLE_VARIABLE, Device, count_gpus, visible_tokens
from virnucpro.pipeline.failures import FailureClass
from virnucpro.pipeline.host_check import check_host
from virnucpro.pipeline.host_memory import sha256_once
from virnucpro.pipeline.host_metrics import host_metrics
from virnucpro.pipeline.host_watch import watching_driver
from virnucpro.pipeline.rank_runner import run_rank
from virnucpro.pipeline.recovery import Recovery
from virnucpro.pipeline.unit_claims import UnitClaims, UnitSource, all_done, new_owner, read_units
from virnucpro.pipeline.worker_messages import MessageWriter
from virnucpro.store.lease import Lease
from virnucpro.store.worker_lock import taking_part
from virnucpro.telemetry.ranks import Rank
from virnucpro.this_host import host_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from virnucpro.config import ModelConfig
    from virnucpro.pipeline.budget_probe import DeviceProbe
    from virnucpro.pipeline.rank_runner import MessageHandler
    from virnucpro.pipeline.run_preparation import PreparedRun
    from virnucpro.pipeline.worker_process import WorkerFunction
    from virnucpro.telemetry.metrics_options import HostMetricsOptions

log = structlog.get_logger(__name__)

GPU_WORKER = "virnucpro.pipeline.gpu_worker:gpu_worker"


@dataclass(frozen=True, kw_only=True)
class DeviceOutcome:
    """How a device task went; small and picklable."""

    host: str
    """Where."""
    owner: str
    """In whose name its units were claimed; empty where it came to none."""
    rank: Rank
    """How its worker processes went."""
    quarantined: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Index position of each sequence that was given up here -> (failure class, processes that tried)."""


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
    Take part in a run with one device of this host, until all its units are done; no process is left then.

    The calling thread must be the one that waits: the worker ends when it ends.

    Args:
        run: As its driver has prepared it, under a path that leads to the same folder here; ``world_size`` is the
            number of device tasks.
        rank: Of this task, unique among those that run at the same time.
        limits: How often the worker is started again, and how long it is waited for.
        stop: Set it to stop at the next batch boundary.
        task: The orchestrator's name of the task, for the log.
        metrics: Where this host serves what only it knows of the run; None serves nothing.
        on_message: Called with rank and message for everything that the worker says.
        worker_fn: What the process runs.

    Returns:
        How it went; a worker that failed for good is a state in it, not an error, and its units are free for others.

    Raises:
        HostCheckError: This host does not see the run's input, folder, versions or weights, or has no device for it.
        OutputError: The folder cannot be written.
    """
    stop = threading.Event() if stop is None else stop
    owner = new_owner()
    check_host(run, owner)
    units = run.layout.units(run.run_id)
    if all_done(units.folder):  # there was no room for this task before
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
        words = MessageWriter(units.said(owner))
        others = [] if on_message is None else [on_message]
        tell = partial(_tell, [words.on_message, *others])
        reading = host_metrics(
            metrics, units, owner, rank=rank, device=device, model=config.model_name, on_message=tell
        )
        about = {**place, "pid": os.getpid(), "rank": rank}
        lease = Lease(units.owner(owner), about, lease_s=lease_s)
        with taking_part(run.output_dir), lease, words, reading as seen_here:
            words.on_message(rank, {"kind": "placed", **place})
            recovery = Recovery(
                [outcome],
                num_blocks=run.num_blocks,
                limits=limits or RunLimits(),
                run_id=run.run_id,
                observer=words,
                units=source,
            )
            args = (str(run.layout.index), str(run.output_dir), config)
            hear = partial(_tell, [recovery.on_message, seen_here, *others])
            try:
                _run_processes(recovery, args, outcome, device, stop, task, hear, worker_fn, run.world_size)
            finally:
                if outcome.state != "complete":
                    _release(source)
        return DeviceOutcome(host=host_name(), owner=owner, rank=outcome, quarantined=recovery.quarantined())


def _tell(hearers: Sequence[MessageHandler], rank: int, message: dict[str, Any]) -> None:
    for hear in hearers:
        hear(rank, message)


def _run_processes(
    recovery: Recovery,
    args: tuple[Any, ...],
    outcome: Rank,
    device: Device,
    stop: threading.Event,
    task: str,
    hear: MessageHandler,
    worker_fn: WorkerFunction,
    world_size: int,
) -> None:
    """Start worker processes, one after the other, until one is done or no other may help."""
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
                on_message=hear,
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
    except VirNucProError as error:  # the folder is gone, or will be free once our lease has lapsed
        log.warning("units.not_released", reason=str(error))


@contextmanager
def device_here(device_type: str, *, run_id: str, stop: threading.Event) -> Iterator[Device]:
    """
    Yield a device of this host for one task: the GPU that the orchestrator chose, else one that is free.

    Where exactly one GPU is visible, somebody has chosen it for us (Ray, a job of SLURM), and it is ours. Of several,
    one is locked, and waited for. Without GPUs a task of the CPU takes no lock.

    Args:
        device_type: ``cpu`` or ``cuda``: of the run.
        run_id: Of the start of the run.
        stop: Ends the waiting; then the device must not be used.

    Raises:
        HostCheckError: No GPU is visible here.
        OutputError: The locks cannot be used.
    """
    if device_type == "cpu":
        yield CPU
        return
    try:
        visible = visible_tokens(os.environ, gpu_count=count_gpus())
    except DeviceError as error:
        raise HostCheckError(host_name(), VISIBLE_VARIABLE, str(error)) from error
    if not visible:
        raise HostCheckError(host_name(), VISIBLE_VARIABLE, "the run is one of GPUs, but none is visible here")
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
    """
    Try a GPU of this host out before a run is planned: its attention kernel and the token budget that suits it.

    Args:
        index_path: The sequence index.
        output_dir: The run's folder.
        model_config: What will be computed.
        run_id: Of the start of the run.
        probe_fn: What the process runs.

    Raises:
        HostCheckError: No GPU is visible here, or its weights are others.
        ConfigurationError: It cannot be used; says why.
    """
    with device_here("cuda", run_id=run_id, stop=threading.Event()) as device:
        config = weights_here(model_config, run_id=run_id)
        return probe_devices([device], (index_path, output_dir, config), probe_fn=probe_fn)


def weights_here(config: ModelConfig, *, run_id: str) -> ModelConfig:
    """
    Return *config* with the path of the weights on this host, which are fetched once where they are absent.

    Args:
        config: Of the run; the path in it is that of the driver's host.
        run_id: Of the start of the run.

    Raises:
        HostCheckError: They cannot be had, or are other weights.
        OutputError: Fetched weights cannot be written.
    """
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
        what = f"has sha256 {sha256}, but the run's weights have {config.weights_sha256}"
        raise HostCheckError(host_name(), path, what)
    return replace(config, weights_path=str(path))
