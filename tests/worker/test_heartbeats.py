"""The daemon's heartbeats: intervals and quotas of replies, sizes of reports."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from penstock.proto.rpc.channel import REQUEST_MAX
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.worker.daemon.daemon import Daemon
from penstock.worker.daemon.heartbeats import REPORTS_MAX, fitted
from penstock.worker.daemon.worker_settings import DaemonSettings

# ---- replies


def with_daemon(body: Any) -> None:
    async def run() -> None:
        daemon = Daemon(DaemonSettings("127.0.0.1:1", "token", 1, ["streams"], insecure=True))
        made: list[pb.HeartbeatReply] = []
        daemon._apply = made.append  # type: ignore[method-assign, assignment]
        try:
            result = body(daemon, made)
            if isinstance(result, Coroutine):
                await result
        finally:
            await daemon.host.coordinator.close()

    asyncio.run(run())


def reply(version: int, **fields: Any) -> pb.HeartbeatReply:
    return pb.HeartbeatReply(version=version, heartbeat_s=5, lease_s=15, **fields)


def test_unanswered_request_is_asked_for_again() -> None:
    async def body(daemon: Daemon, made: list[pb.HeartbeatReply]) -> None:
        daemon._take(reply(8))
        daemon._answered.add("r")
        await daemon._answer(pb.StateRequest(request="r"))  # of a slot that is not here
        assert daemon._answered == set()
        assert daemon._heartbeat(1.0).seen_version == 0

    with_daemon(body)


# ---- reports, whose sizes user code decides


def report(slot: int, size: int) -> pb.SlotReport:
    one = pb.SlotReport(run="job/0", slot=slot, generation=2**63, phase=pb.FAILED, doing="d" * size, stack="é" * size)
    one.error.name, one.error.message, one.error.remote_traceback = "InputFnError", "m" * size, "é" * size
    one.capabilities.advances_state = one.capabilities.not_used = "t" * (size // 8)
    return one


@pytest.mark.parametrize(("count", "size"), [(1, 5 << 20), (1024, 8 << 10)])
def test_reports_fit_into_a_heartbeat(count: int, size: int) -> None:
    reports = fitted([report(slot, size) for slot in range(count)])
    assert sum(one.ByteSize() for one in reports) <= REPORTS_MAX < REQUEST_MAX
    assert [one.slot for one in reports] == [*range(count)]
    assert {one.error.name for one in reports} == {"InputFnError"}


def test_one_long_report_leaves_the_others() -> None:
    small = [report(slot, 100) for slot in range(9)]
    short = fitted([*small, report(9, 1 << 20)])
    assert short[:9] == small
    assert "bytes left out" in short[9].error.message
