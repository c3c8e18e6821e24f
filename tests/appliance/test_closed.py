"""The last state of a closed run stays to be had for a while, and states can be had as JSON."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from fake_cluster import limited
from served import LIMITS, TOKEN, asking, coordinator, daemon, opening, until_ready

from penstock.appliance.journal.snapshot_store import ClosedRun
from penstock.appliance.server.closed_runs import ClosedRuns
from penstock.proto.errors import (
    InvalidArgumentError,
    StateUnavailableError,
    SupersededError,
)
from penstock.proto.rpc.calls import AsyncCoordinatorClient, FetchedState
from penstock.proto.state.codec import encode_state
from penstock.proto.v1 import coordinator_pb2 as pb

RUN = "job/0"


def user_state(request: pb.StateRequest) -> tuple[pb.StateAnswer, bytes]:
    value = {"user": {"seen": request.position.total, "raw": b"\0\1"}, "restart": {"at": (0, 1, 2, 3)}}
    return pb.StateAnswer(samples_streamed=request.position.total), encode_state(value)


def newest(**fields: object) -> pb.FetchStateRequest:
    return pb.FetchStateRequest(run=RUN, newest=True, deadline_s=20, **fields)  # type: ignore[arg-type]


def read(state: FetchedState) -> list[object]:
    assert all(record.state_bytes == len(data) for record, data in state.records)
    return [json.loads(data) for _, data in state.records]


def test_closed_run_is_readable_until_reopened(tmp_path: Path) -> None:
    async def first() -> FetchedState:
        async with (
            coordinator(tmp_path, LIMITS) as address,
            AsyncCoordinatorClient(address, TOKEN, insecure=True) as client,
        ):
            async with daemon(address, say=user_state):
                await client.open_run(opening())
                await until_ready(client)
                await client.fetch_state(asking(0, 3))
                state = await client.fetch_state(asking(0, 5))
                shown = await client.fetch_state(newest(format=pb.STATE_JSON))
                assert read(shown) == [
                    {"user": {"seen": n, "raw": {"$": "bytes", "base64": "AAE="}}, "restart": {"at": [0, 1, 2, 3]}}
                    for n in (3, 2)
                ]
                assert shown.positions == state.positions
                assert not (await client.status()).runs[0].HasField("kept_step")
                await client.close_run(pb.CloseRunRequest(run=RUN, attempt=1, client_id="c0"))
            assert await client.fetch_state(newest()) == state
            assert read(await client.fetch_state(newest(format=pb.STATE_JSON))) == read(shown)
            return state

    async def again(state: FetchedState) -> None:
        """Another process of the coordinator, on the same directory."""
        async with coordinator(tmp_path) as address, AsyncCoordinatorClient(address, TOKEN, insecure=True) as client:
            assert await client.fetch_state(newest(attempt=1)) == state
            assert (await client.status()).runs[0].kept_step == 5
            with pytest.raises(StateUnavailableError, match="step must be 5 for run job/0, which has ended, got 3"):
                await client.fetch_state(pb.FetchStateRequest(run=RUN, step=3, deadline_s=1))
            await client.open_run(opening(client_id="c1"))
            async with daemon(address, say=user_state):
                await until_ready(client, attempt=2, client_id="c1")
                assert (await client.fetch_state(newest())).records[0][0].worker_step == 0

    async def unkept() -> None:
        """Refuse a run without a fetched state, and states too large for JSON."""
        async with (
            coordinator() as address,
            AsyncCoordinatorClient(address, TOKEN, insecure=True) as client,
            daemon(address, say=user_state),
        ):
            await client.open_run(opening())
            await until_ready(client)
            with pytest.raises(InvalidArgumentError, match="a state must have at most 8 bytes to be sent as JSON"):
                await client.fetch_state(newest(format=pb.STATE_JSON))
            await client.open_run(opening(client_id="c2"))
            await client.close_run(pb.CloseRunRequest(run=RUN, attempt=2, client_id="c2"))
            with pytest.raises(SupersededError, match="attempt 2 of run job/0 was closed"):
                await client.fetch_state(newest())

    state = asyncio.run(first())
    with limited(json_max=400):
        asyncio.run(again(state))
    with limited(json_max=8):
        asyncio.run(unkept())


@limited(closed_s=50, closed_bytes=100, closed_runs=3)
def test_the_oldest_states_go_first() -> None:
    now = [100.0]
    found = [ClosedRun("old", 1, 1, 40.0, 1), ClosedRun("a", 1, 1, 60.0, 30), ClosedRun("b", 1, 1, 70.0, 30)]
    runs = ClosedRuns(found, lambda: now[0])
    assert runs.get("old") is None
    assert runs.get("a") == found[1]

    def came(name: str, size: int) -> list[str] | None:
        now[0] += 1
        new = ClosedRun(name, 2, 9, now[0], size)
        gone = runs.superfluous(new)
        if gone is not None:
            runs.add(new, gone)
        return gone

    assert came("c", 101) is None
    assert came("c", 40) == ["old"]
    assert came("c", 40) == []  # it takes its own place
    assert came("d", 1) == ["a"]
    assert came("e", 99) == ["c", "b"]
    now[0] = 200.0
    assert runs.get("e") is None
    assert came("f", 1) == ["e", "d"]
