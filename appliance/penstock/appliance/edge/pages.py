"""What a coordinator shows to browsers and collectors: a dict of routes for penstock.runtime.web.http_server.

Routes run on threads of the web server, and the cluster state belongs to the event loop: so a route never touches them.
It asks the loop for what it shows, waits for that with a deadline, and makes its page of it on its own thread. However
many look at once, there is one status under way; and a page that is younger than FRESH_S serves whoever asks next. So
what viewers cost the loop does not grow with their number.

The dashboard itself is three files beside this module, served as they are: no build, no framework, nothing from
elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from importlib.resources import files
from typing import Any, Protocol, TypeVar

from penstock.appliance.edge.run_series import RunSeries
from penstock.appliance.model.entities import Attempt
from penstock.proto.errors import PortTakenError
from penstock.proto.rpc.addresses import is_local
from penstock.proto.rpc.tls import Tls
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.runtime.telemetry.cluster_status import as_dict
from penstock.runtime.web.http_server import Page, Route, WebServer

__all__ = ["DashboardPages", "open_web"]

log = logging.getLogger("penstock.appliance")

FRESH_S = 0.5
"""A page made less than this ago is served again."""
LOOP_S = 10.0
"""The event loop may take so long for what a page shows. It never does but on a machine that is far behind; then the
page says so, and nobody's thread is kept for ever."""
SAMPLE_S = 1.0
JSON = "application/json"
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/dashboard.css": ("dashboard.css", "text/css; charset=utf-8"),
    "/dashboard.js": ("dashboard.js", "text/javascript; charset=utf-8"),
}

_Result = TypeVar("_Result")


class StatusSource(Protocol):
    """What a coordinator shows; the service is one. Called on the event loop."""

    async def snapshot(self) -> pb.StatusReply:
        """Everything that an operator may see, as it is now."""

    def attempts(self) -> list[Attempt]:
        """Those that are open."""


class DashboardPages:
    """
    Args:
        board: what is shown.
        loop: its event loop.
    """

    def __init__(self, board: StatusSource, loop: asyncio.AbstractEventLoop) -> None:
        self.address = ""
        """Of the coordinator, once it listens."""
        self._board, self._loop = board, loop
        self._series = RunSeries()
        self.routes: dict[str, Route] = {
            **{path: _file(name, content_type) for path, (name, content_type) in FILES.items()},
            "/api/status.json": SharedPage(self._status),
            "/api/history.json": SharedPage(self._history),
        }
        """Path -> page. Others may be added as long as the server has not started."""

    def on_loop(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """For routes: what a coroutine on the event loop returns. TimeoutError where the loop has no time for it, or
        has ended."""
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as error:
            work.close()
            raise TimeoutError("the event loop has ended") from error
        try:
            return future.result(LOOP_S)
        except CancelledError as error:
            raise TimeoutError("the event loop has ended") from error
        finally:
            future.cancel()

    async def sample(self) -> None:
        """Notes how fast the runs go, once a second; for ever."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            for _ in self._series.sample(self._board.attempts(), time.time()):
                await asyncio.sleep(0)

    def _status(self) -> Page:
        reply = self.on_loop(self._board.snapshot())
        return Page(JSON, json.dumps(as_dict(reply, self.address) | {"at": time.time()}).encode())

    def _history(self) -> Page:
        async def found() -> dict[str, Any]:
            return self._series.as_dict()

        return Page(JSON, json.dumps(self.on_loop(found())).encode())


class SharedPage:
    """A route whose page is made once for all who ask at the same time, or soon after."""

    def __init__(self, make: Callable[[], Page]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._page: Page | None = None
        self._made_at = 0.0

    def __call__(self) -> Page:
        with self._lock:  # who waits here gets the page that is being made
            if self._page is None or time.monotonic() - self._made_at > FRESH_S:
                try:
                    self._page = self._make()
                except TimeoutError:
                    return Page("text/plain; charset=utf-8", b"503 the coordinator has no time for this\n", 503)
                self._made_at = time.monotonic()
            return self._page


def _file(name: str, content_type: str) -> Route:
    page = Page(content_type, files("penstock.appliance").joinpath("dashboard", name).read_bytes())
    return lambda: page


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
