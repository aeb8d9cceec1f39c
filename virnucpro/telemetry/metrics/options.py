"""Where the metrics of a run go, for commands, flows and the library: from its settings, else from the environment."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from virnucpro.errors import ConfigurationError, printable
from virnucpro.knobs import settings_of
from virnucpro.settings import MOST_PORT, Monitoring

TEXTFILES = "VIRNUCPRO_METRICS_TEXTFILES"


@dataclass(frozen=True, kw_only=True)
class MetricsOptions:
    """Where a run's metrics go beside its folder; results never depend on it."""

    port: int | None = None
    """Port that they are served at, 0 for a free one; None serves none."""
    network: str = ""
    """IPv4 network, as in 10.1.0.0/16: they are served on this host's address in it; empty: on 127.0.0.1."""
    targets_dir: str | None = None
    """Folder of ``file_sd_configs`` that gets a file with the served address while the run is running."""
    textfiles_dir: str | None = None
    """Folder of node_exporter's textfile collector that gets the last figures, in a file a run's folder."""
    pushgateway: str | None = None
    """URL of a Prometheus pushgateway; None pushes nothing."""

    def __post_init__(self) -> None:
        if self.port is not None and not 0 <= self.port <= MOST_PORT:
            raise ConfigurationError(f"metrics port is {self.port}: it must be from 0 to {MOST_PORT}")
        if self.targets_dir is not None and self.port is None:
            raise ConfigurationError("a folder of metrics targets needs a metrics port: 0 takes a free one")
        try:
            ipaddress.IPv4Network(self.network or "127.0.0.1", strict=False)
        except ValueError as error:
            raise ConfigurationError(
                f"metrics network is {printable(self.network)}: give an IPv4 network such as 10.1.0.0/16, or an address"
            ) from error
        if self.pushgateway is not None:
            _check_address(self.pushgateway)


def _check_address(url: str) -> None:
    """Refuse an address that cannot be a pushgateway's, or that holds a password, which would stand in messages."""
    try:
        parts = urlsplit(url)
        is_host = (parts.hostname or "").encode("idna") and parts.port != 0
        is_good = parts.scheme in {"http", "https"} and is_host and parts.path.isascii()
    except ValueError:
        is_good = False
    if not is_good or parts.query or parts.fragment or url != printable(url) or " " in url:
        raise ConfigurationError("pushgateway: this is no http:// or https:// address, such as http://gateway:9091")
    if "@" in parts.netloc:
        raise ConfigurationError("pushgateway: an address with a user name or password in it cannot be used")


def metrics_options(monitoring: Monitoring | None = None) -> MetricsOptions:
    """
    Return where metrics go; what *monitoring* leaves open is read from the environment, else ConfigurationError.

    A folder of targets alone, as a whole machine may have it in the environment, takes a free port.
    """
    asked = monitoring or Monitoring()
    found = {one.path[-1]: os.environ.get(one.knob.env, "") for one in settings_of(Monitoring) if one.knob.env}
    # a run that asks to push is not found as well: every sum would count it twice
    targets = asked.metrics_targets or ("" if asked.pushgateway else found["metrics_targets"])
    port = _port(found["metrics_port"]) if asked.metrics_port is None else asked.metrics_port
    return MetricsOptions(
        port=0 if port is None and targets else port,
        targets_dir=str(Path(targets).absolute()) if targets else None,
        network=asked.metrics_network or found["metrics_network"],
        textfiles_dir=str(Path(textfiles).absolute()) if (textfiles := os.environ.get(TEXTFILES)) else None,
        pushgateway=asked.pushgateway or found["pushgateway"] or None,
    )


def _port(text: str) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdigit()):
        raise ConfigurationError(f"VIRNUCPRO_METRICS_PORT is {printable(text)}: it must be from 0 to {MOST_PORT}")
    return int(text)
