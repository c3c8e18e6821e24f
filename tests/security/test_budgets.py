"""Budgets of one caller at a coordinator: turns of its event loop, held answers, queries, bytes of values."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from bearer import metadata
from coroutines import in_loop
from fake_cluster import FakeCluster, limited
from served import coordinator, opening

from penstock.appliance.journal.snapshot_index import SnapshotIndex
from penstock.appliance.journal.snapshot_store import MemoryBudget
from penstock.appliance.limits import MIB, Limits
from penstock.proto.errors import InvalidArgumentError, OverloadedError
from penstock.proto.rpc.bounds.reply_parts import blob_name
from penstock.proto.rpc.calls import AsyncCoordinatorClient, blob_parts
from penstock.proto.rpc.channel import connect_aio
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1.coordinator_pb2_grpc import CoordinatorStub

TOKENS = "client:a-token-of-one\nclient:a-token-of-two\nworker:a-token-of-workers"


# ------------------------------------------------------------------------------------------------ turns of the loop


@limited(slots_at_once=3)
def test_slots_are_placed_in_slices() -> None:
    world = FakeCluster()
    for number in range(4):
        world.open(number, num_boxes=4, num_workers_per_box=2)
    worker = world.worker("w", 8)
    cluster = world.state_machine.cluster
    placed = [cluster.placed]
    while world.state_machine.placement.waiting:
        worker.report()
        placed.append(cluster.placed)
    assert placed == [4, 6, 8], "a box gets all of its slots"
    assert {len(box.slots) for attempt in cluster.open_attempts() for box in attempt.boxes.values()} == {2}


# ---------------------------------------------------------------------------------------------------- held answers


@in_loop
async def test_a_box_holds_few_watches() -> None:
    """Answer a hundred long polls of one box, and as many of one worker, at once, except for four of each."""
    async with (
        coordinator(limits=Limits(), tokens=TOKENS) as address,
        AsyncCoordinatorClient(address, "a-token-of-one", insecure=True) as client,
    ):
        reply = await client.open_run(opening())
        watch = pb.WatchRunRequest(run=reply.run, attempt=1, box=0, client_id="c0", hold_s=60)
        watch.seen_version = (await client.watch_run(watch)).version
        held = [asyncio.create_task(client.watch_run(watch)) for _ in range(100)]
        async with asyncio.timeout(30):
            while sum(task.done() for task in held) < 96:
                await asyncio.sleep(0.02)
        assert all(task.result().version == watch.seen_version for task in held if task.done())
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)


async def _first(call: Any) -> None:
    await call.read()


@limited(queries_of_token_max=2)
@in_loop
async def test_a_token_has_so_many_queries_open() -> None:
    async with coordinator(tokens=TOKENS) as address, connect_aio(address) as bare:
        stub = CoordinatorStub(bare)
        one, two = metadata("a-token-of-one"), metadata("a-token-of-two")
        await stub.OpenRun(opening(), metadata=one)
        query = pb.FetchStateRequest(run="job/0", attempt=1, step=0, deadline_s=60)  # no worker can answer it
        held = [asyncio.create_task(_first(stub.FetchState(query, metadata=one))) for _ in range(3)]
        done, waiting = await asyncio.wait(held, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        (refused,) = (str(task.exception()) for task in done)
        assert "one token must have at most 2 open state queries" in refused
        other = asyncio.create_task(_first(stub.FetchState(query, metadata=two)))
        done, _ = await asyncio.wait([other], timeout=0.5)
        assert not done, "another token has its own"
        for task in (*waiting, other):
            task.cancel()
        await asyncio.gather(*held, other, return_exceptions=True)


# ------------------------------------------------------------------------------------------------------------ room


def test_one_token_does_not_fill_the_blob_budget() -> None:
    snapshot_index = SnapshotIndex(1000)
    snapshot_index.add_blob("a", 500, 0.0, "one")
    assert (
        "500 of 600 bytes of the coordinator's budget for such values from one token"
        in snapshot_index.why_blob_refused(101, "one")
    )
    assert not snapshot_index.why_blob_refused(100, "one")
    assert not snapshot_index.why_blob_refused(400, "two")
    assert "500 of 900 bytes of the coordinator's budget for such values are" in snapshot_index.why_blob_refused(
        401, "two"
    )


@in_loop
async def test_uploads_of_a_token_wait_for_their_own() -> None:
    """Delay other tokens by at most the one upload that is running, however many values a token sends."""
    room, came = MemoryBudget(10), list[str]()

    async def one(who: str, size: int) -> None:
        async with room.taken(size, who):
            came.append(who)
            await asyncio.sleep(0.001)

    tasks = [asyncio.create_task(one("greedy", 5)) for _ in range(100)]
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(one("other", 5)))
    await asyncio.gather(*tasks)
    assert came.index("other") <= 3
    assert room._used == 0
    assert not room._by_token


@limited(part_s=1.0, least_bytes_per_s=64 * MIB, reads_max=MIB)
@in_loop
async def test_a_reader_that_takes_nothing_is_ended() -> None:
    """Its value is in memory, and others wait for the room."""
    async with (
        coordinator(limits=Limits(), tokens=TOKENS) as address,
        AsyncCoordinatorClient(address, "a-token-of-workers", insecure=True) as client,
        connect_aio(address) as bare,
    ):
        data = b"x" * (24 * MIB)
        stub, name = CoordinatorStub(bare), blob_name(data)
        await stub.PutBlob(blob_parts(data, "run"), metadata=metadata("a-token-of-one"))
        slow = stub.GetBlob(pb.GetBlobRequest(blob=name), metadata=metadata("a-token-of-workers"))
        await slow.read()
        async with asyncio.timeout(60):
            assert await client.get_blob(name) == data  # waits until the slow one is ended
        slow.cancel()


def test_a_worker_has_so_many_slots() -> None:
    with pytest.raises(InvalidArgumentError, match="slots of one worker must be at most 1024, got 1025"):
        FakeCluster().worker("w", 1025)


@limited(slots_max=4)
def test_slots_of_one_token_are_counted() -> None:
    world = FakeCluster()
    world.open(job="a", num_workers_per_box=3)
    with pytest.raises(OverloadedError, match="with this token must have at most 4 workers in all, got 3"):
        world.open(job="b", num_workers_per_box=2)


def test_a_registration_has_so_many_bytes() -> None:
    """Bound a registration: it is kept, and is part of every status, and eight of 4 MiB would exceed a reply."""
    request = pb.RegisterWorkerRequest(worker="w", session="s", slots=1, allow=["x" * 20_000])
    with pytest.raises(InvalidArgumentError, match="a worker's registration must have at most 16384 bytes, got 200"):
        FakeCluster().state_machine.workers.register_worker(request)


def test_a_report_tells_little_of_a_loader() -> None:
    world = FakeCluster()
    world.open()
    worker = world.worker("w", 2)
    report = worker.slot_report(worker.heartbeat().assignments[0], pb.READY)
    report.capabilities.not_used = "x" * 20_000
    with pytest.raises(InvalidArgumentError, match="bytes of a loader's capabilities in a request"):
        worker.heartbeat(report)
