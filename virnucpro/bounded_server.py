"""An HTTP server that serves a bounded number of clients at once, and refuses the others instead of queueing them."""

from __future__ import annotations

import socketserver
import sys
import threading
from http.server import ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from http.server import BaseHTTPRequestHandler


class BoundedServer(ThreadingHTTPServer):
    """
    Serves at most *most_clients* at once, each in a daemon thread.

    Raises:
        OSError: The address is in use, unknown or not permitted.
    """

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], *, most_clients: int) -> None:
        self.request_queue_size = most_clients
        self._places = threading.BoundedSemaphore(most_clients)
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind without the parent's reverse DNS look-up, which may block."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve in a thread, or close the connection when all places are taken."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect or time out; anything else is our fault."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)
