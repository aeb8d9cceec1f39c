"""
A read-only HTTP server for reports: GET and HEAD, one request a connection, bounded in size, time and clients.

Files are looked up here, as `http.server`'s own handler follows links and lists folders. There is no password: that is
the proxy's (`deployments/proxy`).
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import PurePath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from virnucpro.bounded_server import BoundedHandler, BoundedServer
from virnucpro.report.html_page import fill
from virnucpro.report.served_files import FoundReport, NotServedError

if TYPE_CHECKING:
    from virnucpro.report.served_files import ServedFiles

MOST_CLIENTS = 64
CHUNK_BYTES = 256 << 10
CHUNK_S = 15.0
"""Seconds that a client has to take ``CHUNK_BYTES`` of an answer."""

# The report's own policy allows its script by its hash. This one comes with every file, forged ones too: the
# page has no origin, so it cannot act as its reader at Prefect's page of the same address, and it reaches no network.
POLICY = (
    "sandbox allow-scripts allow-downloads; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "private, no-cache",
}
_PAGE, _TEXT = "text/html; charset=utf-8", "text/plain; charset=utf-8"
_SHOWN = {".html": _PAGE, ".json": "application/json", ".md": _TEXT}
"""Suffix -> content type of files that browsers show; others are saved."""


class ReportServer(BoundedServer):
    """
    Serves *files* at ``http://HOST:PORT/ABSOLUTE/PATH/report.html``, and a list of the newest at ``/``.

    Args:
        port: 0 takes a free one; it is then ``server_port``.

    Raises:
        OSError: The address is in use, unknown or not permitted.
    """

    def __init__(self, files: ServedFiles, host: str, port: int) -> None:
        self.files = files
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler, most_clients=MOST_CLIENTS)


class _Handler(BoundedHandler):
    server: ReportServer
    server_version, sys_version = "virnucpro", ""
    default_request_version = "HTTP/1.0"  # an answer to HTTP/0.9 would have no headers, so no policy

    def do_GET(self) -> None:  # noqa: N802  the base class's name
        path = self.path.partition("?")[0]
        if self.is_misdirected():
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST, "This server is for its own machine, or behind its proxy.")
        elif path == "/health":
            self._send(HTTPStatus.OK, _TEXT, b"ok\n")
        elif path == "/":
            self._send(HTTPStatus.OK, _PAGE, _list_page(*self.server.files.newest()))
        else:
            self._send_file(path)

    do_HEAD = do_GET

    def _send_file(self, path: str) -> None:
        try:
            descriptor, name = self.server.files.open(path)
        except NotServedError as why:
            self.log_error("%s", why)
            self.send_error(HTTPStatus.NOT_FOUND, "There is no report here.")
            return
        with os.fdopen(descriptor, "rb") as file:
            left = os.fstat(descriptor).st_size
            kind = _SHOWN.get(PurePath(name).suffix)
            more = {} if kind else {"Content-Disposition": f"attachment; filename={name}"}
            self._begin(HTTPStatus.OK, kind or "application/octet-stream", left, more)
            while self.command != "HEAD" and left > 0 and (chunk := file.read(min(left, CHUNK_BYTES))):
                self._write(chunk)
                left -= len(chunk)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer with one line of text; a method that there is not is one that is not allowed."""
        status = HTTPStatus(code)
        if status is HTTPStatus.NOT_IMPLEMENTED:
            status, message = HTTPStatus.METHOD_NOT_ALLOWED, "Only GET and HEAD."
        self.close_connection = True
        self._send(status, _TEXT, f"{explain or message or status.phrase}\n".encode())

    def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self._begin(status, kind, len(content), {"Allow": "GET, HEAD"} if status == 405 else {})
        if self.command != "HEAD":
            self._write(content)

    def _begin(self, status: HTTPStatus, kind: str, size: int, more: dict[str, str]) -> None:
        self.connection.settimeout(CHUNK_S)
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(size), **more}.items():
            self.send_header(name, value)
        self.end_headers()

    def _write(self, content: bytes) -> None:
        self.connection.settimeout(CHUNK_S)  # for all of it: `sendall` does not begin anew with each byte that is taken
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class's name
        with suppress(OSError):  # standard error may be closed
            super().log_message(format, *args)


def _list_page(reports: list[FoundReport], is_whole: bool) -> bytes:
    rows = [
        (
            datetime.fromtimestamp(report.changed, UTC).strftime("%Y-%m-%d %H:%M"),
            # relative, as the server may be below a folder of a proxy; with ./, as a name may hold a colon
            (os.fsencode(report.path).decode(errors="replace"), f"./{quote(os.fsencode(report.path[1:]))}"),
        )
        for report in reports
    ]
    return fill("reports.html", rows=rows, is_whole=is_whole)
