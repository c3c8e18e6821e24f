"""A coordinator over real sockets in the test's own loop, with workers that have no runners."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from coroutines import Test, as_test

from penstock.appliance.limits import Limits
from penstock.appliance.server.server import IN_MEMORY, serve
from penstock.proto.rpc.calls import AsyncCoordinatorClient
from penstock.proto.state.position import Position
from penstock.proto.v1 import coordinator_pb2 as pb

TOKEN = "token"
DEADLINE_S = 60.0
LIMITS = replace(Limits(), worker_lease_s=20.0, client_lease_s=20.0)
"""Leases that no test on a busy machine outlives by accident."""


@contextlib.asynccontextmanager
async def coordinator(
    state_dir: str | Path = IN_MEMORY, limits: Limits = LIMITS, tokens: str = TOKEN
) -> AsyncIterator[str]:
    """A coordinator in this loop; yields its address."""
    stop = asyncio.Event()
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(
        serve("127.0.0.1:0", state_dir, tokens, ready=address.set_result, stop=stop, limits=limits)
    )
    running.add_done_callback(lambda _: address.done() or address.cancel())
    try:
        yield await address
    finally:
        stop.set()
        await running


Say = Callable[[pb.StateRequest], tuple[pb.StateAnswer, bytes]]


def plain_state(request: pb.StateRequest) -> tuple[pb.StateAnswer, bytes]:
    data = f"{request.box}.{request.slot}:{request.epoch}.{request.position.total}".encode()
    return pb.StateAnswer(samples_streamed=request.position.total), data


@dataclass
class Daemon:
    """A worker without runners: all that it is given is ready at once; states are what `say` makes of requests."""

    client: AsyncCoordinatorClient
    name: str
    say: Say = plain_state
    slots: int = 8
    reply: pb.HeartbeatReply = field(default_factory=pb.HeartbeatReply)
    answered: set[str] = field(default_factory=set)
    asked: list[pb.StateRequest] = field(default_factory=list)
    heartbeats: int = 0

    async def run(self) -> None:
        await self.client.register(
            pb.RegisterWorkerRequest(
                worker=self.name, session="s", slots=self.slots, host_id="host-a", tcp_address="t:1"
            )
        )
        while True:
            reports = [
                pb.SlotReport(
                    run=a.run, attempt=a.attempt, box=a.box, slot=a.slot, generation=a.generation, phase=pb.READY
                )
                for a in self.reply.assignments
            ]
            self.heartbeats += 1
            reply = await self.client.heartbeat(
                pb.HeartbeatRequest(
                    worker=self.name, session="s", slots=reports, seen_version=self.reply.version, hold_s=30
                )
            )
            if reply.unchanged:
                continue
            self.reply = reply
            for request in self.reply.state_requests:
                if request.request not in self.answered:
                    self.answered.add(request.request)
                    self.asked.append(request)
                    answer, data = self.say(request)
                    answer.request, answer.worker, answer.session = request.request, self.name, "s"
                    await self.client.put_state(answer, data)


@contextlib.asynccontextmanager
async def daemon(address: str, name: str = "w", say: Say = plain_state, slots: int = 8) -> AsyncIterator[Daemon]:
    async with AsyncCoordinatorClient(address, TOKEN, insecure=True) as client:
        worker = Daemon(client, name, say, slots)
        task = asyncio.create_task(worker.run())
        try:
            yield worker
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def all_ready(client: AsyncCoordinatorClient) -> pb.HeartbeatRequest:
    """A worker "w" by hand, whose slots are ready; its heartbeat, to be sent again."""
    await client.register(pb.RegisterWorkerRequest(worker="w", session="s", slots=4))
    heartbeat = pb.HeartbeatRequest(worker="w", session="s")
    for a in (await client.heartbeat(heartbeat)).assignments:
        heartbeat.slots.add(
            run=a.run, attempt=a.attempt, box=a.box, slot=a.slot, generation=a.generation, phase=pb.READY
        )
    await client.heartbeat(heartbeat)
    return heartbeat


def opening(box: int = 0, **fields: object) -> pb.OpenRunRequest:
    request = pb.OpenRunRequest(job="job", box=box, num_boxes=1, num_workers_per_box=2, client_id=f"c{box}")
    request.host_id, request.loader.input_fn, request.loader.options.retention_steps = "host-a", "m:f", 100
    request.MergeFrom(pb.OpenRunRequest(**fields))  # type: ignore[arg-type]
    return request


def watching(box: int = 0, steps: int = 0, slots: int = 2, **fields: object) -> pb.WatchRunRequest:
    request = pb.WatchRunRequest(run="job/0", attempt=1, box=box, client_id=f"c{box}")
    if steps:
        position = Position.start(slots)
        for _ in range(steps):
            position.deliver()
        request.delivered.CopyFrom(position.to_proto())
    request.MergeFrom(pb.WatchRunRequest(**fields))  # type: ignore[arg-type]
    return request


async def until_ready(client: AsyncCoordinatorClient, **fields: object) -> pb.WatchRunReply:
    """Watches, as a client does, until all slots of the box are ready."""
    reply = pb.WatchRunReply()
    async with asyncio.timeout(DEADLINE_S):
        while not reply.slots or any(slot.phase != pb.READY for slot in reply.slots):
            reply = await client.watch_run(watching(seen_version=reply.version, hold_s=30, **fields))  # type: ignore[arg-type]
    return reply


Body = Callable[[AsyncCoordinatorClient, str], Awaitable[None]]


def trial(body: Body, limits: Limits = LIMITS, state_dir: str | Path = IN_MEMORY) -> None:
    async def run() -> None:
        async with (
            coordinator(state_dir, limits) as address,
            AsyncCoordinatorClient(address, TOKEN, insecure=True) as client,
        ):
            await body(client, address)

    asyncio.run(run())


def on_coordinator(limits: Limits = LIMITS) -> Callable[[Test], Callable[..., None]]:
    """Make a test of a coroutine function: it may name `client`, `address` and fixtures."""
    return as_test(lambda test: trial(test, limits), "client", "address")


def asking(box: int, step: int, deadline_s: float = DEADLINE_S, **progress: object) -> pb.FetchStateRequest:
    request = pb.FetchStateRequest(run="job/0", attempt=1, step=step, deadline_s=deadline_s)
    request.progress.CopyFrom(watching(box, step, **progress))  # type: ignore[arg-type]
    return request
