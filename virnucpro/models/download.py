"""
Downloads a file of weights once: resumed after an interruption, checked, made durable, then given its name.

A partial file stays beside the destination, named by the URL and the server's ETag; the next attempt requests the rest
of exactly that file (``Range`` with ``If-Range``). Without a strong ETag the download restarts. One process downloads
at a time; other processes wait and find the file.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import http.client
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

from virnucpro import durable, failpoints
from virnucpro.errors import OutputError, WeightsError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TIMEOUT_S = 30.0
"""Seconds without a byte after which a server counts as gone."""
MAX_BYTES = 1 << 37
"""Default limit for a file of weights, bytes."""
_READ_BYTES = 1 << 20
_MAX_ETAG_BYTES = 96
_LENGTH = re.compile(r"[0-9]{1,15}")
_MAGICS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")  # zip, and pickle protocols 2 to 5
_FIRST_BYTES = 9  # of safetensors: the length of its JSON header, and the header's first character
_MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors itself


class DownloadProgress(Protocol):
    def __call__(self, bytes_done: int, bytes_total: int | None, /) -> None:
        """*bytes_total* is None where the server does not state it."""


def download_weights(
    name: str,
    url: str,
    destination: Path,
    *,
    sha256: str | None = None,
    max_bytes: int = MAX_BYTES,
    on_progress: DownloadProgress | None = None,
) -> str:
    """
    Download *url* to *destination*, complete or not at all; return the file's hex sha256.

    Args:
        name: The model, for messages.
        destination: The final path; its folder exists.
        on_progress: Called before the first byte and after each block.
    """
    with durable.writing(destination), _only_process(destination):
        if destination.is_file():  # another process downloaded it
            return durable.sha256_of(destination)
        return _Download(name, url, destination, max_bytes).fetch(sha256, on_progress)


@contextmanager
def _only_process(destination: Path) -> Iterator[None]:
    """Wait until no other process downloads this file."""
    path = destination.with_name(f".{destination.name}.lock")
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                break
        os.close(descriptor)  # its owner has removed it
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


class _WebRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to http and https only, and from https to https only."""

    def __init__(self, name: str, by_hand: str) -> None:
        self._name, self._by_hand = name, by_hand

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        scheme = urllib.parse.urlsplit(newurl).scheme
        if scheme not in {"https", req.type}:
            raise WeightsError(self._name, f"{req.full_url} leads to {newurl}, which is not followed: {self._by_hand}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _Download:
    def __init__(self, name: str, url: str, destination: Path, max_bytes: int) -> None:
        self.name = name
        self.url = url
        self.destination = destination
        self.max_bytes = max_bytes
        self.by_hand = f"fetch it elsewhere and put it into {destination.parent} as {destination.name}"
        self._prefix = f".{destination.name}.{hashlib.sha256(url.encode()).hexdigest()[:16]}"

    def fetch(self, sha256: str | None, on_progress: DownloadProgress | None) -> str:
        earlier = self._resumable()
        try:
            with self._request(earlier) as response:
                partial, is_rest = self._partial_of(response, earlier)
                self._remove_all_but(partial)
                with durable.NewFile(partial, exists=is_rest) as file:
                    self._receive(response, file, on_progress)
                    file.sync()
            digest = durable.sha256_of(partial)
            if sha256 is not None and digest != sha256:
                self._remove_all_but(None)
                what = f"{self.url} gave a file with sha256 {digest} instead of {sha256}: nothing was kept"
                raise WeightsError(self.name, what)
            failpoints.reach("file.rename")
            partial.replace(self.destination)
            durable.sync_folder(self.destination.parent)
        finally:
            self._remove_unresumable()
        return digest

    def _resumable(self) -> Path | None:
        """Return the partial file of an earlier attempt, if it can be resumed."""
        found = [path for path in self._partials() if path.name.startswith(self._prefix) and _etag_of(path)]
        return max(found, key=lambda path: path.stat().st_size, default=None)

    def _partials(self) -> list[Path]:
        return [path for path in self.destination.parent.glob(f".{self.destination.name}.*.partial") if path.is_file()]

    def _remove_all_but(self, kept: Path | None) -> None:
        for path in self._partials():
            if path != kept:
                durable.remove(path)

    def _remove_unresumable(self) -> None:
        for path in self._partials():
            if not _etag_of(path) or path.stat().st_size == 0:
                with suppress(OutputError):
                    durable.remove(path)

    def _request(self, earlier: Path | None) -> http.client.HTTPResponse:
        headers = {}
        if earlier is not None:
            headers = {"Range": f"bytes={earlier.stat().st_size}-", "If-Range": _etag_of(earlier)}
        try:
            opener = urllib.request.build_opener(_WebRedirects(self.name, self.by_hand))
            request = urllib.request.Request(self.url, headers=headers)  # noqa: S310  a URL of our registry
            response: http.client.HTTPResponse = opener.open(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            if earlier is not None and error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                self._remove_all_but(None)
                return self._request(None)
            raise WeightsError(self.name, f"{self.url} answers {error.code} {error.reason}: {self.by_hand}") from error
        except urllib.error.URLError as error:
            raise WeightsError(self.name, f"{self.url} cannot be reached ({error.reason}): {self.by_hand}") from error
        except (http.client.HTTPException, TimeoutError, ConnectionError) as error:
            raise self._interrupted(0, None, error) from error
        return response

    def _partial_of(self, response: http.client.HTTPResponse, earlier: Path | None) -> tuple[Path, bool]:
        """Return the partial file for the response, and whether the response is the rest of it."""
        etag = response.headers.get("ETag") or ""
        is_strong = etag.startswith('"') and len(etag) <= _MAX_ETAG_BYTES
        code = base64.urlsafe_b64encode(etag.encode("latin-1", "replace")).decode() if is_strong else ""
        partial = self.destination.with_name(f"{self._prefix}.{code}.partial")
        if response.status == http.HTTPStatus.PARTIAL_CONTENT:
            sent = response.headers.get("Content-Range", "")
            if partial == earlier and sent.startswith(f"bytes {earlier.stat().st_size}-"):
                return partial, True
            self._remove_all_but(None)
            raise WeightsError(self.name, f"{self.url} sent another range than requested ({sent!r}): retry")
        durable.remove(partial)
        return partial, False

    def _receive(
        self, response: http.client.HTTPResponse, file: durable.NewFile, on_progress: DownloadProgress | None
    ) -> None:
        """Write the response; its first bytes and its length are checked."""
        num_bytes = os.fstat(file.fileno()).st_size
        announced = response.headers["Content-Length"]
        if announced is not None and not _LENGTH.fullmatch(announced):
            what = f"{self.url} announces a length of {announced[:_MAX_ETAG_BYTES]!r}: {self.by_hand}"
            raise WeightsError(self.name, what)
        expected = None if announced is None else num_bytes + int(announced)
        self._check_size(expected or 0)
        if on_progress is not None:
            on_progress(num_bytes, expected)
        try:
            while piece := response.read(_READ_BYTES):
                if num_bytes == 0 and len(piece) < min(_FIRST_BYTES, expected or 0):
                    break  # too few to be recognised, so none is kept
                if num_bytes == 0 and not _begins_weights(piece, expected):
                    raise WeightsError(self.name, f"{self.url} is no PyTorch checkpoint or safetensors: {self.by_hand}")
                num_bytes += len(piece)
                self._check_size(num_bytes)
                file.write(piece)
                if on_progress is not None:
                    on_progress(num_bytes, expected)
        except (http.client.HTTPException, TimeoutError, ConnectionError) as error:
            raise self._interrupted(num_bytes, expected, error) from error
        if num_bytes == 0 or (expected is not None and num_bytes != expected):
            raise self._interrupted(num_bytes, expected, None)

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self.max_bytes:
            self._remove_all_but(None)
            most = f"the {self.max_bytes:,} bytes that these weights can have"
            raise WeightsError(self.name, f"{self.url} sends more than {most}: nothing was kept")

    def _interrupted(self, num_bytes: int, expected: int | None, error: Exception | None) -> WeightsError:
        how_far = f"{num_bytes:,} bytes" if expected is None else f"{num_bytes:,} of {expected:,} bytes"
        why = "" if error is None else f" ({error or type(error).__name__})"
        return WeightsError(self.name, f"{self.url} stopped after {how_far}{why}: retry, or {self.by_hand}")


def _begins_weights(first: bytes, num_bytes: int | None) -> bool:
    """Whether a file of *num_bytes* (None: unknown) that begins so can be a PyTorch checkpoint or safetensors."""
    most = min(_MAX_HEADER_BYTES, (num_bytes or MAX_BYTES) - 8)
    is_safetensors = first[8:_FIRST_BYTES] == b"{" and 2 <= int.from_bytes(first[:8], "little") <= most
    return is_safetensors or first.startswith(_MAGICS)


def _etag_of(partial: Path) -> str:
    """Return the ETag in a partial file's name, or an empty text."""
    code = partial.name.removesuffix(".partial").rpartition(".")[2]
    try:
        return base64.urlsafe_b64decode(code.encode()).decode("latin-1")
    except ValueError:
        return ""
