"""Requests whose numbers would harm others than who sent them, at a real coordinator; rows of a journal that rot."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
from bearer import metadata
from coroutines import in_loop
from fake_cluster import FakeCluster, limited
from served import TOKEN, coordinator

from penstock.appliance.journal.journal import Journal, StateDir
from penstock.proto.errors import InvalidArgumentError, JournalError
from penstock.proto.rpc.calls import AsyncCoordinatorClient
from penstock.proto.state.position import MOST, Position
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2

BAD_SECONDS = [math.nan, -1.0, 1e300]
HUGE = (1 << 64) - 1


@in_loop
async def test_invalid_seconds_are_refused_at_no_cost() -> None:
    """A hold of NaN seconds was a loop without a pause."""
    async with coordinator() as address, AsyncCoordinatorClient(address, TOKEN, insecure=True) as client:
        opening = pb.OpenRunRequest(job="job", client_id="c", num_boxes=1, num_workers_per_box=1)
        opening.loader.input_fn = "m:f"
        await client.open_run(opening)
        await client.register(pb.RegisterWorkerRequest(worker="w", session="s", slots=1))
        for bad in BAD_SECONDS:
            watch = pb.WatchRunRequest(run="job/0", attempt=1, client_id="c", hold_s=bad)
            beat = pb.HeartbeatRequest(worker="w", session="s", hold_s=bad)
            report = pb.SlotReport(run="job/0", attempt=1, generation=1, batches_per_s=bad)
            calls: list[Any] = [
                client._stub.WatchRun(watch, timeout=5, metadata=metadata(TOKEN)),
                client._stub.Heartbeat(beat, timeout=5, metadata=metadata(TOKEN)),
            ]
            began = time.process_time()
            for call in calls:
                with pytest.raises(Exception, match=r"hold_s in a request to the coordinator must be"):
                    await call
            assert time.process_time() - began < 2.0
            with pytest.raises(InvalidArgumentError, match="batches_per_s"):
                await client.heartbeat(pb.HeartbeatRequest(worker="w", session="s", slots=[report]))
            fetch = pb.FetchStateRequest(run="job/0", attempt=1, step=0, deadline_s=bad)
            with pytest.raises(Exception, match=r"deadline_s in a request to the coordinator must be"):
                async for _ in client._stub.FetchState(fetch, timeout=5, metadata=metadata(TOKEN)):
                    pass


@in_loop
async def test_snapshot_with_too_large_numbers_refused() -> None:
    async with coordinator() as address, AsyncCoordinatorClient(address, TOKEN, insecure=True) as client:
        for name in ("total", "epoch", "delivered", "samples", "step"):
            header = pb.SnapshotHeader(run="job/0", attempt=1, generation=1)
            setattr(header, name, HUGE)
            with pytest.raises(InvalidArgumentError, match=name):
                await client.put_snapshot(header, b"state")


def opening(**base: Any) -> pb.OpenRunRequest:
    slot = records_pb2.SlotPosition(delivered=base.pop("delivered", 0), total=base.pop("total", 0))
    position = records_pb2.BoxPosition(live=[0], slots=[slot], **base)
    request = pb.OpenRunRequest(job="far", client_id="c", num_boxes=1, num_workers_per_box=1, start=position)
    request.loader.input_fn = "m:f"
    return request


@pytest.mark.parametrize("base", [{"step": HUGE}, {"epoch": HUGE}, {"total": HUGE}, {"delivered": 2, "total": 1}])
def test_start_beyond_counting_is_refused(base: dict[str, int]) -> None:
    """Refuse a position that overflowed the next message made from it, another client's heartbeat."""
    world = FakeCluster()
    with pytest.raises(InvalidArgumentError):
        world.state_machine.attempts.open_run(opening(**base))
    if "total" not in base:
        bare = opening(**base)
        del bare.start.slots[:]
        with pytest.raises(InvalidArgumentError):
            world.state_machine.attempts.open_run(bare)
    world.state_machine.attempts.open_run(opening(step=MOST, epoch=MOST, total=MOST))
    worker = world.worker("w")
    assert len(worker.heartbeat().assignments) == 1


@limited(ends_max=100, abandoned_max=50)
def test_answers_and_reports_are_bounded() -> None:
    world = FakeCluster()
    world.worker("w")
    box = world.open()
    with pytest.raises(InvalidArgumentError, match="ends of"):
        world.state_machine.answer_state(pb.StateAnswer(ends=[records_pb2.EpochEnd(epoch=n) for n in range(5000)]), b"")
    for epoch in range(200):
        box.position = Position(epoch, epoch, [0], 0, [1, 0], [epoch + 1, 0])
        box.watch()
    (held,) = world.state_machine.cluster.open_attempts()[0].boxes.values()
    assert len(held.ends) <= 102
    assert (1, 199) in held.ends
    box.abandoned = dict.fromkeys(range(51), 1)
    with pytest.raises(InvalidArgumentError, match="epochs"):
        box.watch()


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("attempts", "state", "rotten"),
        ("boxes", "opening", b"\xff\xff"),
        ("boxes", "run", "another"),
    ],
)
def test_inconsistent_rows_stop_the_start(tmp_path: Path, table: str, column: str, value: object) -> None:
    directory = StateDir(tmp_path)
    world = FakeCluster(directory=directory)
    world.worker("w")
    world.open()
    world.journal.close()
    journal = Journal(directory)
    journal._db.execute(f"UPDATE {table} SET {column}=?", (value,))
    journal.close()
    with pytest.raises(JournalError, match=r"journal\.db is damaged .its rows contradict each other"):
        world.boot(directory)
    directory.close()
