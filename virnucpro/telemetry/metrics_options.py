"""
Where the metrics of a run go: as it was asked, else as the environment says.

Every entry point asks here: the commands, the flows, and a run that nobody gave options, as the library's are.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from virnucpro.errors import ConfigurationError, printable

METRICS_PORT = "VIRNUCPRO_METRICS_PORT"
METRICS_TARGETS = "VIRNUCPRO_METRICS_TARGETS"
METRICS_NETWORK = "VIRNUCPRO_METRICS_NETWORK"
PUSHGATEWAY = "VIRNUCPRO_PUSHGATEWAY"
MOST_PORT = 65535
"""Largest port of TCP."""


@dataclass(frozen=True, kw_only=True)
class MetricsOptions:
    """Where a run's metrics go beside its folder; results never depend on it."""

    port: int | None = None
    """Port that they are served at, 0 for a free one; None serves none."""
    network: str = ""
    """IPv4 network, as in 10.1.0.0/16, in whose address of this host they are served; empty: on 127.0.0.1."""
    targets_dir: str | None = None
    """Folder of ``file_sd_configs`` that gets a file with the served address while the run goes on."""
    pushgateway: str | None = None
    """URL of a Prometheus pushgateway; None pushes nothing."""

    def __post_init__(self) -> None:
        if self.port is not None and not 0 <= self.port <= MOST_PORT:
            raise ConfigurationError(f"metrics port is {self.port}: it must be from 0 to {MOST_PORT}")
        if self.targets_dir is not None and self.port is None:
            raise ConfigurationError("a folder of metrics targets needs a metrics port: 0 takes a free one")
        if self.network:
            _check_network(self.network)
        if self.pushgateway is not None:
            _check_address(self.pushgateway)


@dataclass(frozen=True, kw_only=True)
class HostMetricsOptions:
    """Where the hosts of a cluster serve what only they know of a run; results never depend on it."""

    run_id: str
    """By which the run is known to Prometheus: of the run as a whole, of which an embedding may be a part."""
    port: int
    """Port on each host, 0 for a free one."""
    network: str
    """As in ``MetricsOptions``, of each host; where it is empty, only the driver's host serves, on 127.0.0.1."""
    driver: str
    """The driver's host."""
    targets_dir: str | None
    """Folder of ``file_sd_configs`` that gets a file for each host."""


def _check_network(network: str) -> None:
    """
    Check a network that metrics are served in.

    Raises:
        ConfigurationError: It is none.
    """
    try:
        ipaddress.IPv4Network(network, strict=False)
    except ValueError as error:
        raise ConfigurationError(
            f"metrics network is {printable(network)}: give an IPv4 network such as 10.1.0.0/16, or an address"
        ) from error


def _check_address(url: str) -> None:
    """
    Check the address of a pushgateway.

    Raises:
        ConfigurationError: It cannot be one, or holds a password, which would stand in messages.
    """
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in {"http", "https"} and (parts.hostname or "").encode("idna") and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good or parts.query or parts.fragment or url != printable(url) or " " in url:
        raise ConfigurationError("pushgateway: this is no http:// or https:// address, such as http://gateway:9091")
    if "@" in parts.netloc:
        raise ConfigurationError("pushgateway: an address with a user name or password in it cannot be used")


def metrics_options(
    *,
    port: int | None = None,
    targets: str | Path | None = None,
    network: str | None = None,
    pushgateway: str | None = None,
) -> MetricsOptions:
    """
    Return where metrics go; what is None or empty is taken from the environment.

    A folder of targets alone, as a whole machine may have it in the environment, takes a free port.

    Raises:
        ConfigurationError: A value cannot be used.
    """
    targets = targets or os.environ.get(METRICS_TARGETS)
    port = _port_of_environment() if port is None else port
    return MetricsOptions(
        port=0 if port is None and targets else port,
        targets_dir=str(Path(targets).absolute()) if targets else None,
        network=network or os.environ.get(METRICS_NETWORK, ""),
        pushgateway=pushgateway or os.environ.get(PUSHGATEWAY) or None,
    )


def _port_of_environment() -> int | None:
    text = os.environ.get(METRICS_PORT)
    if not text:
        return None
    if not (text.isascii() and text.isdigit()):
        raise ConfigurationError(f"{METRICS_PORT} is {printable(text)}: it must be from 0 to {MOST_PORT}")
    return int(text)
