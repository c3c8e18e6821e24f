"""Calls over real sockets that fail, or whose peers leave or come back, at a bad moment."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from bearer import metadata
from fake_cluster import limited
from grpc.aio import EOF
from served import (
    DEADLINE_S,
    LIMITS,
    TOKEN,
    all_ready,
    asking,
    daemon,
    on_coordinator,
    opening,
    plain_state,
    trial,
    until_ready,
)

from penstock.appliance.core.state_machine import StateMachine
from penstock.appliance.journal.snapshot_index import BLOB_IDLE_S, Drop, DropAttempt, DropBlob
from penstock.appliance.journal.snapshot_store import Store
from penstock.appliance.server.service import Service
from penstock.proto.rpc.calls import AsyncCoordinatorClient
from penstock.proto.rpc.channel import CHUNK
from penstock.proto.v1 import coordinator_pb2 as pb

LONG_S = 10_000.0


@pytest.fixture
def state_machines(monkeypatch: pytest.MonkeyPatch) -> list[StateMachine]:
    """Registries made in the test."""
    made: list[StateMachine] = []
    init = StateMachine.__init__

    def noted(self: StateMachine, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(StateMachine, "__init__", noted)
    return made


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not what():
            await asyncio.sleep(0.005)


@limited(answers_max=10)
@on_coordinator()
async def test_answer_without_callers_is_not_taken(
    client: AsyncCoordinatorClient, state_machines: list[StateMachine]
) -> None:
    """Refuse the answer: it would be in memory and in no budget, a thousand at once for a large fleet."""
    for box in (0, 1):
        await client.open_run(opening(box, num_boxes=2))
    heartbeat = await all_ready(client)
    (state_machine,) = state_machines
    asker = asyncio.create_task(client.fetch_state(asking(0, 2)))
    await until(lambda: len(state_machine.state_queries._by_request) == 4)
    requests = (await client.heartbeat(heartbeat)).state_requests
    request = next(one for one in requests if one.box == 0)  # those of the next box are let in
    left = asyncio.Event()

    async def parts() -> AsyncIterator[pb.AnswerPart]:
        answer = pb.StateAnswer(request=request.request, worker="w", session="s", state_bytes=1000)
        yield pb.AnswerPart(answer=answer, data=b"x")
        await left.wait()
        yield pb.AnswerPart(data=b"x")
        await asyncio.Event().wait()  # the rest is only sent if somebody takes it

    call = client._stub.PutState(parts(), timeout=DEADLINE_S, metadata=metadata(TOKEN))
    query = next(iter(state_machine.state_queries._open.values()))
    await until(lambda: query.held == 1000)
    asker.cancel()
    await until(lambda: not state_machine.state_queries._open)
    left.set()
    assert await call == b""  # PutStateReply()
    assert query.held == 0


@on_coordinator()
async def test_readers_time_extends_the_deadline(
    client: AsyncCoordinatorClient, address: str, state_machines: list[StateMachine]
) -> None:
    """Extend the deadline with each part, not only after the box: else the workers' requests would end."""

    def large(request: pb.StateRequest) -> tuple[pb.StateAnswer, bytes]:
        return pb.StateAnswer(), bytes(8 << 20)

    await client.open_run(opening())
    async with daemon(address, "w", large):
        await until_ready(client)
        (state_machine,) = state_machines
        call = client._stub.FetchState(asking(0, 2), timeout=DEADLINE_S, metadata=metadata(TOKEN))
        await call.read()
        (query,) = state_machine.state_queries._open.values()
        before = query.deadline
        while query.deadline == before:
            assert await call.read() is not EOF
        assert query.callers == 1
        call.cancel()


