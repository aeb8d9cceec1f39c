"""An HTTP server with a bounded number of clients, and requests bounded in bytes and time."""

from __future__ import annotations

import io
import socket
import socketserver
import sys
import threading
import time
from contextlib import suppress
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

REQUEST_S = 10.0
"""Seconds that a client has to send its request, and again to take an answer that is written at once."""
MOST_REQUEST_BYTES = 100_000


class BoundedServer(ThreadingHTTPServer):
    """
    Serves at most *most_clients* at once, each in a daemon thread; the oldest without a whole request makes room.

    Raises:
        OSError: The address is in use, unknown or not permitted.
    """

    def __init__(self, address: tuple[str, int], handler: type[BoundedHandler], *, most_clients: int) -> None:
        self.request_queue_size = most_clients
        self._places = threading.BoundedSemaphore(most_clients)
        self.unread: dict[Any, None] = {}
        """Connections whose requests have not come yet, the oldest first."""
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind without the parent's reverse DNS look-up, which may block."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.is_local = ip_address(self.server_name).is_loopback

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve in a thread, or close the connection where no place becomes free."""
        is_free = self._places.acquire(blocking=False)
        for oldest in [] if is_free else list(self.unread)[:1]:
            with suppress(OSError):  # it has gone
                oldest.shutdown(socket.SHUT_RDWR)
            is_free = self._places.acquire(timeout=1.0)  # until its thread has ended
        if is_free:
            self.unread[request] = None
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.unread.pop(request, None)
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect or time out; anything else is our fault."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class BoundedHandler(BaseHTTPRequestHandler):
    """Takes one request, which comes within ``REQUEST_S`` and has at most ``MOST_REQUEST_BYTES``."""

    server: BoundedServer

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_Request(self.connection))

    def parse_request(self) -> bool:
        is_sound = super().parse_request()
        self.server.unread.pop(self.connection, None)
        self.connection.settimeout(REQUEST_S)
        return is_sound

    def is_misdirected(self) -> bool:
        """Whether a server of this machine alone is called by another name: a page elsewhere whose name leads here."""
        try:
            name = urlsplit(f"//{self.headers.get('Host', '')}").hostname
            is_ours = name == "localhost" or ip_address(name or "").is_loopback
        except ValueError:
            is_ours = False
        return self.server.is_local and not is_ours


class _Request(io.RawIOBase):
    """The bytes of a request, as long as they are few and come in time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._deadline_s = time.monotonic() + REQUEST_S
        self._bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._bytes > MOST_REQUEST_BYTES:
            raise HTTPException("the request is too large")
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the request took too long")
        self._connection.settimeout(left_s)
        taken = self._connection.recv_into(buffer)
        self._bytes += taken
        return taken
