"""Having a scratch child do one thing with a slot's loader, beside the runner that streams; the daemon's side of
scratch.py. Whatever comes of it, the stream goes on."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
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
    """The child's answer to `task`. If somebody kills the child (SIGKILL), the answer of another one.

    Raises:
        DeadlineError: it took longer; with its stack.
        WorkerLostError: it died; with its stack, if it crashed.
        PenstockError: what it failed with.
    """
    what = f"the scratch child of {name}"
    left_s = deadline_s  # of work; to wait for one's turn and for a child takes none of it
    async with host.scratch_limit:
        for last in (False, True):
            zygote = await host.zygote(assignment)
            answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
            child = await zygote.fork("scratch", f"{name} {task}", ledger, _first(answer), about_slot(assignment))
            try:
                await child.send("assign", assignment.SerializeToString())
                for base in bases:
                    await child.send("base", base)
                await child.send(task, **fields)
                either: set[asyncio.Future[Any]] = {answer, child.exited}
                began = time.monotonic()
                await asyncio.wait(either, timeout=left_s, return_when="FIRST_COMPLETED")
                left_s = max(left_s - (time.monotonic() - began), 0.0)
                if answer.done():
                    break
                if not child.exited.done():
                    stack = await child.stack()
                    raise DeadlineError(
                        f"{what} did not finish its {task} in {deadline_s:.0f} s; the stream goes on",
                        remote_traceback=stack,
                    )
                status = child.exited.result()
                if last or child.unwanted or status != -signal.SIGKILL:
                    how = f"{how_it_ended(status, what, None)} in its {task}; the stream goes on"
                    raise descriptors_closed(status, what) or WorkerLostError(how, remote_traceback=child.last_stack)
            finally:
                child.kill()
    message = answer.result()
    if message.kind == "failed":
        raise error_named(**message.fields["error"])
    return message


def _first(answer: asyncio.Future[Message]) -> Callable[[Message], None]:
    def hear(message: Message) -> None:
        if not answer.done():
            answer.set_result(message)

    return hear
