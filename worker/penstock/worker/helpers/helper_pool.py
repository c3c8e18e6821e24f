"""Pool of the daemon's warm helper processes (helper_process.py). The tasks of a run share them, and a run has at most
as many as helper tasks may run at the same time. *Warm* means that the process has imported the modules that the loader
needs before it gets a task.

If a run has many tasks at once, for example the states of a hundred slots, warm helpers do them, each helper one task
at a time. The first task of a run goes to a fresh child process, which reports the modules that it had to import. Warm
helpers import the same modules. A task that fails in a warm helper is done again by a fresh child, whose answer counts.
So results of user code never depend on whether a warm helper ran it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.proto.errors import WorkerLostError
from penstock.proto.v1 import records_pb2
from penstock.runtime.process.watch import Process, stat_of
from penstock.worker.processes.child_processes import Child, ForkServer
from penstock.worker.processes.control_channel import ControlMessage
from penstock.worker.processes.progress_page import ProgressPage

__all__ = ["HelperPool", "HelperProcess"]

MIN_TASKS = 3
"""Smallest number of simultaneous tasks of one loader for which a warm helper is started. Fewer tasks would end before
the helper has imported its modules."""
IDLE_S = 30.0
"""Seconds that a warm helper without a task is kept before it is ended."""
WARM_S = 60.0
"""Largest number of seconds that a warm helper may take for its imports; then it is ended."""

_Key = tuple[str, ...]


class HelperProcess:
    """Warm helper process: a child that has imported a loader's modules, and forks a child of its own for each task."""

    def __init__(self) -> None:
        self.child: Child | None = None
        self.modules: frozenset[str] = frozenset()
        self.worker = 0
        """Process id of the child that does the helper's present task; 0 = not known."""
        self.answer: asyncio.Future[ControlMessage] = asyncio.get_running_loop().create_future()
        self.idle: asyncio.TimerHandle | None = None

    def on_message(self, message: ControlMessage) -> None:
        """Handle a message from the warm helper, or from the child that does the helper's task."""
        if message.kind == "working":
            pid = message.fields.get("pid")
            parent = [] if self.child is None else [str(self.child.pid)]
            self.worker = pid if isinstance(pid, int) and parent and stat_of(pid)[1:2] == parent else 0
        elif not self.answer.done():
            self.answer.set_result(message)

    def expect(self) -> asyncio.Future[ControlMessage]:
        """Return a future for the answer to the helper's next task."""
        self.worker, self.answer = 0, asyncio.get_running_loop().create_future()
        return self.answer

    async def stack(self) -> str:
        """Return the stack, as text, of the child that does the helper's task; "" if no child does one."""
        if not self.worker or self.child is None:
            return ""
        try:
            worker = Process(self.worker)
        except OSError:
            return ""
        with worker:
            return await self.child.stacks.ask(worker)

    def end(self) -> None:
        """Kill the warm helper and the child that does its task."""
        if self.idle is not None:
            self.idle.cancel()
        if self.child is not None:
            self.child.kill()


@dataclass
class _LoaderHelpers:
    """Idle warm helpers for one loader, and facts about the loader's tasks."""

    tasks: int = 0
    """Number of tasks of this loader that run or wait."""
    modules: list[str] | None = None
    """Names of the modules that warm helpers import; None until the first task has reported its modules."""
    unfit: str = ""
    """Reason why warm helpers must not do this loader's tasks; "" = they may."""
    idle: list[HelperProcess] = field(default_factory=list)


