"""
The devices of a flow run: waited for when they are needed, and kept by an identification over both embedding runs.

The flow ``embed`` within ``predict`` is told by its parameters what any run is told; that its devices are held already,
it learns here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from flows.parameters import Hardware
from virnucpro.pipeline.device_claim import DeviceClaim, claim_devices
from virnucpro.telemetry.run_telemetry import RunTelemetry

_KEPT: ContextVar[DeviceClaim | None] = ContextVar("_KEPT", default=None)


def claim_for(hardware: Hardware) -> DeviceClaim:
    """
    Return the claim of this flow run: the one that an identification around it keeps, else one of its own.

    Raises:
        DeviceError: A device that is not there.
    """
    return _KEPT.get() or claim_devices(
        hardware.devices, workers=hardware.workers or None, workers_per_device=hardware.workers_per_device
    )


@contextmanager
def kept(claim: DeviceClaim, telemetry: RunTelemetry, run_id: str) -> Iterator[None]:
    """Keep the devices over all embedding runs of the block, from when the first one needs them."""
    with claim.held(telemetry, run_id=run_id):
        token = _KEPT.set(claim)
        try:
            yield
        finally:
            _KEPT.reset(token)
