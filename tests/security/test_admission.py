"""Rate limits on registering and opening runs: the buckets, and the return of a refused peer at the given time."""

from __future__ import annotations

import asyncio
import time

import pytest
from coroutines import in_loop
from fake_cluster import FakeCluster, limited
from served import coordinator

from penstock.appliance.server.rate_limits import RateLimiter, address_of
from penstock.proto.errors import OverloadedError
from penstock.proto.rpc.calls import AsyncCoordinatorClient, CoordinatorClient
from penstock.proto.v1 import coordinator_pb2 as pb

few = limited(peer_per_s=2.0, peer_burst=3, all_per_s=4.0, all_burst=5, peers_max=4)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def refused(admission: RateLimiter, peer: str) -> float:
    with pytest.raises(OverloadedError) as caught:
        admission.admit(peer, "OpenRun")
    return caught.value.retry_after_s


@few
def test_burst_then_rate_with_retry_time() -> None:
    clock = Clock()
    admission = RateLimiter(clock)
    for _ in range(3):
        admission.admit("a", "OpenRun")
    assert refused(admission, "a") == pytest.approx(0.5)
    clock.now += 0.5
    admission.admit("a", "OpenRun")
    assert refused(admission, "a") == pytest.approx(0.5)
    admission.admit("b", "OpenRun")  # another's is untouched
    clock.now += 1000
    for _ in range(3):
        admission.admit("a", "OpenRun")
    refused(admission, "a")  # never more than the burst


@few
def test_many_peers_share_one_bucket() -> None:
    clock = Clock()
    admission = RateLimiter(clock)
    for peer in range(5):
        admission.admit(str(peer), "OpenRun")
    assert refused(admission, "fresh") == pytest.approx(0.25)
    assert len(admission._peers) == 4


def test_peers_differ_by_address_not_by_port() -> None:
    assert [address_of(peer) for peer in ("ipv6:%5B::1%5D:5000", "unix:")] == ["::1", "unix"]


@limited(peer_burst=1, peer_per_s=0.4, all_per_s=4.0, all_burst=5)
@in_loop
async def test_retry_time_travels_and_is_honoured() -> None:
    request = pb.RegisterWorkerRequest(worker="w", session="s", slots=1)
    async with coordinator() as address, AsyncCoordinatorClient(address, "token", insecure=True) as client:
        await client.register(request)
        with pytest.raises(OverloadedError, match=r"RegisterWorker calls a second from 127\.0\.0\.1") as caught:
            await client.register(request)
        assert 0.0 < caught.value.retry_after_s <= 2.5
        await asyncio.sleep(caught.value.retry_after_s)
        await client.register(request)
        with CoordinatorClient(address, "token", insecure=True) as blocking, pytest.raises(OverloadedError):
            await asyncio.to_thread(blocking.open_run, pb.OpenRunRequest())
        begun = time.monotonic()
        await client.heartbeat(pb.HeartbeatRequest(worker="w", session="s"))  # is never held up
        assert time.monotonic() - begun < 15


@limited(workers_max=2, runs_max=2)
def test_workers_and_runs_are_counted() -> None:
    world = FakeCluster()
    world.worker("a")
    world.worker("b")
    with pytest.raises(OverloadedError, match="at most 2 workers can register"):
        world.worker("c")
    world.worker("b", session="b-2")  # one that comes back is no more
    world.open(job="one")
    world.open(job="two")
    with pytest.raises(OverloadedError, match="a coordinator keeps at most 2 runs"):
        world.open(job="three")
    world.open(job="two", client_id="again")
