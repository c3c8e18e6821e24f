"""Web pages of a coordinator for browsers and metrics collectors: a dict of routes for
penstock.runtime.web.http_server.

Routes run on threads of the web server, and the cluster state belongs to the event loop, so a route never reads it
directly. A route requests a status from the event loop, waits for it with a deadline, and makes its page on its own
thread. Requests that come at the same time share one status, and a page younger than FRESH_S is sent again. So the cost
for the event loop does not grow with the number of viewers.

The dashboard itself is three static files in ../dashboard: no build step, no framework, no content from elsewhere.
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

from penstock.appliance.edge.dashboard_data import dashboard
from penstock.appliance.edge.run_series import RunSeries
from penstock.appliance.model.entities import Attempt
from penstock.proto.errors import PortTakenError
from penstock.proto.rpc.addresses import is_local
from penstock.proto.rpc.tls import Tls
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.runtime.telemetry.cluster_view import ClusterView, as_dict, view
from penstock.runtime.web.http_server import Page, Route, WebServer

__all__ = ["DashboardPages", "open_web"]

log = logging.getLogger("penstock.appliance")

FRESH_S = 0.5
"""Largest age of a page that is sent to a further viewer without being made again, in seconds."""
LOOP_S = 10.0
"""Longest time in seconds for which a route waits for the event loop. Only an overloaded machine reaches it. The page
then shows an error, and the web server's thread is free again."""
SAMPLE_S = 1.0
"""Seconds between two samples of the runs' speed."""
JSON = "application/json"
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/dashboard.css": ("dashboard.css", "text/css; charset=utf-8"),
    "/dashboard.js": ("dashboard.js", "text/javascript; charset=utf-8"),
}

_Result = TypeVar("_Result")


class StatusSource(Protocol):
    """Interface to a coordinator's status; the gRPC service implements it. Its methods are called on the event loop."""

    async def snapshot(self) -> pb.StatusReply:
        """Return a status with everything that an operator may see, as of now."""

    def attempts(self) -> list[Attempt]:
        """Return the open attempts."""


class DashboardPages:
    """Routes of the dashboard page and of its data.

    Args:
        source: source of the status.
        loop: event loop of the source.
        address: returns the address of the coordinator; "" until it listens.
    """

    def __init__(
        self, source: StatusSource, loop: asyncio.AbstractEventLoop, address: Callable[[], str] = lambda: ""
    ) -> None:
        self._source, self._loop, self._address = source, loop, address
        self._series = RunSeries()
        self.routes: dict[str, Route] = {
            **{path: _file(name, content_type) for path, (name, content_type) in FILES.items()},
            "/api/status.json": SharedPage(lambda: self._status_page(as_dict)),
            "/api/dashboard.json": SharedPage(lambda: self._status_page(self._dashboard)),
            "/api/history.json": SharedPage(self._history),
        }
        """Path -> route. Other modules may add routes until the web server starts."""

    def on_loop(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine on the event loop and return its result. Routes call this on threads of the web server.
        Raises TimeoutError if the event loop is too busy or has ended."""
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as error:
            work.close()
            raise TimeoutError("the coordinator's event loop has ended: start the coordinator again") from error
        try:
            return future.result(LOOP_S)
        except CancelledError as error:
            raise TimeoutError("the coordinator's event loop has ended: start the coordinator again") from error
        finally:
            future.cancel()

    async def sample(self) -> None:
        """Record the speed of the runs once a second, until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            for _ in self._series.sample(self._source.attempts(), time.time()):
                await asyncio.sleep(0)

    def _status_page(self, show: Callable[[ClusterView], dict[str, Any]]) -> Page:
        found = view(self.on_loop(self._source.snapshot()), self._address())
        return Page(JSON, json.dumps(show(found) | {"at": time.time()}, default=as_dict).encode())

    def _dashboard(self, found: ClusterView) -> dict[str, Any]:
        return {**dashboard(found), "shares": self._series.newest_shares()}

    def _history(self) -> Page:
        async def found() -> dict[str, Any]:
            return self._series.as_dict()

        return Page(JSON, json.dumps(self.on_loop(found())).encode())


class SharedPage:
    """Route that makes its page once for all requests that come at the same time or within FRESH_S seconds."""

    def __init__(self, make: Callable[[], Page]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._page: Page | None = None
        self._made_at = 0.0

    def __call__(self) -> Page:
        with self._lock:  # a waiting request gets the page that is being made
            if self._page is None or time.monotonic() - self._made_at > FRESH_S:
                try:
                    self._page = self._make()
                except TimeoutError:
                    return Page(
                        "text/plain; charset=utf-8",
                        b"503 the coordinator is overloaded or is ending: reload the page\n",
                        503,
                    )
                self._made_at = time.monotonic()
            return self._page


def _file(name: str, content_type: str) -> Route:
    page = Page(content_type, files("penstock.appliance").joinpath("dashboard", name).read_bytes())
    return lambda: page


def open_web(
    listen: str, routes: dict[str, Route], tokens: str, *, tls: Tls | None, insecure: bool, any_port: bool
) -> WebServer:
    """Return a web server of the coordinator, which already listens at `listen` ("host:port"). `any_port`: use a free
    port if the port of `listen` is in use. Raises the errors of WebServer."""
    # On loopback only root of this machine could impersonate the server, and a browser does not have the cluster's CA.
    tls = None if is_local(listen) else tls
    try:
        web = WebServer(listen, routes, tokens=tokens, tls=tls, insecure=insecure)
    except PortTakenError:
        if not any_port:
            raise
        free = f"{listen.rpartition(':')[0]}:0"
        web = WebServer(free, routes, tokens=tokens, tls=tls, insecure=insecure)
        log.info("the dashboard's address %s is in use, so the dashboard takes a free port", listen)
    log.info("the coordinator serves its dashboard at %s", web.url)
    return web