class HelperPool:
    """Pool of warm helper processes, in groups by loader.

    Args:
        fork_server: returns the fork server from which warm helpers are forked.
    """

    def __init__(self, fork_server: Callable[[records_pb2.WorkerAssignment], Awaitable[ForkServer]]) -> None:
        self._fork_server = fork_server
        self._groups: dict[_Key, _LoaderHelpers] = {}

    @contextlib.contextmanager
    def counted(self, assignment: records_pb2.WorkerAssignment) -> Any:
        """Count one more waiting or running task of this assignment's loader while the `with` block runs."""
        group = self._groups.setdefault(_key_of(assignment), _LoaderHelpers())
        group.tasks += 1
        try:
            yield
        finally:
            group.tasks -= 1

    async def take(self, assignment: records_pb2.WorkerAssignment, progress_page: ProgressPage) -> HelperProcess | None:
        """Return a warm helper (a process that has imported the loader's modules) for one task; start a helper if the
        loader has enough tasks. Return None if a fresh child process must do the task. The caller must give the helper
        back or end it."""
        group = self._groups.get(_key_of(assignment))
        if group is None or group.unfit or group.modules is None or (group.tasks < MIN_TASKS and not group.idle):
            return None
        while group.idle:
            helper = group.idle.pop()
            assert helper.idle is not None
            helper.idle.cancel()
            if helper.child is not None and not helper.child.exited.done() and helper.modules.issuperset(group.modules):
                return helper
            helper.end()
        return await self._started(assignment, progress_page, group)

    def give_back(self, assignment: records_pb2.WorkerAssignment, helper: HelperProcess) -> None:
        """Put a warm helper back into the pool after its task. It is ended if it gets no other task within IDLE_S
        seconds."""
        group = self._groups[_key_of(assignment)]
        helper.idle = asyncio.get_running_loop().call_later(IDLE_S, self._end_idle, group, helper)
        group.idle.append(helper)

    def learn(self, assignment: records_pb2.WorkerAssignment, modules: object) -> None:
        """Record the modules that a task of this assignment's loader had to import, so that the loader's warm helpers
        import these modules too. Ignore anything but a list of names, because user code may have forged it."""
        if type(modules) is not list or not all(type(name) is str for name in modules):
            return
        group = self._groups[_key_of(assignment)]
        known = group.modules or []
        group.modules = known + [name for name in modules if name not in set(known)]

    def distrust(self, assignment: records_pb2.WorkerAssignment, why: str) -> None:
        """Stop using warm helpers (processes that have imported the loader's modules) for this loader, because a helper
        failed at a task that a fresh process could do.

        why: the reason, for people.
        """
        self._groups[_key_of(assignment)].unfit = why

    def forget(self, attempts: set[tuple[str, int]]) -> None:
        """End the idle warm helpers of all runs but those in `attempts`, given as (run, attempt): only these have slots
        on this worker. Helpers of a loader with a running or waiting task are kept."""
        live = {(run, str(attempt)) for run, attempt in attempts}
        for key in [key for key, group in self._groups.items() if key[:2] not in live and not group.tasks]:
            for helper in self._groups.pop(key).idle:
                helper.end()

    def _end_idle(self, group: _LoaderHelpers, helper: HelperProcess) -> None:
        if helper in group.idle:
            group.idle.remove(helper)
        helper.end()

    async def _started(
        self, assignment: records_pb2.WorkerAssignment, progress_page: ProgressPage, group: _LoaderHelpers
    ) -> HelperProcess | None:
        modules = group.modules or []
        fork_server, helper = await self._fork_server(assignment), HelperProcess()
        helper.modules = frozenset(modules)
        spec = records_pb2.LoaderSpec()
        spec.CopyFrom(assignment.loader)
        for unneeded in ("arguments", "arguments_blob", "options"):
            spec.ClearField(unneeded)
        try:
            about: dict[str, str | int] = {"run": assignment.run, "attempt": assignment.attempt}
            helper.child = await fork_server.fork(
                "helper", f"{assignment.run} helper", progress_page, helper.on_message, about
            )
            warm = helper.expect()
            await helper.child.send("warm", spec.SerializeToString(), modules=modules)
            either: set[asyncio.Future[Any]] = {warm, helper.child.exited}
            await asyncio.wait(either, timeout=WARM_S, return_when="FIRST_COMPLETED")
            group.unfit = str(warm.result().fields.get("unfit", "")) if warm.done() else "it was not ready in time"
        except WorkerLostError:
            return None
        except BaseException:
            helper.end()
            raise
        if group.unfit:
            helper.end()
            return None
        return helper


def _key_of(assignment: records_pb2.WorkerAssignment) -> _Key:
    loader = assignment.loader
    return (assignment.run, str(assignment.attempt), loader.input_fn, loader.main_path, *loader.sys_path)
