"""
The devices of a flow run: waited for when they are needed, and kept by an identification over both embedding runs.

The flow ``embed`` within ``predict`` is told by its parameters what any run is told; that its devices are held already,
or that its cluster is there, it learns here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from flows.cluster import Cluster
from flows.runners import check_runner_allowed, runner_of, started
from virnucpro.pipeline.device_claim import DeviceClaim, claim_devices
from virnucpro.pipeline.host_run import device_tasks
from virnucpro.settings import Hardware
from virnucpro.telemetry.run_telemetry import RunTelemetry

_KEPT: ContextVar[DeviceClaim | None] = ContextVar("_KEPT", default=None)
_CLUSTER: ContextVar[Cluster | None] = ContextVar("_CLUSTER", default=None)


@contextmanager
def computing_on(hardware: Hardware, check: Callable[[], object]) -> Iterator[DeviceClaim]:
    """
    Yield what this flow run computes on: devices of its own or of the identification around it, or a cluster's.

    Args:
        hardware: Which.
        check: Is called before a cluster is asked for, which may be waited for for hours; raises what would be found
            out only then.

    Raises:
        DeviceError: A device that is not there.
        ConfigurationError: A cluster that is not there.
    """
    if (kept_claim := _KEPT.get()) is not None:
        yield kept_claim
        return
    check_runner_allowed(hardware.runner)
    runner = runner_of(hardware.runner)
    if runner.engine == "threads":
        yield claim_devices(
            hardware.devices, workers=hardware.workers or None, workers_per_device=hardware.workers_per_device
        )
        return
    check()
    with started(runner, workers=hardware.workers, on_cpus=hardware.devices.strip() == "cpu") as cluster:
        token = _CLUSTER.set(cluster)
        try:
            yield device_tasks(cluster.slots, cluster.device_type)
        finally:
            _CLUSTER.reset(token)


def cluster_here() -> Cluster | None:
    """Return the cluster of this flow run, or None where its devices are this machine's."""
    return _CLUSTER.get()


@contextmanager
def kept(claim: DeviceClaim, telemetry: RunTelemetry, run_id: str) -> Iterator[None]:
    """Keep the devices over all embedding runs of the block, from when the first one needs them."""
    with claim.held(telemetry, run_id=run_id):
        token = _KEPT.set(claim)
        try:
            yield
        finally:
            _KEPT.reset(token)
