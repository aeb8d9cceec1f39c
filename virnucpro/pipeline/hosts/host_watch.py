"""Stops a device task when the driver of its run stops or its lease expires."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import structlog

from virnucpro.store.locks.lease import ExpiryWatch, read_lease

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

log = structlog.get_logger(__name__)

WATCH_INTERVAL_S = 1.0
"""Seconds between two looks at the driver's lease."""


@contextmanager
def watching_driver(driver: Path, stop: threading.Event, *, lease_s: float) -> Iterator[None]:
    """Set *stop* when the lease file *driver* requests it, or was not renewed for *lease_s*."""
    watch, ending = ExpiryWatch(lease_s), threading.Event()

    def look() -> None:
        while not ending.wait(min(WATCH_INTERVAL_S, lease_s / 6)):
            if read_lease(driver).get("stopping"):
                log.info("host.stopping", reason="the run is stopping")
            elif watch.has_expired(driver):
                log.warning("host.stopping", reason=f"no heartbeat of the run's driver for {lease_s:g} s")
            else:
                continue
            stop.set()
            return

    thread = threading.Thread(target=look, name="watch-driver", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()
