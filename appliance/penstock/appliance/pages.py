"""What a coordinator shows to browsers and collectors: a dict of routes for penstock.proto.web.

Routes run on threads of the web server, and the books belong to the event loop: so a route never touches them. It asks
the loop for a status, waits for it with a deadline, and makes its page of that on its own thread. However many look at
once, there is one status under way; and one that is younger than FRESH_S serves whoever asks next.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from penstock.proto.addresses import is_local
from penstock.proto.errors import PortTakenError
from penstock.proto.tls import Tls
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.web import Page, Route, WebServer

__all__ = ["Pages", "open_web"]

log = logging.getLogger("penstock.appliance")

FRESH_S = 0.5
"""A page made less than this ago is served again."""
LOOP_S = 10.0
"""The event loop may take so long for a status. It never does but on a machine that is far behind; then the page says
so, and nobody's thread is kept for ever."""
JSON = "application/json"


class Board(Protocol):
    """What a coordinator shows; the service is one."""

    async def snapshot(self) -> pb.StatusReply:
        """Called on the event loop."""


class Pages:
    """
    Args:
        board: what is shown.
        loop: its event loop.
    """

    def __init__(self, board: Board, loop: asyncio.AbstractEventLoop) -> None:
        self._board, self._loop = board, loop
        self.routes: dict[str, Route] = {"/api/status.json": Shared(self._status)}
        """Path -> page; metrics and others are added before the server starts."""

    def snapshot(self) -> pb.StatusReply:
        """A status, for routes. Raises TimeoutError where the loop has no time for it."""
        future = asyncio.run_coroutine_threadsafe(self._board.snapshot(), self._loop)
        try:
            return future.result(LOOP_S)
        finally:
            future.cancel()

    def _status(self) -> Page:
        reply = self.snapshot()
        return Page(JSON, json.dumps({"version": reply.version, "uptime_s": reply.uptime_s}).encode())


class Shared:
    """A route whose page is made once for all who ask at the same time, or soon after."""

    def __init__(self, make: Callable[[], Page]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._page: Page | None = None
        self._made_at = 0.0

    def __call__(self) -> Page:
        with self._lock:  # who waits here gets the page that is being made
            if self._page is None or time.monotonic() - self._made_at > FRESH_S:
                self._page = self._make()
                self._made_at = time.monotonic()
            return self._page


def open_web(
    listen: str, routes: dict[str, Route], tokens: str, *, tls: Tls | None, insecure: bool, any_port: bool
) -> WebServer:
    """The web server of a coordinator, listening.

    `any_port`: takes a free port if that of `listen` is in use. Raises what WebServer raises.
    """
    # Nobody can listen on loopback but this machine's root, and a browser has no certificate of a cluster's to show.
    tls = None if is_local(listen) else tls
    try:
        web = WebServer(listen, routes, tokens=tokens, tls=tls, insecure=insecure)
    except PortTakenError:
        if not any_port:
            raise
        free = f"{listen.rpartition(':')[0]}:0"
        web = WebServer(free, routes, tokens=tokens, tls=tls, insecure=insecure)
        log.info("%s is in use, so the dashboard takes another port", listen)
    log.info("dashboard at %s", web.url)
    return web
