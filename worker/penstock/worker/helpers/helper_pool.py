"""The daemon's helper processes (helper_process.py): as many as there are processors, shared by the tasks of a run.

Where a run asks for many tasks at once, the state of a hundred slots say, its tasks go to helpers, one at a time to
each. The first task of a run goes to a helper process, which tells what it had to import; helpers import the same. A
task that fails in a helper, in whatever way, is done again by a helper process, whose answer counts: what comes of user
code never depends on whether a helper did it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.proto.errors import WorkerLostError
from penstock.proto.v1 import records_pb2
from penstock.worker.processes.child_processes import Child, ForkServer
from penstock.worker.processes.control_channel import ControlMessage
from penstock.worker.processes.progress_page import ProgressPage

__all__ = ["HelperPool", "HelperProcess"]

PAYS = 3
"""Tasks of a run, under way and waiting, for which a helper is started: fewer are done before it is warm."""
IDLE_S = 30.0
"""Seconds that a helper is kept for without a task."""
WARM_S = 60.0
"""Seconds for a helper to import what it needs."""

_Key = tuple[str, ...]


class HelperProcess:
    """One process, with one task at a time."""

    def __init__(self) -> None:
        self.child: Child | None = None
        self.modules: frozenset[str] = frozenset()
        self.worker = 0
        """Process id of the child that does its task."""
        self.answer: asyncio.Future[ControlMessage] = asyncio.get_running_loop().create_future()
        self.idle: asyncio.TimerHandle | None = None

    def hear(self, message: ControlMessage) -> None:
        """What it, or the child that does its task, says."""
        if message.kind == "working":
            pid = message.fields.get("pid")
            self.worker = pid if self.child is not None and type(pid) is int and _parent(pid) == self.child.pid else 0
        elif not self.answer.done():
            self.answer.set_result(message)

    def expect(self) -> asyncio.Future[ControlMessage]:
        """The answer to what it is asked next."""
        self.worker, self.answer = 0, asyncio.get_running_loop().create_future()
        return self.answer

    async def stack(self) -> str:
        """Of the child that does its task, "" if there is none."""
        if not self.worker or self.child is None:
            return ""
        try:
            pidfd = os.pidfd_open(self.worker)
        except OSError:
            return ""
        try:
            return await self.child.stacks.ask(self.worker, pidfd)
        finally:
            os.close(pidfd)

    def end(self) -> None:
        """Kill it, and what it does."""
        if self.idle is not None:
            self.idle.cancel()
        if self.child is not None:
            self.child.kill()


@dataclass
class _Crew:
    """The helpers of one kind of loader."""

    tasks: int = 0
    """Under way and waiting."""
    modules: list[str] | None = None
    """To import; None before a task has told them."""
    unfit: str = ""
    """Why there can be no helpers."""
    idle: list[HelperProcess] = field(default_factory=list)


class HelperPool:
    """
    Args:
        fork server: what helpers are forked from.
    """

    def __init__(self, fork_server: Callable[[records_pb2.WorkerAssignment], Awaitable[ForkServer]]) -> None:
        self._fork_server = fork_server
        self._crews: dict[_Key, _Crew] = {}

    @contextlib.contextmanager
    def counted(self, assignment: records_pb2.WorkerAssignment) -> Any:
        """While a task of such a loader waits, or is under way."""
        crew = self._crews.setdefault(_key_of(assignment), _Crew())
        crew.tasks += 1
        try:
            yield
        finally:
            crew.tasks -= 1

    async def take(self, assignment: records_pb2.WorkerAssignment, progress_page: ProgressPage) -> HelperProcess | None:
        """A helper for one task, if it is worth it and can be had; to be given back, or ended."""
        crew = self._crews.get(_key_of(assignment))
        if crew is None or crew.unfit or crew.modules is None or (crew.tasks < PAYS and not crew.idle):
            return None
        while crew.idle:
            helper = crew.idle.pop()
            assert helper.idle is not None
            helper.idle.cancel()
            if helper.child is not None and not helper.child.exited.done() and helper.modules.issuperset(crew.modules):
                return helper
            helper.end()
        return await self._started(assignment, progress_page, crew)

    def give_back(self, assignment: records_pb2.WorkerAssignment, helper: HelperProcess) -> None:
        """Its task is done."""
        crew = self._crews[_key_of(assignment)]
        helper.idle = asyncio.get_running_loop().call_later(IDLE_S, self._let_go, crew, helper)
        crew.idle.append(helper)

    def learn(self, assignment: records_pb2.WorkerAssignment, modules: object) -> None:
        """A task had to import these."""
        if type(modules) is not list or not all(type(name) is str for name in modules):
            return
        crew = self._crews[_key_of(assignment)]
        known = crew.modules or []
        crew.modules = known + [name for name in modules if name not in set(known)]

    def distrust(self, assignment: records_pb2.WorkerAssignment, why: str) -> None:
        """What a helper did differs from what a fresh process does."""
        self._crews[_key_of(assignment)].unfit = why

    def forget(self, attempts: set[tuple[str, int]]) -> None:
        """Only these have slots here."""
        live = {(run, str(attempt)) for run, attempt in attempts}
        for key in [key for key, crew in self._crews.items() if key[:2] not in live and not crew.tasks]:
            for helper in self._crews.pop(key).idle:
                helper.end()

    def _let_go(self, crew: _Crew, helper: HelperProcess) -> None:
        if helper in crew.idle:
            crew.idle.remove(helper)
        helper.end()

    async def _started(
        self, assignment: records_pb2.WorkerAssignment, progress_page: ProgressPage, crew: _Crew
    ) -> HelperProcess | None:
        modules = crew.modules or []
        fork_server, helper = await self._fork_server(assignment), HelperProcess()
        helper.modules = frozenset(modules)
        spec = records_pb2.LoaderSpec()
        spec.CopyFrom(assignment.loader)
        for unneeded in ("arguments", "arguments_blob", "options"):
            spec.ClearField(unneeded)
        try:
            about: dict[str, str | int] = {"run": assignment.run, "attempt": assignment.attempt}
            helper.child = await fork_server.fork(
                "helper", f"{assignment.run} helper", progress_page, helper.hear, about
            )
            warm = helper.expect()
            await helper.child.send("warm", spec.SerializeToString(), modules=modules)
            either: set[asyncio.Future[Any]] = {warm, helper.child.exited}
            await asyncio.wait(either, timeout=WARM_S, return_when="FIRST_COMPLETED")
            crew.unfit = str(warm.result().fields.get("unfit", "")) if warm.done() else "it did not get ready"
        except WorkerLostError:
            return None
        except BaseException:
            helper.end()
            raise
        if crew.unfit:
            helper.end()
            return None
        return helper


def _key_of(assignment: records_pb2.WorkerAssignment) -> _Key:
    loader = assignment.loader
    return (assignment.run, str(assignment.attempt), loader.input_fn, loader.main_path, *loader.sys_path)


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0
