"""Calls of who has been replaced, repeated or out of order, against a living run: refused, or without effect."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import streams
from chains import kill_runners, runners
from described import described
from neighbours import beside

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto import errors
from penstock.proto.rpc.calls import AsyncCoordinatorClient, CoordinatorClient
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2

STEPS = 200


def train(shared: Appliance, job: str, at: dict[int, Any]) -> tuple[list[int | None], Any]:
    with beside(shared, num_workers_per_box=2, job=job) as appliance:
        loader = DataLoader(streams.stateful, 400)
        executor = DataExecutor(loader, num_steps=STEPS, appliance=appliance)
        digests = []
        for _ in executor:
            digests.append(executor.digest)
            at.get(executor.step, lambda: None)()
        return digests, loader.state_dict()


async def say_late_things(address: str, token: str, worker: str) -> list[str]:
    """Send everything that a dead worker, an older attempt, or another client could still have under way. Returns the
    answer to each."""
    met: list[str] = []

    async def call(work: Any) -> None:
        try:
            reply = await work
            met.append("register again" if getattr(reply, "register_again", False) else "taken")
        except errors.PenstockError as error:
            met.append(type(error).__name__)

    lost = pb.SlotReport(run="late/0", attempt=1, box=0, slot=0, generation=1, phase=pb.FAILED, lost=True)
    lost.error.CopyFrom(records_pb2.ErrorDetail(name="WorkerLostError", message="killed, long ago"))
    failed = pb.SlotReport(run="late/0", attempt=1, box=0, slot=1, generation=1, phase=pb.FAILED)
    header = pb.SnapshotHeader(run="late/0", attempt=1, box=0, slot=0, generation=1, total=1, size=4)
    progress = pb.WatchRunRequest(run="late/0", attempt=1, box=0, client_id="another")
    older = pb.WatchRunRequest(run="late/0", attempt=7, box=0, client_id="another")
    async with AsyncCoordinatorClient(address, token) as client:
        for _ in range(2):  # and each of them twice
            await call(client.heartbeat(pb.HeartbeatRequest(worker=worker, session="of old", slots=[lost, failed])))
            await call(client.deregister(pb.DeregisterWorkerRequest(worker=worker, session="of old")))
            await call(client.put_snapshot(header, b"late"))
            await call(client.watch_run(progress))
            await call(client.watch_run(older))
            await call(client.close_run(pb.CloseRunRequest(run="late/0", attempt=1, box=0, client_id="another")))
    return met


@pytest.mark.filterwarnings("ignore:.*was recovered")
def test_late_calls_change_nothing(appliance: Appliance) -> None:
    whole, state = train(appliance, "whole", {})
    met: list[str] = []
    access, before = appliance._access, runners()
    assert access is not None

    def late() -> None:
        with CoordinatorClient(access.address, access.token) as client:
            (worker,) = client.status().workers
        met.extend(asyncio.run(say_late_things(access.address, access.token, worker.worker)))

    # At step 150 the loop has long had to wait for the new runners: a ring holds 32 batches.
    digests, saved = train(appliance, "late", {10: lambda: kill_runners(before), 150: late})
    assert digests == whole
    assert described(saved) == described(state)
    once = ["register again", "taken", "SupersededError", "BoxTakenError", "UnknownRunError", "BoxTakenError"]
    assert met == 2 * once
