"""A worker daemon in this process, with its signals and its web pages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable

from penstock.runtime.process.watch import Process, become_subreaper
from penstock.worker.daemon.daemon import Daemon
from penstock.worker.daemon.worker_metrics import open_web
from penstock.worker.daemon.worker_settings import DaemonSettings
from penstock.worker.processes.child_output import unblocked_logging
from penstock.worker.processes.interpreters import StartedForkServer

_log = logging.getLogger("penstock.worker")


async def serve(
    settings: DaemonSettings,
    ready: Callable[[str], None] | None = None,
    fork_server: StartedForkServer | None = None,
) -> None:
    """Run a daemon until SIGTERM, SIGINT, or the end of a process in `settings.parent_pids`. ready: called with the
    worker's name."""
    daemon = Daemon(settings, fork_server)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, daemon.stop)
    for pid in settings.parent_pids:
        try:
            Process(pid).on_end(daemon.stopping.set)
        except ProcessLookupError:
            return
    become_subreaper()  # adopts the children of a fork server that dies
    with unblocked_logging(), contextlib.ExitStack() as closing:
        if settings.http:
            web = open_web(daemon, loop)
            closing.callback(web.close)
            _log.info("metrics at %s/metrics", web.url)
        await daemon.run(ready)
