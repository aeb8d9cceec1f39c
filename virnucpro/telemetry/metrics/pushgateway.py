"""
A run's metrics pushed to a Prometheus Pushgateway, for hosts that no Prometheus can reach.

A gateway that is down or slow costs one warning: a daemon thread does all requests. A gateway keeps groups for ever, so
a run first removes those that earlier runs of this host left.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from http.client import HTTPException
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import urlopen

import orjson
from prometheus_client import delete_from_gateway, push_to_gateway

from virnucpro.errors import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client import CollectorRegistry

JOB = "virnucpro"
INTERVAL_S = 10.0
"""Seconds between pushes."""
REQUEST_LIMIT_S = 5.0
"""Seconds for each step of a request."""
LAST_PUSH_LIMIT_S = 12.0
"""Seconds that the end of a run waits for the last push."""
FORGOTTEN_S = 600.0
"""Seconds since the last push after which a group of this host is stale."""
_MOST_BYTES = 1 << 26
_MOST_REASON_BYTES = 300


class Pushgateway:
    """Pushes a registry under job, instance (this host) and run_id."""

    def __init__(self, url: str, registry: CollectorRegistry, run_id: str) -> None:
        self.url = url.rstrip("/")
        self._registry = registry
        self._group = {"instance": socket.gethostname(), "run_id": run_id}
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, warn: Callable[[str], None]) -> None:
        """Remove stale groups, then push every ``INTERVAL_S`` in a thread, which calls *warn* at each failure."""
        self._thread = threading.Thread(target=self._run, args=(warn,), name="pushgateway", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._thread is None:
            return
        self._ending.set()
        self._thread.join(LAST_PUSH_LIMIT_S)
        self._thread = None

    def push(self) -> str | None:
        """Push once; return the error as a sentence, None on success."""
        try:
            push_to_gateway(self.url, JOB, self._registry, self._group, timeout=REQUEST_LIMIT_S)
        except HTTPError as error:
            return f"the pushgateway {self.url} refused the metrics: {error.code} {_reason(error)}"
        except OSError as error:
            return f"the pushgateway {self.url} cannot be reached: {printable(str(getattr(error, 'reason', error)))}"
        except Exception as error:  # noqa: BLE001  not its text, which may show a proxy's password
            return f"the pushgateway {self.url} cannot be used: {type(error).__name__}"
        return None

    def remove_forgotten(self) -> None:
        # other servers accept pushes but have no such list; then there is nothing to remove
        with suppress(OSError, HTTPException, ValueError, KeyError, TypeError, IndexError, AttributeError):
            address = f"{self.url}/api/v1/metrics"
            with urlopen(address, timeout=REQUEST_LIMIT_S) as answer:  # noqa: S310  http or https, checked
                groups = orjson.loads(answer.read(_MOST_BYTES))["data"]
            for labels in self._forgotten(groups):
                delete_from_gateway(self.url, labels.pop("job"), labels, timeout=REQUEST_LIMIT_S)

    def _forgotten(self, groups: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
        for group in groups:
            labels = group["labels"]
            if labels.keys() != {"job", *self._group} or labels["job"] != JOB:
                continue
            pushed = float(group["push_time_seconds"]["metrics"][0]["value"])
            if labels["instance"] == self._group["instance"] and time.time() - pushed > FORGOTTEN_S:
                yield labels

    def _run(self, warn: Callable[[str], None]) -> None:
        self.remove_forgotten()
        while True:
            is_last = self._ending.is_set()
            if problem := self.push():
                warn(problem)
            if is_last:
                return
            self._ending.wait(INTERVAL_S)


def _reason(error: HTTPError) -> str:
    """Return the first line of the gateway's answer, or the reason of its status."""
    with suppress(OSError, HTTPException):
        answer = error.read(_MOST_REASON_BYTES).decode("utf-8", "replace").strip()
        if answer:
            return printable(answer.splitlines()[0])
    return printable(str(error.reason))
