"""The daemon's fork servers: one for each hash seed that its slots need. Each starts with its first slot, and is kept
for a while after its last."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from penstock.proto.v1 import records_pb2
from penstock.worker.processes.child_processes import ForkServer
from penstock.worker.processes.control_groups import ControlGroups
from penstock.worker.processes.runner_user import RunnerUser
from penstock.worker.processes.temporary_folders import TemporaryFolders
from penstock.worker.resources.turn_queue import TurnQueue

__all__ = ["ForkServers"]

IDLE_S = 60.0
"""Seconds that a fork server is kept after its last slot has ended, because starting one takes seconds."""
IDLE_MOST = 2
"""Largest number of idle fork servers that are kept: one for training and one for evaluation, if a trainer restarts."""


class ForkServers:
    """
    Args:
        tempdirs: directories of the runners.
        starts: queue of starts. It allows one start less at a time while a killed fork server has not ended.
        deadline_s: seconds that a fork server may take to start; see ForkServer.start.
        sandboxed: whether runners are sandboxed; see sandbox.py.
        user: user of the runners, if not the daemon's own; see runner_user.py.
        groups: control groups of the runners, None without them. See control_groups.py.
    """

    def __init__(
        self,
        tempdirs: TemporaryFolders,
        starts: TurnQueue,
        deadline_s: float,
        *,
        sandboxed: bool,
        user: RunnerUser | None = None,
        groups: ControlGroups | None = None,
    ) -> None:
        self._tempdirs = tempdirs
        self._starts = starts
        self._deadline_s = deadline_s
        self._sandboxed = sandboxed
        self._user = user
        self._groups = groups
        self._fork_servers: dict[int, asyncio.Task[ForkServer]] = {}
        self._retiring: dict[int, asyncio.TimerHandle] = {}
        self._given_up: set[asyncio.Task[ForkServer]] = set()

    async def get(self, assignment: records_pb2.WorkerAssignment) -> ForkServer:
        """Return the fork server with the run's hash seed; start it if there is none, or if it died."""
        seed = assignment.seed
        starting = self._fork_servers.get(seed)
        if starting is None or (starting.done() and (not _is_up(starting) or starting.result().dead)):
            starting = self._fork_servers[seed] = asyncio.ensure_future(self._started(assignment))
        return await asyncio.shield(starting)

    async def _started(self, assignment: records_pb2.WorkerAssignment) -> ForkServer:
        fork_server = ForkServer(self._tempdirs, self._groups)
        try:
            main_script = bool(assignment.loader.main_path)
            await fork_server.start(
                assignment.seed,
                main_script=main_script,
                sandboxed=self._sandboxed,
                user=self._user,
                deadline_s=self._deadline_s,
            )
        finally:
            if fork_server.dead and fork_server.lives:
                self._starts.lend_until(fork_server.wait())
        return fork_server

    def keep_for(self, seeds: Collection[int]) -> None:
        """Retire the fork servers of all seeds but these, a little later, because the next attempt may need them."""
        for seed in self._fork_servers:
            if seed in seeds and seed in self._retiring:
                self._retiring.pop(seed).cancel()
            elif seed not in seeds and seed not in self._retiring:
                self._retiring[seed] = asyncio.get_running_loop().call_later(IDLE_S, self._retire, seed)
        for seed in list(self._retiring)[:-IDLE_MOST]:
            self._retiring[seed].cancel()
            self._retire(seed)

    def _retire(self, seed: int) -> None:
        self._retiring.pop(seed, None)
        starting = self._fork_servers.pop(seed)
        if not starting.done():
            starting.cancel()
            self._given_up.add(starting)
            starting.add_done_callback(self._given_up.discard)
        elif _is_up(starting):
            starting.result().close()

    async def close(self) -> None:
        """End all fork servers; return when they have ended, or cannot be killed."""
        for timer in self._retiring.values():
            timer.cancel()
        there = [starting.result() for starting in self._fork_servers.values() if _is_up(starting)]
        for seed in list(self._fork_servers):
            self._retire(seed)
        await asyncio.gather(*self._given_up, return_exceptions=True)
        for fork_server in there:
            await fork_server.wait()


def _is_up(starting: asyncio.Task[ForkServer]) -> bool:
    return starting.done() and not starting.cancelled() and starting.exception() is None
