"""Whether the driver of a run over several hosts still wants what a host does for it."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import structlog

from virnucpro.store.lease import LapseWatch, words_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

log = structlog.get_logger(__name__)

WATCH_INTERVAL_S = 1.0
"""Seconds between two looks whether the driver wants us to stop."""


@contextmanager
def watching_driver(driver: Path, stop: threading.Event, *, lease_s: float) -> Iterator[None]:
    """
    Set *stop* when the driver says so, or gives no sign of life for as long as a lease lasts.

    Args:
        driver: Its sign of life.
        stop: Is set.
        lease_s: Seconds that a lease lasts.
    """
    watch, ending = LapseWatch(lease_s), threading.Event()

    def look() -> None:
        while not ending.wait(min(WATCH_INTERVAL_S, lease_s / 6)):
            if words_of(driver).get("stopping"):
                log.info("host.stopping", reason="the run is told to stop")
            elif watch.has_lapsed(driver):
                log.warning("host.stopping", reason=f"no sign of life of the run's driver for {lease_s:g} s")
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
