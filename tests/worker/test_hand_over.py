"""A slot's worker when a target worker becomes ready, and when that one is dismissed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from coroutines import in_loop

from penstock.proto.errors import LaneLostError, SupersededError, UnknownRunError
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2
from penstock.worker.slots.loader_findings import LoaderFindings
from penstock.worker.slots.slot import Slot
from penstock.worker.slots.slot_interfaces import DaemonCounters
from penstock.worker.slots.snapshots import StoredSnapshot

DEADLINE_S = 60.0


class Coordinator:
    """Keeps what it is sent, as soon as it may."""

    def __init__(self) -> None:
        self.may, self.kept = asyncio.Event(), list[int]()
        self.asked = asyncio.Event()

    async def put_snapshot(self, header: pb.SnapshotHeader, data: bytes) -> pb.PutSnapshotReply:
        self.asked.set()
        await self.may.wait()
        self.kept.append(header.total)
        return pb.PutSnapshotReply()


@in_loop
async def test_target_worker_gets_the_newest_when_ready() -> None:
    """Give the second target worker new restart points, too: the first one's are old by then."""
    coordinator, changed = Coordinator(), asyncio.Event()
    host: Any = SimpleNamespace(
        name="w",
        coordinator=coordinator,
        slot_changed=changed.set,
        counters=DaemonCounters(),
        findings=lambda _: LoaderFindings(),
    )
    slot = Slot(host, records_pb2.WorkerAssignment(run="job/0", attempt=1, num_workers_per_box=1))

    def told(*, prepare_migration: bool) -> None:
        changed.clear()
        slot.assigned(records_pb2.WorkerAssignment(prepare_migration=prepare_migration))

    slot.store.add(StoredSnapshot(0, 1, 1, 1, False, 1, b"state", verified=True), 0)
    told(prepare_migration=True)
    await asyncio.wait_for(coordinator.asked.wait(), DEADLINE_S)
    assert not slot.report().migrated
    told(prepare_migration=False)  # it was dismissed, while its snapshot was on its way
    slot.store.add(StoredSnapshot(0, 2, 2, 2, False, 2, b"state", verified=True), 0)
    coordinator.may.set()
    while coordinator.kept != [1]:
        await asyncio.sleep(0)
    assert not slot.report().migrated

    coordinator.may.clear()
    coordinator.asked.clear()
    told(prepare_migration=True)
    await asyncio.wait_for(coordinator.asked.wait(), DEADLINE_S)
    assert not slot.report().migrated
    coordinator.may.set()
    await asyncio.wait_for(changed.wait(), DEADLINE_S)
    assert slot.report().migrated
    assert coordinator.kept == [1, 2]

    told(prepare_migration=False)
    assert not slot.report().migrated
    slot.progress_page.close()


@in_loop
async def test_snapshot_of_an_ended_run_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """The run may end while its snapshot is on its way, which is no news for anybody."""

    class Ended(Coordinator):
        async def put_snapshot(self, header: pb.SnapshotHeader, data: bytes) -> pb.PutSnapshotReply:
            raise errors.pop()

    errors = [
        SupersededError("attempt 1 is over"),
        UnknownRunError("the coordinator has no run"),
        LaneLostError("lost"),
    ]
    host: Any = SimpleNamespace(
        name="w", coordinator=Ended(), counters=DaemonCounters(), findings=lambda _: LoaderFindings()
    )
    slot = Slot(host, records_pb2.WorkerAssignment(run="job/0", attempt=1, num_workers_per_box=1))
    points = [StoredSnapshot(0, total, total, total, False, total, b"state", verified=True) for total in (1, 2, 3)]
    for point in points:
        await slot.durable.make(point)
    assert all(point.durable for point in points)
    why = "a snapshot could not be sent to the coordinator, so a recovery replays from an older one: lost"
    assert [record.getMessage() for record in caplog.records] == [f"job/0 box 0 slot 0: {why}"]
    slot.progress_page.close()
