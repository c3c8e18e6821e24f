"""A coordinator that knows the token, towards a worker: assignments, requests and numbers that no coordinator sends."""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from coroutines import in_loop
from hostile_coordinator import SECRET, Hostile, assignment
from tests.security.conftest import answering
from waiting import PATIENCE

from penstock.proto.rpc.bounds.polling import HOLD_S, PollPace, intervals
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2

WATCHED_S = 0.7
SLOTS = 2


def far_too_many(number: int) -> pb.HeartbeatReply:
    return pb.HeartbeatReply(assignments=[assignment(1, slot) for slot in range(5000)])


def state_requests(number: int) -> pb.HeartbeatReply:
    far = records_pb2.SlotPosition(total=10**12, delivered=10**12)
    requests = [
        pb.StateRequest(
            request=f"{number} {n}", run="job/0", attempt=1, generation=1, position=far, deadline_s=math.nan
        )
        for n in range(5000)
    ]
    return pb.HeartbeatReply(assignments=[assignment(1)], state_requests=requests)


REPLIES: dict[str, Callable[[int], pb.HeartbeatReply]] = {
    "register again": lambda number: pb.HeartbeatReply(register_again=True),
    "too many": far_too_many,
    "state requests": state_requests,
}


@in_loop
async def test_a_worker_outlives_hostile_replies(start: Any) -> None:
    """The worker keeps running, polls no more often than allowed, and at last ends on SIGTERM."""
    hostile = Hostile(lambda number: pb.HeartbeatReply())  # type: ignore[abstract]
    async with answering("127.0.0.1:0", SECRET, servicer=hostile) as served:
        options = ["--slots", str(SLOTS), "--allow", "streams", "--coordinator", served.address]
        worker = await asyncio.to_thread(start, "penstock.worker", *options, token=SECRET)
        for name, reply in REPLIES.items():
            hostile.reply, hostile.reports = reply, 0
            began, before = time.monotonic(), hostile.heartbeats
            await asyncio.sleep(WATCHED_S)
            while hostile.heartbeats == before and time.monotonic() - began < PATIENCE * 15:
                await asyncio.sleep(0.1)
            assert worker.process.poll() is None, name
            # each change of a slot is reported beside the long poll
            polls = PollPace.BURST + PollPace.PER_S * (time.monotonic() - began)
            assert 0 < hostile.heartbeats - before < 2 * polls + 20, name
            assert hostile.reports <= 2 * SLOTS, name
        worker.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(worker.process.wait, 15) == 0
    log = worker.log.read_text()
    assert "Traceback" not in log


@pytest.mark.parametrize("value", [math.nan, 0.0, -1.0, 1e300, math.inf])
def test_impossible_intervals_are_not_believed(value: float) -> None:
    assert intervals(pb.HeartbeatReply(heartbeat_s=value, lease_s=value)) == (HOLD_S, 0.0)
    assert intervals(pb.WatchRunReply(heartbeat_s=7, lease_s=9)) == (7.0, 9.0)


def test_polls_answered_at_once_slow_down() -> None:
    now = 0.0
    pace = PollPace(lambda: now)
    delays = [pace.delay_s() for _ in range(PollPace.BURST + 2)]
    assert delays[: PollPace.BURST] == [0.0] * PollPace.BURST
    assert delays[-1] == pytest.approx(2 / PollPace.PER_S)
    now = 1000.0
    assert pace.delay_s() == 0.0
