"""A worker daemon in this process, with its signals and its web pages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable

from penstock.runtime.process.lifetime import Parent, become_subreaper
from penstock.runtime.process.machine_needs import require
from penstock.runtime.process.open_files import raise_file_limit
from penstock.runtime.process.spare_memory import give_back_spare_memory
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
    stop: asyncio.Event | None = None,
) -> None:
    """Run a daemon until `stop`, for a process that runs other code too; without it until SIGTERM, SIGINT, the end of
    the parent `settings.parent_pid`, or its wish. ready: called with the worker's name."""
    if not settings.embedded:  # else the training job has asked
        require("the worker", "worker", slots=settings.slots)
    raise_file_limit()
    daemon = Daemon(settings, fork_server, stop)
    loop = asyncio.get_running_loop()
    if settings.parent_pid:
        try:
            Parent(settings.parent_pid).on_end(daemon.stop)
        except ProcessLookupError:
            return
    if stop is None:
        loop.add_signal_handler(signal.SIGTERM, daemon.stop)
        if not settings.parent_pid:
            loop.add_signal_handler(signal.SIGINT, lambda: daemon.stop(interrupted=True))
    become_subreaper()  # adopts the children of a fork server that dies
    with unblocked_logging(), contextlib.ExitStack() as closing:
        if settings.http:
            web = open_web(daemon, loop)
            closing.callback(web.close)
            _log.info("metrics at %s/metrics", web.url)
        if not settings.embedded:
            closing.callback(loop.create_task(give_back_spare_memory()).cancel)
        await daemon.run(ready)
