"""The daemon's fork server, from which all runners are forked. One serves all runs. It is started when the first slot
needs it, replaced when it dies, and kept for a while when no slot needs it."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from penstock.worker.processes.child_processes import END_S, KILL_S, ForkServer
from penstock.worker.processes.interpreters import StartedForkServer
from penstock.worker.processes.runner_user import RunnerUser
from penstock.worker.processes.temporary_folders import TemporaryFolders
from penstock.worker.resources.turn_queue import TurnQueue

__all__ = ["KeptForkServer"]

_log = logging.getLogger("penstock.worker")

IDLE_S = 300.0
"""Seconds that a fork server is kept while the worker has no slot. A start takes more than a second of processor time,
and an idle fork server holds 150 MB."""
CLOSE_S = END_S + KILL_S
"""Largest number of seconds to wait for the end of a fork server that was closed: END_S until it is killed, then
KILL_S. A process that hangs in a driver or a file system does not end."""


class KeptForkServer:
    """Owner of the daemon's fork server: starts, replaces and ends the process.

    Args:
        tempdirs: temporary directories of the runners.
        starts: queue that limits simultaneous starts of runners. Its limit is lowered by one as long as a fork server
            that was killed during its start has not ended.
        deadline_s: largest number of seconds that a fork server may take to start; see ForkServer.start.
        sandboxed: True to sandbox runners; see sandbox.py.
        user: user of the runners; None: the daemon's own user. See runner_user.py.
        started: a fork server that was already started with these settings; None: one is started when it is needed.
    """

    def __init__(
        self,
        tempdirs: TemporaryFolders,
        starts: TurnQueue,
        deadline_s: float,
        *,
        sandboxed: bool,
        user: RunnerUser | None = None,
        started: StartedForkServer | None = None,
    ) -> None:
        self._tempdirs = tempdirs
        self._starts = starts
        self._deadline_s = deadline_s
        self._sandboxed = sandboxed
        self._user = user
        self._given_up: set[asyncio.Task[ForkServer]] = set()
        self._retiring: asyncio.TimerHandle | None = None
        self._current: asyncio.Task[ForkServer] | None = None
        if started is not None:
            self._current = asyncio.ensure_future(self._start(started))

    async def get(self, *, main_script: bool = False) -> ForkServer:
        """Return the fork server. Start one if none runs.

        main_script: True lets the fork server import the modules for an input_fn from a training job's main script.
        """
        current = self._current
        if current is None or (current.done() and (not _is_up(current) or current.result().dead)):
            current = self._current = asyncio.ensure_future(self._start())
        fork_server = await asyncio.shield(current)
        if main_script:
            fork_server.expect_main_script()
        return fork_server

    async def _start(self, started: StartedForkServer | None = None) -> ForkServer:
        fork_server = ForkServer(self._tempdirs)
        try:
            await fork_server.start(
                sandboxed=self._sandboxed, user=self._user, deadline_s=self._deadline_s, started=started
            )
        finally:
            if fork_server.dead and fork_server.lives:
                self._starts.occupy_until(fork_server.wait())
        return fork_server

    def keep(self, *, needed: bool) -> None:
        """Tell this object whether slots need the fork server. With `needed` False, the fork server is ended after
        IDLE_S seconds, unless a slot needs it before."""
        if needed and self._retiring is not None:
            self._retiring.cancel()
            self._retiring = None
        elif not needed and self._retiring is None:
            self._retiring = asyncio.get_running_loop().call_later(IDLE_S, self._retire)

    def _retire(self) -> None:
        current, self._current, self._retiring = self._current, None, None
        if current is None:
            return
        if not current.done():
            current.cancel()
            self._given_up.add(current)
            current.add_done_callback(self._given_up.discard)
        elif _is_up(current):
            current.result().close()

    async def close(self) -> None:
        """End the fork server. Return when its process has ended, after CLOSE_S seconds at the latest."""
        if self._retiring is not None:
            self._retiring.cancel()
        last = self._current
        self._retire()
        await asyncio.gather(*self._given_up, return_exceptions=True)
        if last is not None and _is_up(last):
            fork_server = last.result()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(fork_server.wait(), CLOSE_S)
            if fork_server.lives:
                _log.error(
                    "fork server (process %d) has not ended %g s after it was closed; it may wait for a driver or a "
                    "file system",
                    *(fork_server.pid, CLOSE_S),
                )


def _is_up(starting: asyncio.Task[ForkServer]) -> bool:
    return starting.done() and not starting.cancelled() and starting.exception() is None
