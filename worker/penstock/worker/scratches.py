"""Having a scratch child do one thing with a slot's loader, beside the runner that streams; the daemon's side of
scratch.py. Whatever comes of it, the stream goes on."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from penstock.proto.errors import DeadlineError, WorkerLostError, error_named
from penstock.proto.v1 import records_pb2
from penstock.worker.children import Zygote, about_slot
from penstock.worker.control import Message
from penstock.worker.endings import descriptors_closed, how_it_ended
from penstock.worker.ledger import Ledger

__all__ = ["DEADLINE_S", "ScratchHost", "run_task"]

DEADLINE_S = 120.0


class ScratchHost(Protocol):
    """What it needs of the daemon."""

    scratch_limit: asyncio.Semaphore

    async def zygote(self, assignment: records_pb2.WorkerAssignment) -> Zygote: ...


async def run_task(
    host: ScratchHost,
    assignment: records_pb2.WorkerAssignment,
    name: str,
    ledger: Ledger,
    bases: list[bytes],
    task: str,
    deadline_s: float = DEADLINE_S,
    **fields: Any,
) -> Message:
    """The child's answer to `task`.

    Raises:
        DeadlineError: it took longer; with its stack.
        WorkerLostError: it died; with its stack, if it crashed.
        PenstockError: what it failed with.
    """
    answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

    def hear(message: Message) -> None:
        if not answer.done():
            answer.set_result(message)

    async with host.scratch_limit:
        zygote = await host.zygote(assignment)
        child = await zygote.fork("scratch", f"{name} {task}", ledger, hear, about_slot(assignment))
        try:
            await child.send("assign", assignment.SerializeToString())
            for base in bases:
                await child.send("base", base)
            await child.send(task, **fields)
            either: set[asyncio.Future[Any]] = {answer, child.exited}
            await asyncio.wait(either, timeout=deadline_s, return_when="FIRST_COMPLETED")
            if not answer.done():
                what = f"the scratch child of {name}"
                if child.exited.done():
                    status = child.exited.result()
                    how = f"{how_it_ended(status, what, None)} in its {task}; the stream goes on"
                    raise descriptors_closed(status, what) or WorkerLostError(how, remote_traceback=child.last_stack)
                stack = await child.stack()
                raise DeadlineError(
                    f"{what} did not finish its {task} in {deadline_s:.0f} s; the stream goes on",
                    remote_traceback=stack,
                )
            message = answer.result()
        finally:
            child.kill()
    if message.kind == "failed":
        raise error_named(**message.fields["error"])
    return message
