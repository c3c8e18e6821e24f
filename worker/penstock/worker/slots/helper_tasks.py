"""The daemon's side of helper processes (replayer.py), each of which does one task with a slot's loader while the
runner streams on."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping
from typing import Any

from penstock.proto.errors import DeadlineError, WorkerLostError, error_named
from penstock.proto.state.restartable import by_own_methods
from penstock.proto.v1 import records_pb2
from penstock.runtime.process.end import describe_exit
from penstock.worker.processes.child_processes import Child, about_slot, descriptors_closed
from penstock.worker.processes.control_channel import ControlMessage
from penstock.worker.slots.blobs import Blobs
from penstock.worker.slots.slot_record import SlotHost, SlotRecord

AGAIN: Mapping[int | None, int] = {-signal.SIGKILL: 1, -signal.SIGTERM: 3}
"""Exit status of a helper -> how often another one is started after it. With SIGTERM one ends itself, see
user_errors.py; a launcher may send a job several."""
TRIES = 1 + max(AGAIN.values())


async def run_task(
    host: SlotHost, slot: SlotRecord, points: list[bytes], task: str, deadline_s: float, **fields: Any
) -> ControlMessage:
    """Let a helper do `task` (message kind, with `fields`), and return its answer. If it or its fork server is killed
    by SIGKILL, another one does it; also if a signal to the whole job ended processes of user code in it. points:
    serialized, in the order to try. deadline_s: without turns and starts. Raises DeadlineError with the helper's stack,
    WorkerLostError (with it after a crash), InputFnError (user code closed the control socket), or the task's
    PenstockError."""
    begins = task == "mixture" or (task == "state" and by_own_methods(slot.capabilities))
    if begins and slot.assignment.resume.blob:
        points = [*points, await host.blobs.read(slot.assignment.resume.blob)]
    async with host.helper_turns.turn(urgent=True):
        message = await _by_child(host, slot, points, task, deadline_s, fields)
    if message.kind == "failed":
        raise error_named(**message.fields["error"])
    return message


async def _by_child(
    host: SlotHost, slot: SlotRecord, points: list[bytes], task: str, deadline_s: float, fields: dict[str, Any]
) -> ControlMessage:
    what, left_s, assignment = f"the helper process of {slot.name}", deadline_s, slot.assignment
    for number in range(TRIES):
        fork_server = await host.fork_server.get()
        answer: asyncio.Future[ControlMessage] = asyncio.get_running_loop().create_future()

        def on_message(message: ControlMessage, answer: asyncio.Future[ControlMessage] = answer) -> None:
            if not answer.done():
                answer.set_result(message)

        try:
            name = f"{slot.name} {task}"
            child = await fork_server.fork("task", name, slot.progress_page, on_message, about_slot(assignment))
        except WorkerLostError:
            if number:
                raise
            continue
        try:
            await send_assignment(host.blobs, child, assignment)
            for point in points:
                await child.send("point", point)
            await child.send(task, **fields)
            either: set[asyncio.Future[Any]] = {answer, child.exited}
            began = time.monotonic()
            await asyncio.wait(either, timeout=left_s, return_when="FIRST_COMPLETED")
            left_s = max(left_s - (time.monotonic() - began), 0.0)
            if answer.done():
                break
            if not child.exited.done():
                late = f"{what} did not finish the task {task} in {deadline_s:.0f} s; the stream of batches continues"
                raise DeadlineError(late, remote_traceback=await child.stack())
            status = child.exited.result()
            if number >= AGAIN.get(status, 0) or child.unwanted:
                how = f"{what} {describe_exit(status)} during the task {task}; the stream of batches continues"
                raise descriptors_closed(status, what) or WorkerLostError(how, remote_traceback=child.last_stack)
        finally:
            child.kill()
    return answer.result()


async def send_assignment(blobs: Blobs, child: Child, assignment: records_pb2.WorkerAssignment) -> None:
    """Send an assignment. Large arguments are sent as a descriptor."""
    name = assignment.loader.arguments_blob
    fds = [await blobs.descriptor(name)] if name else None
    await child.send("assign", assignment.SerializeToString(), fds, most_bytes=child.most_bytes)
