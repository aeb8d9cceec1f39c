"""Checks that a host of a cluster reaches the Prefect API, before its tasks begin."""

import ssl
import urllib.error
import urllib.request

from virnucpro.errors import ConfigurationError, printable
from virnucpro.this_host import host_name

API_ANSWERS_S = 5.0
"""Seconds to wait for an answer."""


def check_api_reached(url: str) -> None:
    """Check that the API at *url* answers this host, with any status."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=API_ANSWERS_S):  # noqa: S310  set by the operator
            return
    except urllib.error.HTTPError:  # it needs a password, which the tasks have
        return
    except OSError as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):  # Prefect's own settings decide on the certificate
            return
        raise ConfigurationError(
            f"host {host_name()} does not reach the Prefect API at {printable(url)} ({printable(str(reason))}): start "
            "a server that every host reaches, and set PREFECT_API_URL to its address in the network"
        ) from error
