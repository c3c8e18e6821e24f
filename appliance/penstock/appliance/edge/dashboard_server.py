"""Start of a coordinator's dashboard: with the coordinator, or on demand (OpenDashboard).

An embedded coordinator (one that the training process starts on its machine) starts about 0.1 s sooner without the
modules of the web server, and most of its dashboards would never be looked at. So its dashboard starts when the
operator asks for one, on loopback and a free port, with the access rules of every dashboard (see http_server.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from penstock.proto.rpc.tls import Renewing, Tls
from penstock.runtime.telemetry.counters import CallCounters

if TYPE_CHECKING:
    from penstock.appliance.edge.service import Service

__all__ = ["ON_DEMAND", "DashboardServer"]

ON_DEMAND = "127.0.0.1:0"
"""Address of a dashboard that starts on demand."""


class DashboardServer:
    """Starter of the dashboard, in the coordinator's event loop.

    Args:
        service: source of the status.
        tokens: credential tokens that callers from other machines must present.
        tls: certificate of the coordinator; None without TLS.
        insecure: allows an address that other machines can reach without TLS.
        calls: the server's counters of calls.
        files: returns the TLS files of the running server; None without TLS.
        closing: stack whose end closes the dashboard.
    """

    def __init__(
        self,
        service: Service,
        tokens: str,
        *,
        tls: Tls | None,
        insecure: bool,
        calls: CallCounters,
        files: Callable[[], Renewing | None],
        closing: contextlib.ExitStack,
    ) -> None:
        self.address = ""
        """Address of the coordinator, which the pages show; "" until it listens."""
        self._service, self._tokens, self._tls, self._insecure = service, tokens, tls, insecure
        self._calls, self._files, self._closing = calls, files, closing
        self._opening = asyncio.Lock()

    def open(self, listen: str, *, any_port: bool = False) -> str:
        """Start the dashboard and return its URL. `any_port`: use a free port if that of `listen` is in use. Raises the
        errors of WebServer."""
        # Imported here, because a coordinator without a dashboard starts about 0.1 s sooner without these modules.
        from penstock.appliance.edge import coordinator_metrics, pages
        from penstock.runtime.web.prometheus import in_loop

        service, loop = self._service, asyncio.get_running_loop()
        shown = pages.DashboardPages(service, loop, lambda: self.address)
        shown.routes["/metrics"] = coordinator_metrics.route(
            lambda: coordinator_metrics.readings(
                shown.on_loop(service.snapshot()),
                in_loop(loop, partial(service.counters, self._calls)),
                self._files(),
            )
        )
        web = pages.open_web(
            listen, shown.routes, self._tokens, tls=self._tls, insecure=self._insecure, any_port=any_port
        )
        self._closing.callback(web.close)
        service.dashboard = web.url
        sampler = loop.create_task(shown.sample())
        self._closing.callback(sampler.cancel)
        return web.url

    async def open_on_demand(self) -> str:
        """Return the dashboard's URL. Start the dashboard on loopback if none runs yet."""
        async with self._opening:
            if not self._service.dashboard:
                await asyncio.to_thread(_import_pages)  # takes longer than other calls should wait
                self.open(ON_DEMAND)
            return self._service.dashboard


def _import_pages() -> None:
    from penstock.appliance.edge import coordinator_metrics, pages  # noqa: F401  (only to load them)
