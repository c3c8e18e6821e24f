"""The coordinator over real sockets, with the real clients: long polls, transfers, states, restarts."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from bearer import metadata
from fake_cluster import limited
from served import (
    DEADLINE_S,
    LIMITS,
    TOKEN,
    asking,
    daemon,
    on_coordinator,
    opening,
    plain_state,
    trial,
    until_ready,
    watching,
)

from penstock.appliance.server.service import REPORT_S
from penstock.proto.errors import (
    BoxTakenError,
    DeadlineError,
    InvalidArgumentError,
    PenstockError,
    ProtocolError,
    StateUnavailableError,
    SupersededError,
    UnknownRunError,
)
from penstock.proto.rpc.bounds.reply_parts import blob_name
from penstock.proto.rpc.calls import AsyncCoordinatorClient, CoordinatorClient
from penstock.proto.rpc.channel import CHUNK, connect_aio
from penstock.proto.state.position import Position
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2
from penstock.proto.v1.coordinator_pb2_grpc import CoordinatorStub


@on_coordinator()
async def test_long_or_unprintable_names_are_refused(client: AsyncCoordinatorClient) -> None:
    """Refuse names that would confuse logs and tables."""
    for name in ("a\nb", "\x1b[2Ja", "\u202egpj.a", "  ", " a", "a\u200b"):
        with pytest.raises(
            InvalidArgumentError, match="the name of a job must be printable text without blanks"
        ) as refused:
            await client.open_run(opening(job=name))
        assert refused.value.message.isprintable()
        with pytest.raises(InvalidArgumentError, match="the name of a worker must be printable text without blanks"):
            await client.register(pb.RegisterWorkerRequest(worker=name, session="s", slots=1))
    with pytest.raises(InvalidArgumentError, match="the name of a job must have at most 200 characters, got 201"):
        await client.open_run(opening(job="j" * 201))
    assert (await client.open_run(opening(job="Straße 7"))).run == "Straße 7/0"


@on_coordinator()
async def test_calls_that_only_read_take_any_protocol(address: str) -> None:
    token = metadata(TOKEN)[0]
    async with connect_aio(address) as bare:
        stub = CoordinatorStub(bare)
        for sent in ((token,), (token, ("penstock-protocol", "1")), (token, ("penstock-protocol", "x"))):
            assert not (await stub.Status(pb.StatusRequest(), metadata=sent)).runs
            with pytest.raises(grpc.aio.AioRpcError, match="install the same release on both ends"):
                await stub.OpenRun(opening(), metadata=sent)
        with pytest.raises(grpc.aio.AioRpcError, match="no token was sent"):
            await stub.Status(pb.StatusRequest())


SELDOM = replace(LIMITS, worker_lease_s=900.0, client_lease_s=900.0)
"""A long poll without news ends within 300 s (at a moment that its name gives), and not within each second."""


@limited(heartbeat_s=300.0)
@on_coordinator(SELDOM)
async def test_a_run_comes_up_and_long_polls_wake(client: AsyncCoordinatorClient, address: str) -> None:
    reply = await client.open_run(opening())
    assert (reply.run, reply.attempt, reply.lease_s) == ("job/0", 1, 900)
    assert (await client.watch_run(watching())).missing_slots == 2
    held = asyncio.create_task(until_ready(client))
    async with daemon(address) as worker:
        async with asyncio.timeout(4):  # far less than the hold: somebody woke it
            ready = await held
        assert ready.slots[0].tcp_address == "t:1"
        await client.close_run(pb.CloseRunRequest(run="job/0", attempt=1, client_id="c0"))
        async with asyncio.timeout(4):
            while worker.reply.assignments:
                await client.status()
        assert worker.heartbeats < 10  # it was woken, and did not spin


@limited(heartbeat_s=300.0)
@on_coordinator(SELDOM)
async def test_a_dead_box_is_known_by_its_connection(client: AsyncCoordinatorClient, address: str) -> None:
    """Ranks that are started again come long before the leases of the dead ones end."""
    ranks: dict[str, Any] = {"num_boxes": 2, "attempt_key": "one launcher's", "process_age_s": 0.01}
    async with AsyncCoordinatorClient(address, TOKEN, insecure=True) as dying:
        await dying.open_run(opening(client_id="c0", **ranks))
        seen = (await dying.watch_run(watching())).version
        held = asyncio.create_task(dying.watch_run(watching(seen_version=seen, hold_s=60)))
        await dying.status()  # by then the coordinator holds the watch
        await asyncio.sleep(0.02)
        with pytest.raises(BoxTakenError, match="may be of an earlier launch"):
            await client.open_run(opening(box=1, client_id="c1", **ranks))
    with contextlib.suppress(PenstockError, asyncio.CancelledError):
        await held
    async with asyncio.timeout(10):
        while True:
            with contextlib.suppress(BoxTakenError):
                assert (await client.open_run(opening(box=1, client_id="c1", **ranks))).attempt == 2
                return


@on_coordinator(replace(LIMITS, client_lease_s=0.9))
async def test_a_hold_ends_well_before_the_lease(client: AsyncCoordinatorClient) -> None:
    await client.open_run(opening())
    seen = (await client.watch_run(watching())).version
    async with asyncio.timeout(1.5):
        again = await client.watch_run(watching(seen_version=seen, hold_s=60))
    assert again.version == seen


@on_coordinator()
async def test_history_has_the_present_position(client: AsyncCoordinatorClient) -> None:
    """Ask the box: its last report is up to a third of a lease old, and its loop has taken steps since."""
    await client.open_run(opening())
    first = await client.watch_run(watching(steps=1))
    held = asyncio.create_task(client.watch_run(watching(steps=1, seen_version=first.version, hold_s=30)))
    parts: list[pb.HistoryPart] = []
    fetched = asyncio.create_task(
        client._read("FetchHistory", REPORT_S, pb.FetchHistoryRequest(run="job/0"), parts.append)
    )
    async with asyncio.timeout(REPORT_S):
        await held
        await client.watch_run(watching(steps=7))
        await fetched
    (part,) = parts
    assert [position.step for position in part.history.known][-1] == 7


def header(total: int, **fields: Any) -> pb.SnapshotHeader:
    found = pb.SnapshotHeader(run="job/0", attempt=1, box=0, slot=0, generation=1, epoch=0, total=total)
    found.MergeFrom(pb.SnapshotHeader(**fields))
    return found


def query(generation: int = 1) -> pb.GetSnapshotsRequest:
    return pb.GetSnapshotsRequest(run="job/0", attempt=1, box=0, slot=0, generation=generation)


@on_coordinator()
async def test_snapshots_of_the_fenced_are_refused(client: AsyncCoordinatorClient, address: str) -> None:
    await client.open_run(opening())
    async with daemon(address):
        await until_ready(client)
        with pytest.raises(SupersededError, match=r"generation of box 0 slot 0 .*must be 1, got 7"):
            await client.put_snapshot(header(3, generation=7), b"x" * 3_000_000)
        with pytest.raises(SupersededError):
            await client.get_snapshots(query(7))
        with pytest.raises(UnknownRunError, match="has no box 0 slot 9"):
            await client.put_snapshot(header(3, slot=9), b"x")


@on_coordinator(replace(LIMITS, budget=3_000_000))
async def test_over_budget_is_refused_and_rest_stays(client: AsyncCoordinatorClient, address: str) -> None:
    await client.open_run(opening())
    async with daemon(address):
        await until_ready(client)
        reply = await client.put_snapshot(header(0), b"x" * 1_000_000)
        assert (reply.refused, reply.free_bytes) == ("", 2_000_000)
        refusal = await client.put_snapshot(header(1), b"x" * 2_500_000)
        assert refusal.refused.startswith(
            "a snapshot of 2500000 bytes does not fit into the budget: 1000000 of 2700000"
        )
        assert refusal.free_bytes == 2_000_000
        assert [head.total for head, _ in await client.get_snapshots(query())] == [0]


@limited(part_s=1.0)
@on_coordinator(replace(LIMITS, budget=3000000))
async def test_stalled_transfer_frees_its_budget(client: AsyncCoordinatorClient, address: str) -> None:
    await client.open_run(opening())
    async with daemon(address), connect_aio(address) as channel:
        await until_ready(client)
        begun = header(1)
        begun.size = 2_000_000

        async def half() -> AsyncIterator[pb.SnapshotPart]:
            yield pb.SnapshotPart(header=begun, data=b"x" * CHUNK)
            await asyncio.Event().wait()

        call = CoordinatorStub(channel).PutSnapshot(half(), timeout=DEADLINE_S, metadata=metadata(TOKEN))
        with pytest.raises(grpc.aio.AioRpcError, match=r"or none for 1 s"):
            await call
        reply = await client.put_snapshot(header(1), b"x" * 2_500_000)
        assert reply.refused == ""


@limited(part_s=1.0)
@on_coordinator()
async def test_stalled_blob_is_given_up(client: AsyncCoordinatorClient, address: str) -> None:
    """Jobs that start wait for its room."""

    async def half() -> AsyncIterator[pb.BlobPart]:
        yield pb.BlobPart(blob=blob_name(b"whole"), size=5)
        yield pb.BlobPart(data=b"wh")
        await asyncio.Event().wait()

    async with connect_aio(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match=r"or none for 1 s"):
            await CoordinatorStub(channel).PutBlob(half(), timeout=DEADLINE_S, metadata=metadata(TOKEN))


def test_delivered_snapshots_leave_the_disk(tmp_path: Path) -> None:
    def on_disk() -> list[int]:
        with contextlib.closing(sqlite3.connect(tmp_path / "snapshots.db")) as db:
            return [total for (total,) in db.execute("SELECT total FROM snapshots ORDER BY total")]

    async def body(client: AsyncCoordinatorClient, address: str) -> None:
        request = opening(num_workers_per_box=1)
        request.num_workers_per_box = 1
        request.loader.options.retention_steps = 2
        await client.open_run(request)
        async with daemon(address):
            await until_ready(client, slots=1)
            for total in range(6):
                await client.put_snapshot(header(total), b"x")
            await client.watch_run(watching(steps=5, slots=1))
            for steps in (6, 7):
                await client.watch_run(watching(steps=steps, slots=1))
            assert [head.total for head, _ in await client.get_snapshots(query())] == [4, 5]
            async with asyncio.timeout(DEADLINE_S):
                while on_disk() != [4, 5]:
                    await client.status()

    trial(body, state_dir=tmp_path)


@on_coordinator()
async def test_inconsistent_parts_are_a_protocol_error(client: AsyncCoordinatorClient, address: str) -> None:
    async def parts(size: int, *pieces: bytes) -> AsyncIterator[pb.SnapshotPart]:
        yield pb.SnapshotPart(header=header(3, size=size))
        for piece in pieces:
            yield pb.SnapshotPart(data=piece)

    await client.open_run(opening())
    async with daemon(address):
        await until_ready(client)
        put = client._stub.PutSnapshot
        for size, words in ((2, "declared 2 bytes, got more"), (9, "declared 9 bytes, got 4")):
            with pytest.raises(ProtocolError, match=words), client._guarded("PutSnapshot", DEADLINE_S):
                await put(parts(size, b"ab", b"cd"), timeout=DEADLINE_S, metadata=metadata(TOKEN))
        assert await client.get_snapshots(query()) == []


@on_coordinator()
async def test_blob_with_wrong_digest_is_refused(client: AsyncCoordinatorClient) -> None:
    async def parts(data: bytes) -> AsyncIterator[pb.BlobPart]:
        yield pb.BlobPart(blob=blob_name(b"good"), size=len(data))
        yield pb.BlobPart(data=data)

    put = client._stub.PutBlob
    with (
        pytest.raises(ProtocolError, match="the 4 bytes received do not have the declared digest"),
        client._guarded("PutBlob", DEADLINE_S),
    ):
        await put(parts(b"evil"), timeout=DEADLINE_S, metadata=metadata(TOKEN))
    await put(parts(b"good"), timeout=DEADLINE_S, metadata=metadata(TOKEN))
    assert await client.get_blob(blob_name(b"good")) == b"good"


@on_coordinator(replace(LIMITS, budget=6000000))
async def test_blobs_are_kept_by_content(client: AsyncCoordinatorClient, address: str) -> None:
    data = b"state" * 1_000_000
    name = await client.put_blob(data, "job/0")
    assert name == blob_name(data) == await client.put_blob(data)
    assert await client.get_blob(name) == data
    with CoordinatorClient(address, TOKEN, insecure=True) as blocking:
        assert await asyncio.to_thread(blocking.put_blob, b"") == blob_name(b"")
        assert await asyncio.to_thread(blocking.get_blob, name) == data
    with pytest.raises(StateUnavailableError, match="does not have the value 'nothing'"):
        await client.get_blob("nothing")
    with pytest.raises(
        InvalidArgumentError,
        match=r"for run job/0 cannot be stored: its 2000000 bytes do not fit .*: 5000000 of 6000000 b",
    ):
        await client.put_blob(b"z" * 2_000_000, "job/0")
    start = Position.start(2, step=7).to_proto()
    await client.open_run(opening(resume=records_pb2.Resume(blob=name), start=start))


@on_coordinator()
async def test_all_ranks_share_one_state_query(client: AsyncCoordinatorClient, address: str) -> None:
    def large(request: pb.StateRequest) -> tuple[pb.StateAnswer, bytes]:
        answer, data = plain_state(request)
        return answer, data * 1_000_000

    async with daemon(address, "w1", large, slots=2) as one, daemon(address, "w2", large, slots=2) as two:
        for box in (0, 1):
            await client.open_run(opening(box, num_boxes=2))
        with CoordinatorClient(address, TOKEN, insecure=True) as blocking:
            states = await asyncio.gather(
                client.fetch_state(asking(0, 5)),
                client.fetch_state(asking(1, 5)),
                asyncio.to_thread(blocking.fetch_state, asking(0, 5)),
            )
        assert states[0] == states[1] == states[2]
        places = [(r.box, r.local_worker_id, r.worker_step) for r, _ in states[0].records]
        assert places == [(0, 0, 3), (0, 1, 2), (1, 0, 3), (1, 1, 2)]
        assert states[0].records[2][1] == b"1.0:0.3" * 1_000_000
        assert {box: position.step for box, position in states[0].positions.items()} == {0: 5, 1: 5}
        assert len(one.asked) + len(two.asked) == 4
        assert await client.fetch_state(pb.FetchStateRequest(run="job/0", newest=True, deadline_s=1)) == states[0]


@on_coordinator()
async def test_a_deadline_names_who_is_waited_for(client: AsyncCoordinatorClient, address: str) -> None:
    def silent(request: pb.StateRequest) -> tuple[pb.StateAnswer, bytes]:
        raise asyncio.CancelledError

    await client.open_run(opening(0, num_boxes=2))
    await client.register(pb.RegisterWorkerRequest(worker="z", session="s", slots=3))
    async with daemon(address, say=silent, slots=1):
        await client.watch_run(watching())
        async with asyncio.timeout(DEADLINE_S):
            while (await client.watch_run(watching())).slots[0].phase != pb.READY:
                await asyncio.sleep(0)
        await client.deregister(pb.DeregisterWorkerRequest(worker="z", session="s"))
        with pytest.raises(DeadlineError) as caught:
            await client.fetch_state(asking(0, 2, deadline_s=0.3))
        assert caught.value.message == (
            "the state of run job/0 at step 2 was not complete after 0.3 s; waited for box 0 slot 1 (waiting for a "
            "worker), box 1 (has not opened the run), box 0 slot 0 on worker w"
        )
