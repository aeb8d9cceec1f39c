"""
The devices of a flow run: awaited when needed, and kept by a prediction over both embedding runs.

Context variables tell the flow ``embed`` within ``predict`` that its devices are held or its cluster is connected.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from flows.clusters.engine import Engine
from flows.clusters.runners import check_runner_allowed, runner_of, started
from virnucpro.pipeline.devices import CPU, Device
from virnucpro.pipeline.hardware.device_claim import DeviceClaim, claim_for
from virnucpro.settings import Hardware

_KEPT: ContextVar[DeviceClaim | None] = ContextVar("_KEPT", default=None)
_CLUSTER: ContextVar[Engine | None] = ContextVar("_CLUSTER", default=None)


@contextmanager
def computing_on(hardware: Hardware, check: Callable[[], object]) -> Iterator[DeviceClaim]:
    """
    Yield the devices of this flow run: its own, those of the prediction around it, or a cluster's.

    Args:
        check: Called before a cluster is requested, which may take hours; raises what would otherwise fail only then.
    """
    if (kept_claim := _KEPT.get()) is not None:
        yield kept_claim
        return
    check_runner_allowed(hardware.runner)
    runner = runner_of(hardware.runner)
    if runner.engine == "threads":
        yield claim_for(hardware)
        return
    check()
    with started(runner, workers=hardware.workers, on_cpus=hardware.devices.strip() == "cpu") as engine:
        token = _CLUSTER.set(engine)
        try:
            # placeholders for devices of other hosts, by number
            slots = range(max(1, engine.slots))
            yield DeviceClaim.of([CPU if engine.device_type == "cpu" else Device(f"task-{slot}") for slot in slots])
        finally:
            _CLUSTER.reset(token)


def cluster_here() -> Engine | None:
    """Return the cluster of this flow run, None when it uses this machine's devices."""
    return _CLUSTER.get()


@contextmanager
def kept(claim: DeviceClaim) -> Iterator[None]:
    """Let the embedding runs of the block compute on the devices of *claim*."""
    token = _KEPT.set(claim)
    try:
        yield
    finally:
        _KEPT.reset(token)
