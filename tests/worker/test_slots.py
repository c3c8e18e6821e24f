"""A slot on a worker whose coordinator is slow or away: a migration, and a runner above its memory limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from coroutines import in_loop

from penstock.proto.errors import LaneLostError, PenstockError, ProtocolError, UnknownRunError
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2
from penstock.worker.processes.control_channel import ControlMessage
from penstock.worker.slots import runner_watch
from penstock.worker.slots.slot import MOST_ABANDONED, Slot
from penstock.worker.slots.slot_record import DaemonCounters
from penstock.worker.slots.snapshots import StoredSnapshot


def slot_of(coordinator: Any, changed: Callable[[], None] = lambda: None) -> Slot:
    host: Any = SimpleNamespace(
        name="w",
        coordinator=coordinator,
        slot_changed=changed,
        counters=DaemonCounters(),
        embedded=False,
        slot_bytes=1 << 30,
    )
    return Slot(host, records_pb2.WorkerAssignment(run="job/0", attempt=1, num_workers_per_box=1))


# ---- migration


DEADLINE_S = 60.0


class Keeping:
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
    coordinator, changed = Keeping(), asyncio.Event()
    slot = slot_of(coordinator, changed.set)

    def told(*, prepare_migration: bool) -> None:
        changed.clear()
        slot.assigned(records_pb2.WorkerAssignment(prepare_migration=prepare_migration))

    slot.record.store.add(StoredSnapshot(0, 1, 1, 1, False, 1, b"state"), 0)
    told(prepare_migration=True)
    await asyncio.wait_for(coordinator.asked.wait(), DEADLINE_S)
    assert not slot.report().migrated
    told(prepare_migration=False)  # it was dismissed, while its snapshot was on its way
    slot.record.store.add(StoredSnapshot(0, 2, 2, 2, False, 2, b"state"), 0)
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
    slot.record.progress_page.close()


@in_loop
async def test_snapshot_that_is_not_kept_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A snapshot of a run that has ended meanwhile is no news for anybody; of one that was refused, or is lost, the
    first is told. None is sent again."""

    class Refusing(Keeping):
        async def put_snapshot(self, header: pb.SnapshotHeader, data: bytes) -> pb.PutSnapshotReply:
            if isinstance(answer := answers.pop(), PenstockError):
                raise answer
            return pb.PutSnapshotReply(refused=answer)

    answers: list[Any] = ["full", "full", UnknownRunError("the coordinator has no run"), LaneLostError("lost")]
    slot = slot_of(Refusing())
    points = [StoredSnapshot(0, total, total, total, False, total, b"state") for total in (1, 2, 3, 4)]
    for point in points:
        await slot.durable.make(point)
    assert all(point.durable for point in points)
    assert not answers
    (lost,) = (record.getMessage() for record in caplog.records)
    assert "a snapshot could not be sent to the coordinator, so a recovery replays from an older one: lost" in lost
    answers += ["full", ""]
    for total in (5, 6):
        await slot.durable.make(StoredSnapshot(0, total, total, total, False, total, b"state"))
    answers.append("full")
    await slot.durable.make(StoredSnapshot(0, 7, 7, 7, False, 7, b"state"))
    told = caplog.records[-1].getMessage()
    assert len(caplog.records) == 2
    assert (
        "the coordinator does not keep a snapshot of the loader, so a recovery replays from an older one: full" in told
    )
    slot.record.progress_page.close()


class Failing(Keeping):
    """Raises these errors, one for each call, and then keeps what it is sent."""

    def __init__(self, *errors: PenstockError) -> None:
        super().__init__()
        self.may.set()
        self._errors = list(errors)

    async def put_snapshot(self, header: pb.SnapshotHeader, data: bytes) -> pb.PutSnapshotReply:
        if self._errors:
            raise self._errors.pop(0)
        return await super().put_snapshot(header, data)


def first_point() -> StoredSnapshot:
    return StoredSnapshot(0, 0, 0, 0, True, 0, b"state")


@in_loop
async def test_first_snapshot_that_cannot_be_sent_fails() -> None:
    """Without it the slot could not be recovered, so no batch may be delivered."""
    slot = slot_of(Failing(LaneLostError("the call was cut off")))
    slot.record.store.add(first_point(), 0)
    await asyncio.wait_for(slot._become_ready(), DEADLINE_S)
    assert slot.record.phase == pb.FAILED
    assert slot.record.error is not None
    assert "first snapshot" in slot.record.error.message
    assert "the call was cut off" in slot.record.error.message
    slot.record.progress_page.close()


# ---- a runner that says the same again and again


@in_loop
async def test_repeated_messages_take_no_more_tasks_and_descriptors() -> None:
    opened, sent = 0, asyncio.Event()

    class Blobs:
        async def descriptor(self, name: str) -> int:
            nonlocal opened
            opened += 1
            return opened

    class Busy:
        """A runner that does not read at first."""

        reads_late = True

        async def send(self, kind: str, *, fds: list[int]) -> None:
            sent.set()

    slot, runner = slot_of(Keeping()), Busy()
    slot.record.child = runner  # type: ignore[assignment]
    with pytest.raises(ProtocolError, match="there is none"):
        slot._on_message(ControlMessage("wants_resume"))
    slot.record.assignment.resume.blob = "state"
    slot._host.blobs = Blobs()  # type: ignore[misc, assignment]
    slot.record.store.add(first_point(), 0)
    for number in range(5000):
        slot._on_message(ControlMessage("wants_resume"))
        slot._on_message(ControlMessage("ready"))
        slot._on_message(ControlMessage("left", {"epoch": number, "total": number}))
    await asyncio.sleep(0)
    assert (len(slot._tasks), opened) == (2, 0)
    assert [min(slot.record.abandoned), max(slot.record.abandoned)] == [5000 - MOST_ABANDONED, 4999]
    runner.reads_late = False
    await asyncio.wait_for(sent.wait(), DEADLINE_S)
    assert opened == 1
    for task in slot._tasks:
        task.cancel()
    slot.record.progress_page.close()


# ---- memory


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
    slot = slot_of(coordinator)
    child: Any = SimpleNamespace(pid=1, kill=lambda: None)
    slot.record.child = child
    slot.record.store.add(StoredSnapshot(0, 1, 1, 1, True, 1, b""), 0)
    slot.record.ready.set()
    slot.record.begun.set()
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
        monkeypatch.setattr(runner_watch, "MEMORY_S", 0.01)
        monkeypatch.setattr(runner_watch, "_looked_at", looked_at)
        slot = watched(coordinator)
        await asyncio.wait_for(
            runner_watch.MemoryWatch(slot.record, slot.durable, slot.lose, slot._spawn).run(1, LIMIT), DEADLINE_S
        )
        assert coordinator.puts == 1
        assert slot.record.phase == pb.FAILED
        assert slot.record.error is not None
        if grows:
            assert "was killed after batch" in slot.record.error.message
            assert not slot.record.recycle
        else:
            assert "was replaced after batch" in slot.record.error.message
            assert slot.record.recycle
            assert slot.record.outgrown  # so it was with the first look
        for task in slot._tasks:
            task.cancel()
        slot.record.progress_page.close()

    asyncio.run(body())
