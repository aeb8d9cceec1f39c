"""
Fetch a file of weights once: to a temporary name of our own, checked, made durable, then renamed.

Any number of processes may fetch the same file at the same time: each has its own temporary file, and the name only
ever stands for a whole one. Knows nothing of models beyond what the weights are called.
"""

from __future__ import annotations

import hashlib
import http.client
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Protocol

from virnucpro import durable
from virnucpro.errors import WeightsError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TIMEOUT_S = 30.0
"""Seconds without a byte after which a server counts as gone."""
_READ_BYTES = 1 << 20
_MAGICS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")  # zip, and pickle protocols 2 to 5


class DownloadProgress(Protocol):
    """What is told how far a download is."""

    def __call__(self, bytes_done: int, bytes_total: int | None, /) -> None:
        """Take note; *bytes_total* is None where the server does not say."""


def download_weights(
    name: str,
    url: str,
    destination: Path,
    *,
    sha256: str | None = None,
    on_progress: DownloadProgress | None = None,
) -> str:
    """
    Fetch *url* to *destination*, whole or not at all.

    Args:
        name: The model, for messages.
        url: Where the weights are, http or https.
        destination: The final path; its folder exists.
        sha256: Hex digest that the file must have, where it is known.
        on_progress: Called before the first byte and after each piece.

    Returns:
        The file's hex sha256.

    Raises:
        WeightsError: The server cannot be reached, or what it sent is not what was asked for.
        OutputError: The file cannot be written.
    """
    digest = hashlib.sha256()
    with durable.replacing(destination) as file:
        for piece in _pieces(name, url, destination, on_progress):
            digest.update(piece)
            file.write(piece)
        if sha256 is not None and digest.hexdigest() != sha256:
            what = f"{url} gave a file with sha256 {digest.hexdigest()} instead of {sha256}: nothing was kept"
            raise WeightsError(name, what)
    return digest.hexdigest()


def _pieces(name: str, url: str, destination: Path, on_progress: DownloadProgress | None) -> Iterator[bytes]:
    """Yield the body of *url*, checked for its kind at the start and for its length at the end."""
    by_hand = f"fetch it elsewhere and put it into {destination.parent} as {destination.name}"
    num_bytes, expected = 0, None
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:  # noqa: S310  a URL of our registry
            if response.headers["Content-Length"] is not None:
                expected = int(response.headers["Content-Length"])
            if on_progress is not None:
                on_progress(0, expected)
            while piece := response.read(_READ_BYTES):
                if num_bytes == 0 and not piece.startswith(_MAGICS):
                    raise WeightsError(name, f"{url} is not a PyTorch checkpoint: {by_hand}")
                num_bytes += len(piece)
                yield piece
                if on_progress is not None:
                    on_progress(num_bytes, expected)
    except urllib.error.HTTPError as error:
        raise WeightsError(name, f"{url} answers {error.code} {error.reason}: {by_hand}") from error
    except urllib.error.URLError as error:
        raise WeightsError(name, f"{url} cannot be reached ({error.reason}): {by_hand}") from error
    except (http.client.HTTPException, TimeoutError, ConnectionError) as error:
        what = f"{url} broke off after {num_bytes:,} bytes ({error or type(error).__name__}): try again, or {by_hand}"
        raise WeightsError(name, what) from error
    if num_bytes == 0 or (expected is not None and num_bytes != expected):
        what = f"{url} broke off after {num_bytes:,} of {expected or 0:,} bytes: try again, or {by_hand}"
        raise WeightsError(name, what)
