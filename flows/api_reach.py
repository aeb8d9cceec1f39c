"""Whether a host of a cluster reaches the Prefect API, to which the tasks of a run report: asked before they begin."""

import ssl
import urllib.error
import urllib.request

from virnucpro.errors import ConfigurationError, printable
from virnucpro.this_host import host_name

API_ANSWERS_S = 5.0
"""Seconds that the API has to answer."""


def check_api_reached(url: str) -> None:
    """
    Check that the API answers here, whatever it says.

    Args:
        url: Of the API, as the driver uses it.

    Raises:
        ConfigurationError: It does not; names this host.
    """
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=API_ANSWERS_S):  # noqa: S310  a person has set it
            return
    except urllib.error.HTTPError:  # it wants a password, which the tasks have
        return
    except OSError as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):  # its certificate is for Prefect's own settings to judge
            return
        raise ConfigurationError(
            f"host {host_name()} does not reach the Prefect API at {printable(url)} ({printable(str(reason))}): start "
            "a server that every host reaches, and set PREFECT_API_URL to its address in the network"
        ) from error
