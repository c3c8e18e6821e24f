"""A runner above its limit, while the coordinator cannot take its last snapshot."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2
from penstock.worker.slots import memory_watch
from penstock.worker.slots.loader_findings import LoaderFindings
from penstock.worker.slots.slot import Slot
from penstock.worker.slots.slot_interfaces import DaemonCounters
from penstock.worker.slots.snapshots import StoredSnapshot

DEADLINE_S = 60.0
LIMIT = 100


class Away:
    """A coordinator that answers no snapshot until it may."""

    def __init__(self) -> None:
        self.back, self.puts = asyncio.Event(), 0

    async def put_snapshot(self, header: pb.SnapshotHeader, data: bytes) -> pb.PutSnapshotReply:
        self.puts += 1
        await self.back.wait()
        return pb.PutSnapshotReply()


def watched(coordinator: Away) -> Slot:
    """A slot whose runner is ready and has begun, with one snapshot that is not durable."""
    host: Any = SimpleNamespace(
        name="w", coordinator=coordinator, slot_changed=lambda: None, counters=DaemonCounters(), embedded=False
    )
    host.findings = lambda assignment: LoaderFindings()
    slot = Slot(host, records_pb2.WorkerAssignment(run="job/0", attempt=1, num_workers_per_box=1))
    child: Any = SimpleNamespace(pid=1, kill=lambda: None)
    slot._child = child
    slot.store.add(StoredSnapshot(0, 1, 1, 1, True, 1, b"state", verified=True), 0)
    slot.ready.set()
    slot.begun.set()
    return slot


@pytest.mark.parametrize("grows", [True, False])
def test_runner_is_watched_while_snapshot_waits(grows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        coordinator = Away()
        looks = 0

        def looked_at(pid: int, limit: int) -> tuple[int, float]:
            nonlocal looks
            looks += 1
            if looks == 5 and not grows:
                loop.call_soon_threadsafe(coordinator.back.set)
            return (LIMIT + (looks - 1) * 50 if grows else LIMIT + looks), 0.0

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(memory_watch, "MEMORY_S", 0.01)
        monkeypatch.setattr(memory_watch, "_looked_at", looked_at)
        slot = watched(coordinator)
        await asyncio.wait_for(memory_watch.MemoryWatch(slot, slot.verifier, slot.durable).run(1, LIMIT), DEADLINE_S)
        assert coordinator.puts == 1
        assert slot.phase == pb.FAILED
        assert slot.error is not None
        if grows:
            assert "was killed at batch" in slot.error.message
            assert not slot.recycle
        else:
            assert "was replaced at batch" in slot.error.message
            assert slot.recycle
            assert slot.outgrown  # so it was with the first look
        for task in slot._tasks:
            task.cancel()
        slot.progress_page.close()

    asyncio.run(body())
