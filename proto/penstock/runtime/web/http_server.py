"""Small, read-only web server for pages about a process: for a browser, or for a program that collects metrics.

Routes take no arguments from the request, so that it cannot inject any, and run on a thread of the server. On loopback
every user of this machine has access, but the request must have this machine's host name, so that a web site cannot
reach the pages through the browser (DNS rebinding). Beyond, every page needs a token of the role admin, as a bearer
token or as the password in the browser's dialogue, and TLS, unless `insecure` states that the network is trusted."""

from __future__ import annotations

import base64
import binascii
import errno
import io
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from penstock.proto.errors import InvalidArgumentError, PortTakenError
from penstock.proto.rpc.addresses import check_address, is_local, refuse_unsafe, socket_path
from penstock.proto.rpc.credentials.tokens import Tokens
from penstock.proto.rpc.tls import Renewing, Tls, host_of

_log = logging.getLogger("penstock.web")

REQUEST_S = 10.0
"""Longest time in seconds for receiving a request, and for sending the reply."""
AT_ONCE = 64
"""Largest number of requests at a time. Further connections are closed at once."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class Page:
    content_type: str
    body: bytes
    status: int = 200


Route = Callable[[], Page]


class WebServer:
    """Web server for the pages in `routes`. It runs, on threads of its own, from its construction until `close`.

    `listen`: "host:port"; port 0 takes a free one. `routes`: path -> function that returns the page. `tokens`: ignored
    on loopback. `tls`: if it holds a CA, callers must show certificates. `insecure`: allow an address that other
    machines can reach, without TLS. Raises InvalidArgumentError, UnsafeBindError, PortTakenError, TlsError, and
    AuthenticationError if there is no token beyond loopback."""

    def __init__(
        self,
        listen: str,
        routes: Mapping[str, Route],
        *,
        tokens: str = "",
        tls: Tls | None = None,
        insecure: bool = False,
    ) -> None:
        check_address(listen)
        if socket_path(listen) is not None:
            raise InvalidArgumentError(f"the address of web pages must be HOST:PORT, got {listen}")
        refuse_unsafe(listen, encrypted=tls is not None, insecure=insecure)
        files = None if tls is None else Renewing(tls.for_server())
        access = _AccessCheck(None if is_local(listen) else Tokens(tokens))
        host, port = host_of(listen)
        try:
            self._server = _Server((host, port), routes, access, files)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortTakenError(f"{listen} is in use: choose another port, or 0 for any free one") from error
            raise InvalidArgumentError(f"cannot listen on {listen}: {error.strerror}. Name another address") from error
        self.address = f"{listen.rpartition(':')[0]}:{self._server.server_address[1]}"
        self.url = f"{'https' if files else 'http'}://{self.address}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(None,), name="penstock-web", daemon=True
        )
        self._thread.start()
        _listening.add(self._server)

    def close(self) -> None:
        """Stop listening. Requests that are being answered are not interrupted."""
        # The thread sleeps until a connection arrives or the socket is shut down, so that it need not poll.
        self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        _listening.discard(self._server)


_listening: weakref.WeakSet[_Server] = weakref.WeakSet()


def _leave_to_the_parent() -> None:
    """Close the servers' sockets in a forked child, which has no threads to reply: clients would wait forever."""
    for server in list(_listening):
        server.socket.close()
    _listening.clear()


os.register_at_fork(after_in_child=_leave_to_the_parent)


class _AccessCheck:
    def __init__(self, tokens: Tokens | None) -> None:
        """`tokens`: None on loopback, where the host name is checked instead."""
        self._tokens = tokens

    def refuses(self, headers: Message) -> HTTPStatus | None:
        """HTTP status with which a request is refused; None if it may read the page."""
        if len(headers.get_all("Host", ())) > 1:  # a proxy may have checked another one of them
            return HTTPStatus.BAD_REQUEST
        if self._tokens is None:
            try:
                host = urlsplit(f"//{headers.get('Host') or ''}").hostname or ""
            except ValueError:
                return HTTPStatus.FORBIDDEN
            return None if is_local(f"{host}:0") else HTTPStatus.FORBIDDEN
        self._tokens.renew()
        shown = _shown(headers.get("Authorization") or "")
        return None if "admin" in self._tokens.roles_of(shown) else HTTPStatus.UNAUTHORIZED


def _shown(authorization: str) -> str:
    """Token in an Authorization header: a bearer token, or the password of the browser's dialogue."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return ""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 2 * AT_ONCE
    """Connections that may wait to be accepted. With Python's default of 5, more would retry after a second."""

    def __init__(
        self, address: tuple[str, int], routes: Mapping[str, Route], access: _AccessCheck, files: Renewing | None
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.routes, self.access, self._files = routes, access, files
        self._context = files.tls.server_context() if files is not None else None
        self._room = threading.BoundedSemaphore(AT_ONCE)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Do the TLS handshake on the thread of this request, so that a slow one does not delay other requests."""
        request.settimeout(REQUEST_S)
        if self._files is None or self._context is None:
            super().finish_request(request, client_address)
            return
        if self._files.renew():
            self._context = self._files.tls.server_context()
        with self._context.wrap_socket(request, server_side=True) as encrypted:
            super().finish_request(encrypted, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a request of %s failed", client_address, exc_info=True)


class _Patient(io.RawIOBase):
    """Reader of a socket. All its reads together must end within REQUEST_S seconds."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._until = sock, time.monotonic() + REQUEST_S

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(max(0.001, self._until - time.monotonic()))
        return self._sock.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "Penstock", ""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_Patient(self.connection))

    def version_string(self) -> str:
        return self.server_version

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        refused = self.server.access.refuses(self.headers)
        self.connection.settimeout(REQUEST_S)
        page = self._plain(refused) if refused is not None else self._page()
        self.send_response(page.status)
        if refused is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", 'Basic realm="Penstock: the token is the password"')
        for name, value in {**_HEADERS, "Content-Type": page.content_type}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(page.body)))
        self.end_headers()
        if with_body:
            self.wfile.write(page.body)

    def _page(self) -> Page:
        route = self.server.routes.get(self.path.partition("?")[0])
        if route is None:
            return self._plain(HTTPStatus.NOT_FOUND)
        try:
            return route()
        except Exception:
            _log.exception("the page %s cannot be made", self.path)
            return self._plain(HTTPStatus.INTERNAL_SERVER_ERROR)

    @staticmethod
    def _plain(status: HTTPStatus) -> Page:
        return Page("text/plain; charset=utf-8", f"{status.value} {status.phrase}\n".encode(), status.value)

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)
