"""A program: a coordinator that comes back at another address under its name, and the seconds until callers find it.

First it ends in good order, then it says nothing any more: it is stopped by a signal, and started elsewhere so many
seconds later as the second argument says. It writes the table of names of its mount namespace, so start it in one of
its own: `unshare --mount`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from penstock.proto.errors import CoordinatorUnavailableError
from penstock.proto.rpc.calls import AsyncCoordinatorClient, CoordinatorClient
from penstock.proto.rpc.channel import RunningServer, server_aio
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import coordinator_pb2_grpc as rpc

NAME, TOKEN = "coordinator.test", "token"
NAMES = Path("/etc/hosts")
HOLD_S = 60.0
"""Seconds of the calls that are held when it falls silent: longer than all else."""


class Answering(rpc.CoordinatorServicer):
    async def Status(self, request: pb.StatusRequest, context: object) -> pb.StatusReply:
        return pb.StatusReply()

    async def WatchRun(self, request: pb.WatchRunRequest, context: object) -> pb.WatchRunReply:
        print("held", flush=True)
        await asyncio.sleep(request.hold_s)
        return pb.WatchRunReply()


async def serve(host: str, port: int) -> RunningServer:
    servicer = Answering()  # type: ignore[abstract]
    add = rpc.add_CoordinatorServicer_to_server
    return await server_aio(f"{host}:{port}", TOKEN, lambda server: add(servicer, server), insecure=True)


async def serve_for_ever(host: str, port: int) -> None:
    served = await serve(host, port)
    print(served.address, flush=True)
    await served.server.wait_for_termination()


def start(host: str, port: int) -> subprocess.Popen[str]:
    """A coordinator in a process of its own, which has the name."""
    server = subprocess.Popen([sys.executable, __file__, host, str(port)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline().startswith(host)
    NAMES.write_text(f"127.0.0.1 localhost\n{host} {NAME}\n")
    return server


async def move(delay_s: float) -> list[float]:
    found = []
    served = await serve("127.0.0.2", 0)
    NAMES.write_text(f"127.0.0.1 localhost\n127.0.0.2 {NAME}\n")
    port = int(served.address.rpartition(":")[2])
    blocking = CoordinatorClient(f"{NAME}:{port}", TOKEN, insecure=True)
    async with AsyncCoordinatorClient(f"{NAME}:{port}", TOKEN, insecure=True) as client:
        await client.status()
        await asyncio.to_thread(blocking.status)
        await served.stop(0)
        for _ in range(5):  # so that its old address was looked up just now
            assert await missing(client, blocking)
        silent = start("127.0.0.3", port)
        moved = time.monotonic()
        while await missing(client, blocking):
            await asyncio.sleep(0.1)
        found.append(time.monotonic() - moved)

        request = pb.WatchRunRequest(hold_s=HOLD_S)
        calls = (client.watch_run(request), asyncio.to_thread(blocking.watch_run, request))
        held = [asyncio.ensure_future(call) for call in calls]
        assert silent.stdout is not None
        for _ in held:
            await asyncio.to_thread(silent.stdout.readline)
        os.kill(silent.pid, signal.SIGSTOP)
        await asyncio.sleep(delay_s)
        after = start("127.0.0.4", port)
        moved = time.monotonic()
        ends = await asyncio.gather(*held, return_exceptions=True)
        assert all(isinstance(end, CoordinatorUnavailableError) for end in ends), ends
        while await missing(client, blocking):
            await asyncio.sleep(0.1)
        found.append(time.monotonic() - moved)
    blocking.close()
    silent.kill()
    after.kill()
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
    first, second = sys.argv[1:]
    if first.startswith("127."):
        asyncio.run(serve_for_ever(first, int(second)))
    else:
        subprocess.run(["mount", "--bind", first, str(NAMES)], check=True)
        print(json.dumps(asyncio.run(move(float(second)))))
