"""Budgets of one caller at a coordinator: turns of its event loop, held answers, queries, bytes of values."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from bearer import metadata
from fake_cluster import FakeCluster, limited
from served import coordinator

from penstock.appliance.core.migration import MIGRATION_S
from penstock.appliance.journal.journal import StateDir
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


def opening() -> pb.OpenRunRequest:
    request = pb.OpenRunRequest(job="job", client_id="c", num_boxes=1, num_workers_per_box=1)
    request.loader.input_fn = "m:f"
    return request


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
    assert placed == [3, 6, 8]
    assert {len(box.slots) for attempt in cluster.open_attempts() for box in attempt.boxes.values()} == {2}


@limited(slots_at_once=2)
def test_unplaceable_slots_delay_no_others() -> None:
    """Skip them, a slice at a time, and place the slots behind them."""
    world = FakeCluster()
    stuck, served = pb.OpenRunRequest(job="stuck"), pb.OpenRunRequest(job="served")
    stuck.loader.input_fn, served.loader.input_fn = "elsewhere:f", "here:f"
    request = pb.RegisterWorkerRequest(worker="w", session="s", host_id="h", slots=8, allow=["here"])
    world.open(job="stuck", num_workers_per_box=7, loader=stuck.loader)
    world.open(job="served", num_workers_per_box=2, loader=served.loader)
    world.state_machine.workers.register_worker(request)
    for _ in range(8):
        world.heartbeat(pb.HeartbeatRequest(worker="w", session="s"))
    assert [slot.worker for slot in world.slots()] == [""] * 7 + ["w"] * 2


@limited(slots_at_once=4)
def test_a_fleet_that_is_lost_goes_in_slices() -> None:
    world = FakeCluster()
    workers = [world.worker(f"w{number}", 2) for number in range(6)]
    box = world.open(num_workers_per_box=12)
    for _ in range(4):
        workers[0].report()
    cluster = world.state_machine.cluster
    assert cluster.placed == 12
    left = [6]
    while left[-1]:
        world.run_for(0.25, [box])
        left.append(len(cluster.workers))
    assert left[-3:] == [4, 2, 0]
    assert [slot.worker for slot in world.slots()] == [""] * 12


def test_a_close_looks_at_no_other_box() -> None:
    """Look at no other box when one is closed. Otherwise the time of all closes would grow with the square of their
    number."""

    class Counted(dict[int, Any]):
        looks = 0

        def values(self) -> Any:
            type(self).looks += 1
            return super().values()

    world = FakeCluster()
    boxes = [world.open(number, num_boxes=8, num_workers_per_box=1) for number in range(8)]
    (attempt,) = world.state_machine.cluster.open_attempts()
    attempt.boxes = Counted(attempt.boxes)
    for box in boxes[:-1]:
        box.close()
        assert attempt.live == {
            other.number for other in attempt.boxes.copy().values() if other.presence.name == "LIVE"
        }
    assert attempt.live == {7}
    assert Counted.looks == 0


@limited(slots_at_once=4)
def test_runners_that_end_together_go_in_slices() -> None:
    """A report of 1,024 lost slots took 77 ms; what is left of it is in the next one, which follows at once."""
    world = FakeCluster()
    worker = world.worker("w", 6)
    world.open(0, num_boxes=1, num_workers_per_box=6)
    while world.state_machine.placement.waiting:
        world.state_machine.tick()
    given = worker.heartbeat().assignments
    assert len(given) == 6
    world.worker("other", 6)
    lost = [worker.slot_report(assignment, pb.FAILED) for assignment in given]
    for report in lost:
        report.lost = True
    left: list[int] = []
    while not left or left[-1]:
        worker.heartbeat(*lost)
        left.append(sum(slot.generation == 1 for slot in world.slots()))
    assert left == [4, 2, 0]
    assert all(slot.restarts == 1 for slot in world.slots())


@limited(slots_at_once=4)
def test_boxes_that_are_lost_go_in_slices() -> None:
    world = FakeCluster()
    for number in range(6):
        world.open(number, num_boxes=6, num_workers_per_box=2)
    live = [6]
    while live[-1]:
        world.run_for(0.25)
        live.append(world.state_machine.cluster.live_boxes)
    assert live[-3:] == [4, 2, 0]


@limited(slots_at_once=3)
def test_next_attempt_gets_the_freed_slots() -> None:
    world = FakeCluster()
    world.worker("w", 8)
    world.open(num_workers_per_box=8, attempt_key="1")
    for _ in range(4):
        world.state_machine.tick()
    assert world.state_machine.cluster.placed == 8
    world.open(num_workers_per_box=8, attempt_key="2", client_id="again")
    for _ in range(4):
        world.state_machine.tick()
    slots = world.slots()
    assert [slot.worker for slot in slots] == ["w"] * 8
    assert {slot.key.attempt for slot in slots} == {2}
    assert set(world.state_machine.cluster.workers["w"].slots) == {slot.key for slot in slots}


@limited(slots_at_once=1)
def test_hand_overs_end_with_their_attempt() -> None:
    """Migrate nothing for an attempt that is over."""
    world = FakeCluster()
    leaving = world.worker("a", 3)
    for number in range(3):
        world.open(number, num_boxes=3, num_workers_per_box=1, attempt_key="1")
    while world.state_machine.placement.waiting:
        world.state_machine.tick()
    leaving.ready()
    coming = world.worker("b", 3)
    world.state_machine.workers.drain_worker(pb.DrainWorkerRequest(worker="a"))
    coming.ready()
    assert len(world.state_machine.placement.migrating) == 3
    world.open(0, num_boxes=3, num_workers_per_box=1, attempt_key="2", client_id="again")
    assert not world.state_machine.placement.migrating
    world.now += MIGRATION_S + 0.1
    world.state_machine.tick()
    world.run_for(3, [leaving, coming])
    assert not world.state_machine.placement.migrating
    assert [slot.worker for slot in world.slots()] == ["b"]


# ---------------------------------------------------------------------------------------------------- held answers


def test_a_box_holds_few_watches() -> None:
    """Answer a hundred long polls of one box, and as many of one worker, at once, except for four of each."""

    async def run() -> None:
        async with (
            coordinator(limits=Limits(), tokens=TOKENS) as address,
            AsyncCoordinatorClient(address, "a-token-of-one") as client,
        ):
            reply = await client.open_run(opening())
            watch = pb.WatchRunRequest(run=reply.run, attempt=1, box=0, client_id="c", hold_s=60)
            watch.seen_version = (await client.watch_run(watch)).version
            held = [asyncio.create_task(client.watch_run(watch)) for _ in range(100)]
            async with asyncio.timeout(30):
                while sum(task.done() for task in held) < 96:
                    await asyncio.sleep(0.02)
            assert all(task.result().version == watch.seen_version for task in held if task.done())
            for task in held:
                task.cancel()
            await asyncio.gather(*held, return_exceptions=True)

    asyncio.run(run())


async def _first(call: Any) -> None:
    await call.read()


@limited(queries_of_token_max=2)
def test_a_token_has_so_many_queries_open() -> None:
    async def run() -> None:
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

    asyncio.run(run())


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


def test_uploads_of_a_token_wait_for_their_own() -> None:
    """Delay other tokens by at most the one upload that is running, however many values a token sends."""

    async def run() -> None:
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

    asyncio.run(run())


@limited(part_s=1.0, least_bytes_per_s=64 * MIB, reads_max=MIB)
def test_a_reader_that_takes_nothing_is_ended() -> None:
    """Its value is in memory, and others wait for the room."""

    async def run() -> None:
        async with (
            coordinator(limits=Limits(), tokens=TOKENS) as address,
            AsyncCoordinatorClient(address, "a-token-of-workers") as client,
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

    asyncio.run(run())


def test_a_worker_has_so_many_slots() -> None:
    with pytest.raises(InvalidArgumentError, match="slots of one worker must be at most 1024, got 1025"):
        FakeCluster().worker("w", 1025)


def test_a_journal_may_hold_larger_workers(tmp_path: Path) -> None:
    """Start on it, and tell the worker that has more slots than a coordinator takes now."""
    directory = StateDir(tmp_path)
    world = FakeCluster(directory=directory)
    worker, _ = world.worker("w", 8), world.open(num_workers_per_box=8)
    worker.ready()
    with limited(worker_slots_max=4):
        world.restart()
        with pytest.raises(
            InvalidArgumentError, match=r"slots of one worker must be at most 4, got 8: start several workers"
        ):
            worker.register()
        worker.capacity = 4
        worker.register()
    assert len(worker.heartbeat().assignments) == 4
    world.worker("other", 4)
    worker.report()
    assert {slot.worker for slot in world.slots()} == {"w", "other"}
    world.journal.close()
    directory.close()


@limited(slots_max=4)
def test_slots_of_one_token_are_counted() -> None:
    world = FakeCluster()
    world.open(job="a", num_workers_per_box=3)
    with pytest.raises(OverloadedError, match="with this token must have at most 4 workers in all, got 3"):
        world.open(job="b", num_workers_per_box=2)


@pytest.mark.parametrize("field", ["session", "host_id", "local_address", "allow"])
def test_a_registration_has_so_many_bytes(field: str) -> None:
    """Bound a registration: it is kept, and is part of every status, and eight of 4 MiB would exceed a reply."""
    request = pb.RegisterWorkerRequest(worker="w", session="s", slots=1)
    if field == "allow":
        request.allow.append("x" * 20_000)
    else:
        setattr(request, field, "x" * 20_000)
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


@pytest.mark.parametrize("lease_s", [math.nan, math.inf, -1.0])
def test_a_lease_is_a_number_of_seconds(lease_s: float) -> None:
    world = FakeCluster()
    box = world.open()
    world.worker("w", 1)
    with pytest.raises(InvalidArgumentError, match="lease_s in a request to the coordinator must be"):
        world.heartbeat(pb.HeartbeatRequest(worker="w", session="s", lease_s=lease_s))
    watch = box.progress()
    watch.lease_s = lease_s
    with pytest.raises(InvalidArgumentError, match="lease_s in a request to the coordinator must be"):
        world.watch(watch)
