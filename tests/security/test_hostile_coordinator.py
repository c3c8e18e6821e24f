"""A coordinator that knows the token, and makes its callers hold more than a coordinator stores."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock.proto.errors import DeadlineError, PenstockError, ProtocolError
from penstock.proto.rpc import calls
from penstock.proto.rpc.bounds import message_bounds, reply_parts
from penstock.proto.rpc.calls import AsyncCoordinatorClient, CoordinatorClient
from penstock.proto.rpc.channel import server_aio
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1.coordinator_pb2_grpc import CoordinatorServicer, add_CoordinatorServicer_to_server

SECRET = "s" * 64
PART = 1 << 20
SENT = 64
"""Parts in a reply that is too long, at most."""


class Endless(CoordinatorServicer):
    """Sends the same part again and again. `taken`: parts that its callers have let it send."""

    def __init__(self, part: Any) -> None:
        self.part = part
        self.taken = 0

    async def _parts(self, request: Any, context: Any) -> AsyncIterator[Any]:
        for _ in range(SENT):
            yield self.part
            self.taken += 1

    GetBlob = FetchState = FetchHistory = _parts

    async def Heartbeat(self, request: Any, context: Any) -> Any:
        return self.part


@asynccontextmanager
async def sending(part: Any) -> AsyncIterator[tuple[AsyncCoordinatorClient, CoordinatorClient]]:
    def register(server: Any) -> None:
        add_CoordinatorServicer_to_server(Endless(part), server)  # type: ignore[abstract]

    served = await server_aio("127.0.0.1:0", SECRET, register)
    blocking = CoordinatorClient(served.address, SECRET, insecure=True)
    async with AsyncCoordinatorClient(served.address, SECRET, insecure=True) as client:
        yield client, blocking
    blocking.close()
    await served.stop(0)


def refused(part: Any, error: type[PenstockError], words: str, *methods: str) -> None:
    """Each of these calls, of the blocking client and the other, is refused."""

    async def run() -> None:
        async with sending(part) as (client, blocking):
            for method in methods:
                for call in CALLS[method](client, blocking):
                    with pytest.raises(error, match=words):
                        await call()

    asyncio.run(asyncio.wait_for(run(), 60))


Calls = list[Callable[[], Awaitable[Any]]]
STATE = pb.FetchStateRequest(run="job/0", deadline_s=5)
CALLS: dict[str, Callable[[AsyncCoordinatorClient, CoordinatorClient], Calls]] = {
    "GetBlob": lambda client, blocking: [
        lambda: client.get_blob("x"),
        lambda: asyncio.to_thread(blocking.get_blob_into, "x", bytearray().extend),
    ],
    "FetchState": lambda client, _: [lambda: client.fetch_state(STATE)],
    "FetchHistory": lambda _, blocking: [lambda: asyncio.to_thread(blocking.fetch_histories, "job/0", 0)],
    "Heartbeat": lambda client, blocking: [
        lambda: client.heartbeat(pb.HeartbeatRequest()),
        lambda: asyncio.to_thread(blocking.heartbeat, pb.HeartbeatRequest()),
    ],
}


@pytest.mark.parametrize(
    ("part", "method"),
    [
        (pb.BlobPart(data=bytes(PART)), "GetBlob"),
        (pb.HistoryPart(data=bytes(PART)), "FetchHistory"),
        (pb.StatePart(record=pb.WorkerRecord(state_bytes=1 << 50), data=b"x"), "FetchState"),
    ],
    ids=["blob", "history", "state"],
)
def test_values_have_so_many_bytes(monkeypatch: pytest.MonkeyPatch, part: Any, method: str) -> None:
    monkeypatch.setattr(reply_parts, "VALUE_MAX", 4 * PART)
    refused(part, ProtocolError, f"at most .*{4 * PART} bytes", method)


@pytest.mark.parametrize(
    ("limit", "part", "method"),
    [
        ("RECORDS_MAX", pb.StatePart(parts=[pb.StatePart(record=pb.WorkerRecord(box=3))] * 9), "FetchState"),
        ("HISTORIES_MAX", pb.HistoryPart(history=pb.History(attempt=3)), "FetchHistory"),
    ],
)
def test_replies_have_so_many_values(monkeypatch: pytest.MonkeyPatch, limit: str, part: Any, method: str) -> None:
    monkeypatch.setattr(reply_parts, limit, 8)
    refused(part, ProtocolError, "must have at most 8", method)


def test_empty_parts_are_refused() -> None:
    """A reply without a limit could hold any number of values until the deadline."""
    refused(pb.BlobPart(), ProtocolError, "must not be empty", "GetBlob")


def test_what_is_no_reply_is_an_error() -> None:
    """gRPC gave None for a reply that it could not parse, which ended the worker."""
    refused(b"\xff" * 9, ProtocolError, "a reply of .* cannot be decoded", *CALLS)


def test_replies_have_so_many_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """An assignment of two bytes takes 170 in memory."""
    monkeypatch.setattr(message_bounds, "REPLY_FIELDS", 100)
    reply = pb.HeartbeatReply()
    for _ in range(101):
        reply.assignments.add()
    refused(reply, ProtocolError, "at most 100 fields", "Heartbeat")


class Silent(CoordinatorServicer):
    """Answers no request for a state, although it is connected."""

    async def FetchState(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await asyncio.sleep(600)
        yield pb.StatePart()

    async def OpenRun(self, request: Any, context: Any) -> Any:
        await asyncio.sleep(600)


def test_a_wait_for_a_silent_coordinator_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that a transfer may take is not time to wait for its begin; and what ends the run ends its calls."""
    monkeypatch.setattr(calls, "LATE_S", 0.5)
    dead = PenstockError("the embedded coordinator has ended")

    async def run() -> None:
        served = await server_aio(
            "127.0.0.1:0",
            SECRET,
            lambda server: add_CoordinatorServicer_to_server(Silent(), server),  # type: ignore[abstract]
        )
        client = CoordinatorClient(served.address, SECRET, insecure=True)
        with pytest.raises(DeadlineError, match="did not answer FetchState within 1 s"):
            await asyncio.to_thread(client.fetch_state, pb.FetchStateRequest(run="job/0", deadline_s=1))
        opening = asyncio.ensure_future(asyncio.to_thread(client.open_run, pb.OpenRunRequest(job="job")))
        await asyncio.sleep(0.3)
        client.fail(dead)
        with pytest.raises(PenstockError, match="has ended"):
            await opening
        with pytest.raises(PenstockError, match="has ended"):
            await asyncio.to_thread(client.status)
        client.close()
        await served.stop(0)

    asyncio.run(asyncio.wait_for(run(), 60))