@on_coordinator()
async def test_state_begins_anew_where_the_loaders_do(
    client: AsyncCoordinatorClient, address: str, state_machines: list[StateMachine]
) -> None:
    """All slots are restarted when one box's states were sent. States from before and after count from different
    steps, and no caller may get both."""

    def by_generation(request: pb.StateRequest) -> tuple[pb.StateAnswer, bytes]:
        return plain_state(request)[0], b"%d" % request.generation * 2 * CHUNK

    await client.open_run(opening(0, num_boxes=2))
    await client.register(pb.RegisterWorkerRequest(worker="far", session="s", slots=2))
    async with daemon(address, "w1", by_generation, slots=2):
        await until_ready(client)
        await client.deregister(pb.DeregisterWorkerRequest(worker="far", session="s"))
        await client.open_run(opening(1, num_boxes=2))
        fetching = asyncio.ensure_future(client.fetch_state(asking(0, 2)))
        (state_machine,) = state_machines
        queries = state_machine.state_queries._open
        await until(lambda: any(query.sent.get(0) for query in queries.values()))
        attempt = state_machine.cluster.runs["job/0"].current
        assert attempt is not None
        state_machine.placement._begin_again(attempt, "a restart")
        state_machine.settle()
        async with daemon(address, "w2", by_generation, slots=2):
            found = await fetching
    assert [(record.box, data[:1]) for record, data in found.records] == [(0, b"2"), (0, b"2"), (1, b"1"), (1, b"1")]


def test_late_connection_loss_costs_nothing(
    state_machines: list[StateMachine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new heartbeat may be held for longer than is left to one that has hung up."""
    ended = 0
    heartbeat = Service.Heartbeat

    async def told(self: Service, *args: Any) -> pb.HeartbeatReply:
        nonlocal ended
        try:
            return await heartbeat(self, *args)
        finally:
            ended += 1

    monkeypatch.setattr(Service, "Heartbeat", told)

    async def body(client: AsyncCoordinatorClient, address: str) -> None:
        await client.register(pb.RegisterWorkerRequest(worker="w", session="s", slots=4))
        (state_machine,) = state_machines
        (worker,) = state_machine.cluster.workers.values()
        held = 0
        hold = state_machine.workers.worker_hold

        def counted(request: pb.HeartbeatRequest) -> float:
            nonlocal held
            held += 1
            return hold(request)

        state_machine.workers.worker_hold = counted  # type: ignore[method-assign]
        beat = pb.HeartbeatRequest(worker="w", session="s", seen_version=worker.version, hold_s=LONG_S)
        async with AsyncCoordinatorClient(address, TOKEN, insecure=True) as again:
            before = asyncio.create_task(client.heartbeat(beat))
            await until(lambda: held == 1)
            after = asyncio.create_task(again.heartbeat(beat))
            await until(lambda: held == 2)
            lease_until = worker.lease_until
            before.cancel()
            await until(lambda: ended == 1)
            assert worker.lease_until == lease_until
            after.cancel()
            await until(lambda: worker.lease_until < lease_until)

    with limited(heartbeat_s=LONG_S):
        trial(body, replace(LIMITS, worker_lease_s=3 * LONG_S))


def test_blob_resent_before_its_drop_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    services: list[Service] = []
    init, drop, go = Service.__init__, Store.drop, threading.Event()

    def noted(self: Service, *args: Any) -> None:
        init(self, *args)
        services.append(self)

    def gated(self: Store, drops: Sequence[Drop]) -> list[Drop]:
        assert go.wait(DEADLINE_S)
        return drop(self, drops)

    monkeypatch.setattr(Service, "__init__", noted)
    monkeypatch.setattr(Store, "drop", gated)

    async def body(client: AsyncCoordinatorClient, address: str) -> None:
        name = await client.put_blob(b"state", "job/0")
        (service,) = services
        snapshot_index = service._snapshot_index
        service._disk.drop([DropAttempt("another", 1)], service._not_dropped)  # which is large
        snapshot_index.drop_idle_blobs(set(), time.monotonic() + 2 * BLOB_IDLE_S)
        assert not snapshot_index.has_blob(name)
        await until(lambda: service._drops == [DropBlob(name)])
        again = asyncio.create_task(client.put_blob(b"state", "job/0"))
        await until(lambda: snapshot_index.coming > 0)
        go.set()
        assert await again == name
        await until(lambda: not service._drops and not service._disk.is_dropping)
        assert await client.get_blob(name) == b"state"

    trial(body, replace(LIMITS, worker_lease_s=1.0))
