"""What a daemon makes of the coordinator's replies, without any process: they are level, and may come in any order."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest

from penstock.proto.v1 import coordinator_pb2, records_pb2
from penstock.worker.daemon import Daemon, Settings
from penstock.worker.processor import cores


def reply(version: int, *generations: int) -> coordinator_pb2.HeartbeatReply:
    assignments = [records_pb2.WorkerAssignment(run="job/0", attempt=1, generation=g) for g in generations]
    return coordinator_pb2.HeartbeatReply(version=version, assignments=assignments)


def test_a_reply_that_was_overtaken_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
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

    async def hear() -> None:
        daemon = Daemon(Settings("127.0.0.1:1", "token", 2, ["*"]))
        nothing_new = coordinator_pb2.HeartbeatReply(version=5, unchanged=True)
        for message in (reply(3, 1), reply(5, 1, 2), reply(4, 1), nothing_new, reply(5, 1, 2)):
            daemon._take(message)
        daemon._not_answered("a request")  # asks for everything again, and a late reply is late all the same
        for message in (reply(4, 1), reply(6)):
            daemon._take(message)
        await daemon.coordinator.close()

    asyncio.run(hear())
    assert done == [("start", 1), ("start", 2), ("stop", 1), ("stop", 2)]


def test_cores_are_told_at_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []

    async def register(request: coordinator_pb2.RegisterWorkerRequest) -> coordinator_pb2.RegisterWorkerReply:
        told.append(request.cores)
        return coordinator_pb2.RegisterWorkerReply(lease_s=10.0, beat_s=1.0)

    async def body() -> None:
        daemon = Daemon(Settings("127.0.0.1:1", "token", 2, ["*"]))
        monkeypatch.setattr(daemon.coordinator, "register", register)
        monkeypatch.setattr(daemon, "_doors", Mock(local_address="@w", tcp_address="w:1"))
        await daemon._register()
        await daemon.coordinator.close()

    asyncio.run(body())
    assert told == [cores()]
    assert told[0] >= 1
