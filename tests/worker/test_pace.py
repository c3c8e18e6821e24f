"""The daemon's use of the heartbeat intervals and quotas in replies."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from penstock.proto.rpc.bounds.polling import HOLD_S
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.worker.daemon.daemon import Daemon
from penstock.worker.daemon.worker_settings import DaemonSettings
from penstock.worker.slots.slot_interfaces import SnapshotQuota


def with_daemon(body: Any) -> None:
    async def run() -> None:
        daemon = Daemon(DaemonSettings("127.0.0.1:1", "token", 1, ["streams"]))
        made: list[pb.HeartbeatReply] = []
        daemon._apply = made.append  # type: ignore[method-assign, assignment]
        try:
            result = body(daemon, made)
            if isinstance(result, Coroutine):
                await result
        finally:
            await daemon.coordinator.close()

    asyncio.run(run())


def reply(version: int, **fields: Any) -> pb.HeartbeatReply:
    return pb.HeartbeatReply(version=version, heartbeat_s=5, lease_s=15, **fields)


def test_heartbeat_hold_is_that_of_the_last_reply() -> None:
    def body(daemon: Daemon, _: list[pb.HeartbeatReply]) -> None:
        assert daemon._hold_s == HOLD_S
        daemon._take(reply(7, snapshot_every_s=25, snapshot_bytes_per_s=3000))
        request = daemon._heartbeat(daemon._hold_s)
        assert (request.hold_s, request.lease_s, request.seen_version) == (5, 15, 7)
        assert daemon.snapshot_quota == SnapshotQuota(25, 3000)

    with_daemon(body)


def test_unanswered_request_is_asked_for_again() -> None:
    async def body(daemon: Daemon, made: list[pb.HeartbeatReply]) -> None:
        daemon._take(reply(8))
        daemon._answered.add("r")
        await daemon._answer(pb.StateRequest(request="r"))  # of a slot that is not here
        assert daemon._answered == set()
        assert daemon._heartbeat(1.0).seen_version == 0

    with_daemon(body)


@pytest.mark.parametrize(("size", "pause_s"), [(0, 25), (1000, 25), (76_000, 76_000 / 3000), (10**6, 10**6 / 3000)])
def test_pause_keeps_snapshots_within_the_quota(size: int, pause_s: float) -> None:
    assert SnapshotQuota(25, 3000).pause_s(size) == pytest.approx(pause_s)
