"""A coordinator that knows the token, and sends its workers more than a coordinator stores."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from penstock.proto.errors import ProtocolError
from penstock.proto.rpc import calls
from penstock.proto.rpc.calls import AsyncCoordinatorClient, CoordinatorClient
from penstock.proto.rpc.channel import server_aio
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1.coordinator_pb2_grpc import CoordinatorServicer, add_CoordinatorServicer_to_server

SECRET = "s" * 64
PART = 1 << 20


class Endless(CoordinatorServicer):
    async def GetBlob(self, request: Any, context: Any) -> AsyncIterator[pb.BlobPart]:
        for _ in range(64):
            yield pb.BlobPart(data=bytes(PART))

    async def GetSnapshots(self, request: Any, context: Any) -> AsyncIterator[pb.SnapshotPart]:
        yield pb.SnapshotPart(header=pb.SnapshotHeader(size=1 << 50), data=bytes(PART))


def test_workers_take_no_value_above_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "VALUE_MAX", 4 * PART)
    taken: list[int] = []

    async def run() -> None:
        def register(server: Any) -> None:
            add_CoordinatorServicer_to_server(Endless(), server)  # type: ignore[abstract]

        served = await server_aio("127.0.0.1:0", SECRET, register)
        blocking = CoordinatorClient(served.address, SECRET)
        with pytest.raises(ProtocolError, match="must have at most"):
            await asyncio.to_thread(blocking.get_blob_into, "x", lambda part: taken.append(len(part)))
        async with AsyncCoordinatorClient(served.address, SECRET) as client:
            with pytest.raises(ProtocolError, match="must have at most"):
                await client.get_snapshots(pb.GetSnapshotsRequest())
        blocking.close()
        await served.stop(0)

    asyncio.run(asyncio.wait_for(run(), 30))
    assert sum(taken) <= 4 * PART
