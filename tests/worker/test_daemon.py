"""Replies of the coordinator in a daemon, without any process: they are levels, and may come in any order."""

from __future__ import annotations

import asyncio
import os
import socket
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from coroutines import in_loop

from penstock.proto.errors import SupersededError
from penstock.proto.v1 import coordinator_pb2, lane_pb2, records_pb2
from penstock.worker.daemon import worker_settings
from penstock.worker.daemon.daemon import Daemon
from penstock.worker.daemon.worker_settings import DaemonSettings
from penstock.worker.slots.slot import Slot
from penstock.worker.slots.slot_record import DaemonCounters


def reply(version: int, *generations: int) -> coordinator_pb2.HeartbeatReply:
    assignments = [records_pb2.WorkerAssignment(run="job/0", attempt=1, generation=g) for g in generations]
    return coordinator_pb2.HeartbeatReply(version=version, assignments=assignments)


@pytest.mark.parametrize(("slots", "limit", "share"), [(4, 0, 1024), (4, 100, 100), (1024, 0, 32)])
def test_slots_share_half_of_the_free_memory(
    slots: int, limit: int, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_settings, "free_memory", lambda: 8 << 30)
    settings = DaemonSettings("127.0.0.1:1", "token", slots, runner_memory=limit << 20, insecure=True)
    assert worker_settings.slot_bytes(settings) == share << 20


@in_loop
async def test_overtaken_reply_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, int]] = []

    def start(daemon: Any, key: Any, assignment: Any) -> None:
        done.append(("start", key[4]))
        daemon._slots[key] = Mock()

    def stop(daemon: Any, key: Any) -> None:
        done.append(("stop", key[4]))
        del daemon._slots[key]

    monkeypatch.setattr(Daemon, "_start_slot", start)
    monkeypatch.setattr(Daemon, "_stop_slot", stop)
    monkeypatch.setattr(Daemon, "_drop_unused", lambda daemon: None)

    daemon = Daemon(DaemonSettings("127.0.0.1:1", "token", 2, ["*"], insecure=True))
    nothing_new = coordinator_pb2.HeartbeatReply(version=5, unchanged=True)
    for message in (reply(3, 1), reply(5, 1, 2), reply(4, 1), nothing_new, reply(5, 1, 2)):
        daemon._take(message)
    daemon._not_answered("a request")  # asks for everything again, and a late reply is late all the same
    for message in (reply(4, 1), reply(6)):
        daemon._take(message)
    await daemon.host.coordinator.close()
    assert done == [("start", 1), ("start", 2), ("stop", 1), ("stop", 2)]


@in_loop
async def test_slot_that_cannot_start_is_reported_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report no memory for one slot's progress page as that slot's loss: it used to end the daemon."""

    class Begun:
        def __init__(self, host: Any, assignment: records_pb2.WorkerAssignment) -> None:
            self.generation, self.record = assignment.generation, Mock(assignment=assignment)
            if assignment.generation == 1:
                raise OSError(24, "Too many open files")

        def start(self) -> None: ...
        def assigned(self, assignment: records_pb2.WorkerAssignment) -> None: ...

        def report(self) -> coordinator_pb2.SlotReport:
            return coordinator_pb2.SlotReport(generation=self.generation)

    monkeypatch.setattr("penstock.worker.daemon.daemon.Slot", Begun)
    monkeypatch.setattr(Daemon, "_stop_slot", lambda daemon, key: daemon._slots.pop(key))

    daemon = Daemon(DaemonSettings("127.0.0.1:1", "token", 2, ["*"], insecure=True))
    daemon._take(reply(1, 1, 2, 3, 4))
    told = {slot.generation: slot for slot in daemon._heartbeat(0.0).slots}
    assert not told[2].lost
    assert not told[3].lost
    assert (told[1].phase, told[1].lost) == (coordinator_pb2.FAILED, True)
    assert "Too many open files" in told[1].error.message
    assert (told[4].error.name, told[4].lost) == ("OverloadedError", True)
    assert "all 2 slots of worker" in told[4].error.message
    daemon._take(reply(2, 2, 5))  # its places are free again
    assert sorted(slot.generation for slot in daemon._heartbeat(0.0).slots) == [2, 5]
    await daemon.host.coordinator.close()


@in_loop
async def test_one_lane_at_a_time_waits_for_its_runner() -> None:
    """A consumer that opens 500 lanes while user code is busy had 500 descriptors of the daemon's. Each is closed when
    the next one comes."""

    class Busy:
        """A runner that takes what it is sent when it is told to."""

        def __init__(self) -> None:
            self.reads_late, self.taken = False, list[str]()

        def hear(self) -> None:
            pass

        async def send(self, kind: str, payload: bytes, fds: list[int], **served: Any) -> None:
            self.reads_late = True
            self.taken.append(lane_pb2.Hello.FromString(payload).run)
            os.close(fds[0])

    runner = Busy()
    host: Any = SimpleNamespace(name="w", counters=DaemonCounters(), slot_bytes=1 << 30)
    slot = Slot(host, records_pb2.WorkerAssignment(run="job/0"))
    slot.record.child = runner  # type: ignore[assignment]
    slot.record.ready.set()
    lanes, ends = [], []
    for number in range(20):
        ours, theirs = socket.socketpair()
        ends += [ours, theirs]
        lanes.append(asyncio.ensure_future(slot.lanes.attach(ours, lane_pb2.Hello(run=str(number)), 30.0)))
        await asyncio.sleep(0)
        await lanes[-1]
        await asyncio.sleep(0)
    assert [end.fileno() for end in ends[2:-2:2]] == [-1] * 18
    runner.reads_late = False
    while len(runner.taken) < 2:
        await asyncio.sleep(0.01)
    assert runner.taken == ["0", "19"]
    for end in ends:
        end.close()


@in_loop
async def test_lane_is_refused_when_its_slot_ends() -> None:
    """The daemon held the connection until its deadline, for 30 s."""
    host: Any = SimpleNamespace(name="w", counters=DaemonCounters(), slot_bytes=1 << 30)
    host.embedded, host.slot_changed = False, lambda: None
    slot = Slot(host, records_pb2.WorkerAssignment(run="job/0"))
    ours, theirs = socket.socketpair()
    waiting = asyncio.ensure_future(slot.lanes.attach(ours, lane_pb2.Hello(), 60.0))
    await asyncio.sleep(0)
    assert not waiting.done()
    slot.fail(records_pb2.ErrorDetail(name="InputFnError", message="no"), lost=False)
    for attaching in (waiting, slot.lanes.attach(ours, lane_pb2.Hello(), 60.0)):
        with pytest.raises(SupersededError, match="the slot's runner has ended"):
            await attaching
    ours.close()
    theirs.close()
