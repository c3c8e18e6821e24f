"""A program: a coordinator that comes back at another address under its name, and the seconds until callers find it.

It writes the table of names of its mount namespace, so start it in one of its own: `unshare --mount`.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

from penstock.proto.calls import AsyncCoordinatorClient, CoordinatorClient
from penstock.proto.channel import Served, server_aio
from penstock.proto.errors import CoordinatorUnavailableError
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import coordinator_pb2_grpc as rpc

NAME, TOKEN = "coordinator.test", "token"


class Answering(rpc.CoordinatorServicer):
    async def Status(self, request: pb.StatusRequest, context: object) -> pb.StatusReply:
        return pb.StatusReply()


async def serve(host: str, port: int, names: Path) -> Served:
    names.write_text(f"127.0.0.1 localhost\n{host} {NAME}\n")
    servicer = Answering()  # type: ignore[abstract]
    add = rpc.add_CoordinatorServicer_to_server
    return await server_aio(f"{host}:{port}", TOKEN, lambda server: add(servicer, server), insecure=True)


async def move(names: Path) -> float:
    served = await serve("127.0.0.2", 0, names)
    port = int(served.address.rpartition(":")[2])
    blocking = CoordinatorClient(f"{NAME}:{port}", TOKEN)
    async with AsyncCoordinatorClient(f"{NAME}:{port}", TOKEN) as client:
        await client.status()
        await asyncio.to_thread(blocking.status)
        await served.stop(0)
        for _ in range(5):  # so that its old address was looked up just now
            assert await missing(client, blocking)
        served = await serve("127.0.0.3", port, names)
        moved = time.monotonic()
        while await missing(client, blocking):
            await asyncio.sleep(0.1)
        found = time.monotonic() - moved
    blocking.close()
    await served.stop(0)
    return found


async def missing(client: AsyncCoordinatorClient, blocking: CoordinatorClient) -> bool:
    await asyncio.to_thread(blocking.reach, 0.1)
    try:
        await client.status()
        await asyncio.to_thread(blocking.status)
    except CoordinatorUnavailableError:
        return True
    return False


if __name__ == "__main__":
    subprocess.run(["mount", "--bind", sys.argv[1], "/etc/hosts"], check=True)
    print(asyncio.run(move(Path("/etc/hosts"))))
