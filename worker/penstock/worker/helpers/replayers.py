"""The daemon's side of tasks for helper processes. A helper process does one task with a slot's loader, such as making
the state at a step, while the slot's runner continues to stream. The stream continues even if the task fails.

The helper's side is replayer.py.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from typing import Any, Protocol

from penstock.proto.errors import DeadlineError, WorkerLostError, error_named
from penstock.proto.v1 import records_pb2
from penstock.runtime.process.end import describe_exit
from penstock.worker.helpers.blobs import Blobs
from penstock.worker.processes.child_processes import Child, ForkServer, about_slot
from penstock.worker.processes.control_channel import ControlMessage
from penstock.worker.processes.exit_causes import descriptors_closed
from penstock.worker.processes.progress_page import ProgressPage
from penstock.worker.resources.turn_queue import TurnQueue

__all__ = ["DEADLINE_S", "ReplayHost", "run_task", "send_assignment"]

DEADLINE_S = 120.0
"""Default for the largest number of seconds that a task may take."""


class ReplayHost(Protocol):
    """Part of the worker daemon that `run_task` needs."""

    helper_turns: TurnQueue
    """Queue that limits how many helper tasks run at the same time."""
    blobs: Blobs

    async def fork_server(self, assignment: records_pb2.WorkerAssignment) -> ForkServer: ...


async def run_task(
    host: ReplayHost,
    assignment: records_pb2.WorkerAssignment,
    name: str,
    progress_page: ProgressPage,
    points: list[bytes],
    task: str,
    deadline_s: float = DEADLINE_S,
    **fields: Any,
) -> ControlMessage:
    """Let a helper process do `task` with the slot's loader, and return the helper's answer. If the helper or its fork
    server is killed from outside (SIGKILL), another helper does the task.

    Args:
        host: the daemon.
        name: the slot's name for messages.
        points: restart points (earlier positions of the loader with its states), serialized, in the order to try.
        task: kind of the message with which replayer.py gets the task; `fields` are the message's fields.
        deadline_s: seconds for the work of helpers. Waiting for a turn and starting a process do not count.

    Raises:
        DeadlineError: the task took longer than `deadline_s` seconds; with the helper's stack.
        WorkerLostError: the helper died; with its stack, if it crashed.
        InputFnError: user code closed the helper's control socket.
        PenstockError: the error with which the task failed.
    """
    async with host.helper_turns.turn(urgent=True):
        message = await _by_child(host, assignment, name, progress_page, points, task, deadline_s, fields)
    if message.kind == "failed":
        raise error_named(**message.fields["error"])
    return message


async def _by_child(
    host: ReplayHost,
    assignment: records_pb2.WorkerAssignment,
    name: str,
    progress_page: ProgressPage,
    points: list[bytes],
    task: str,
    deadline_s: float,
    fields: dict[str, Any],
) -> ControlMessage:
    """Let a fresh child process do the task, and return its answer. If the child or its fork server is killed from
    outside, try once more with a second child."""
    what, left_s = f"the helper process of {name}", deadline_s
    for last in (False, True):
        fork_server = await host.fork_server(assignment)
        answer: asyncio.Future[ControlMessage] = asyncio.get_running_loop().create_future()
        about = about_slot(assignment)
        try:
            child = await fork_server.fork("task", f"{name} {task}", progress_page, _first(answer), about)
        except WorkerLostError:
            if last:
                raise
            continue
        try:
            await _ask(host, child, assignment, points, task, fields)
            either: set[asyncio.Future[Any]] = {answer, child.exited}
            began = time.monotonic()
            await asyncio.wait(either, timeout=left_s, return_when="FIRST_COMPLETED")
            left_s = max(left_s - (time.monotonic() - began), 0.0)
            if answer.done():
                break
            if not child.exited.done():
                raise _late(what, task, deadline_s, await child.stack())
            status = child.exited.result()
            if last or child.unwanted or status != -signal.SIGKILL:
                how = f"{what} {describe_exit(status)} during the task {task}; the stream of batches continues"
                how += ". See the cause in its stack or in the worker's log"
                raise descriptors_closed(status, what) or WorkerLostError(how, remote_traceback=child.last_stack)
        finally:
            child.kill()
    return answer.result()


async def _ask(
    host: ReplayHost,
    child: Child,
    assignment: records_pb2.WorkerAssignment,
    points: list[bytes],
    task: str,
    fields: dict[str, Any],
) -> None:
    await send_assignment(host.blobs, child, assignment)
    for point in points:
        await child.send("point", point)
    await child.send(task, **fields)


async def send_assignment(blobs: Blobs, child: Child, assignment: records_pb2.WorkerAssignment) -> None:
    """Send an assignment to a child process. Large arguments of input_fn are sent as a file descriptor."""
    name = assignment.loader.arguments_blob
    await child.send("assign", assignment.SerializeToString(), [await blobs.descriptor(name)] if name else None)


def _late(what: str, task: str, deadline_s: float, stack: str) -> DeadlineError:
    return DeadlineError(
        f"{what} did not finish the task {task} in {deadline_s:.0f} s; the stream of batches continues. Its stack is "
        "below: make the code there faster",
        remote_traceback=stack,
    )


def _first(answer: asyncio.Future[ControlMessage]) -> Callable[[ControlMessage], None]:
    def on_message(message: ControlMessage) -> None:
        if not answer.done():
            answer.set_result(message)

    return on_message
