"""
Fetch a file of weights once: continued where it broke off, checked, made durable, then given its name.

What has come so far stays beside the destination, under a name that tells its URL and the server's ETag, so that the
next start asks for the rest of exactly that file (``Range`` with ``If-Range``); a server without a strong ETag is asked
for all of it again. One process fetches at a time, the others wait and find the file. Knows nothing of models beyond
what the weights are called.
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
MOST_BYTES = 1 << 37
"""Bytes that a file of weights may have unless the caller knows better."""
_READ_BYTES = 1 << 20
_MOST_ETAG_BYTES = 96
_LENGTH = re.compile(r"[0-9]{1,15}")
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
    most_bytes: int = MOST_BYTES,
    on_progress: DownloadProgress | None = None,
) -> str:
    """
    Fetch *url* to *destination*, whole or not at all.

    Args:
        name: The model, for messages.
        url: Where the weights are, http or https.
        destination: The final path; its folder exists.
        sha256: Hex digest that the file must have, where it is known.
        most_bytes: Bytes that it may have.
        on_progress: Called before the first byte and after each piece.

    Returns:
        The file's hex sha256.

    Raises:
        WeightsError: The server cannot be reached, or what it sent is not what was asked for.
        OutputError: The file cannot be written.
    """
    try:
        with _only_process(destination):
            if destination.is_file():  # fetched while we waited
                return durable.sha256_of(destination)
            return _Download(name, url, destination, most_bytes).fetch(sha256, on_progress)
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(destination, error.strerror or str(error)) from error


@contextmanager
def _only_process(destination: Path) -> Iterator[None]:
    """Wait until no other process fetches this file."""
    path = destination.with_name(f".{destination.name}.lock")
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                break
        os.close(descriptor)  # its holder removed it when it was done
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
        """Return the next request."""
        scheme = urllib.parse.urlsplit(newurl).scheme
        if scheme not in {"https", req.type}:
            what = f"{req.full_url} leads to {newurl}, which is not followed: {self._by_hand}"
            raise WeightsError(self._name, what)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _Download:
    """One file on its way."""

    def __init__(self, name: str, url: str, destination: Path, most_bytes: int) -> None:
        self.name = name
        self.url = url
        self.destination = destination
        self.most_bytes = most_bytes
        self.by_hand = f"fetch it elsewhere and put it into {destination.parent} as {destination.name}"
        self._of_url = f".{destination.name}.{hashlib.sha256(url.encode()).hexdigest()[:16]}"

    def fetch(self, sha256: str | None, on_progress: DownloadProgress | None) -> str:
        """Fetch what is missing; return the digest of the whole."""
        begun = self._begun()
        try:
            with self._answer(begun) as response:
                partial, is_rest = self._partial_of(response, begun)
                self._forget_all_but(partial)
                with durable.NewFile(partial, exists=is_rest) as file:
                    self._receive(response, file, on_progress)
                    file.sync()
            digest = durable.sha256_of(partial)
            if sha256 is not None and digest != sha256:
                self._forget_all_but(None)
                what = f"{self.url} gave a file with sha256 {digest} instead of {sha256}: nothing was kept"
                raise WeightsError(self.name, what)
            failpoints.reach("file.rename")
            partial.replace(self.destination)
            durable.sync_folder(self.destination.parent)
        finally:
            self._forget_what_cannot_go_on()
        return digest

    def _begun(self) -> Path | None:
        """Return what an earlier start has received, if it can be continued."""
        found = [path for path in self._partials() if path.name.startswith(self._of_url) and _etag_of(path)]
        return max(found, key=lambda path: path.stat().st_size, default=None)

    def _partials(self) -> list[Path]:
        return [path for path in self.destination.parent.glob(f".{self.destination.name}.*.partial") if path.is_file()]

    def _forget_all_but(self, kept: Path | None) -> None:
        for path in self._partials():
            if path != kept:
                durable.remove(path)

    def _forget_what_cannot_go_on(self) -> None:
        for path in self._partials():
            if not _etag_of(path) or path.stat().st_size == 0:
                with suppress(OutputError):
                    durable.remove(path)

    def _answer(self, begun: Path | None) -> http.client.HTTPResponse:
        """Ask for the file, or for the rest of it."""
        headers = {}
        if begun is not None:
            headers = {"Range": f"bytes={begun.stat().st_size}-", "If-Range": _etag_of(begun)}
        try:
            opener = urllib.request.build_opener(_WebRedirects(self.name, self.by_hand))
            request = urllib.request.Request(self.url, headers=headers)  # noqa: S310  a URL of our registry
            response: http.client.HTTPResponse = opener.open(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            if begun is not None and error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                self._forget_all_but(None)
                return self._answer(None)
            raise WeightsError(self.name, f"{self.url} answers {error.code} {error.reason}: {self.by_hand}") from error
        except urllib.error.URLError as error:
            raise WeightsError(self.name, f"{self.url} cannot be reached ({error.reason}): {self.by_hand}") from error
        except (http.client.HTTPException, TimeoutError, ConnectionError) as error:
            raise self._broke_off(0, None, error) from error
        return response

    def _partial_of(self, response: http.client.HTTPResponse, begun: Path | None) -> tuple[Path, bool]:
        """Return where the answer belongs, and whether it is the rest of what is there."""
        etag = response.headers.get("ETag") or ""
        is_strong = etag.startswith('"') and len(etag) <= _MOST_ETAG_BYTES
        code = base64.urlsafe_b64encode(etag.encode("latin-1", "replace")).decode() if is_strong else ""
        partial = self.destination.with_name(f"{self._of_url}.{code}.partial")
        if response.status == http.HTTPStatus.PARTIAL_CONTENT:
            sent = response.headers.get("Content-Range", "")
            if partial == begun and sent.startswith(f"bytes {begun.stat().st_size}-"):
                return partial, True
            self._forget_all_but(None)
            raise WeightsError(self.name, f"{self.url} sent a part that was not asked for ({sent!r}): try again")
        durable.remove(partial)
        return partial, False

    def _receive(
        self, response: http.client.HTTPResponse, file: durable.NewFile, on_progress: DownloadProgress | None
    ) -> None:
        """Write the answer, checked for its kind at the start and for its length at the end."""
        num_bytes = os.fstat(file.fileno()).st_size
        announced = response.headers["Content-Length"]
        if announced is not None and not _LENGTH.fullmatch(announced):
            what = f"{self.url} announces a length of {announced[:_MOST_ETAG_BYTES]!r}: {self.by_hand}"
            raise WeightsError(self.name, what)
        expected = None if announced is None else num_bytes + int(announced)
        self._check_size(expected or 0)
        if on_progress is not None:
            on_progress(num_bytes, expected)
        try:
            while piece := response.read(_READ_BYTES):
                if num_bytes == 0 and not piece.startswith(_MAGICS):
                    os.ftruncate(file.fileno(), 0)
                    raise WeightsError(self.name, f"{self.url} is not a PyTorch checkpoint: {self.by_hand}")
                num_bytes += len(piece)
                self._check_size(num_bytes)
                file.write(piece)
                if on_progress is not None:
                    on_progress(num_bytes, expected)
        except (http.client.HTTPException, TimeoutError, ConnectionError) as error:
            raise self._broke_off(num_bytes, expected, error) from error
        if num_bytes == 0 or (expected is not None and num_bytes != expected):
            raise self._broke_off(num_bytes, expected, None)

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self.most_bytes:
            self._forget_all_but(None)
            most = f"the {self.most_bytes:,} bytes that these weights can have"
            raise WeightsError(self.name, f"{self.url} sends more than {most}: nothing was kept")

    def _broke_off(self, num_bytes: int, expected: int | None, error: Exception | None) -> WeightsError:
        how_far = f"{num_bytes:,} bytes" if expected is None else f"{num_bytes:,} of {expected:,} bytes"
        why = "" if error is None else f" ({error or type(error).__name__})"
        return WeightsError(self.name, f"{self.url} broke off after {how_far}{why}: try again, or {self.by_hand}")


def _etag_of(partial: Path) -> str:
    """Return the ETag in a partial file's name, or an empty text."""
    code = partial.name.removesuffix(".partial").rpartition(".")[2]
    try:
        return base64.urlsafe_b64decode(code.encode()).decode("latin-1")
    except ValueError:
        return ""
