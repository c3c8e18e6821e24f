"""Small compressed answer of a process in the coordinator's place: no caller unpacks it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

MIB = 1 << 20
UNPACKED = 64 * MIB
ALLOWED = 48 * MIB
"""Bytes that a caller's memory may grow by."""


def peak() -> int:
    """The most that this process has had in memory, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the kernel does not say")


class Bomb(grpc.GenericRpcHandler):
    def service(self, details: object) -> Any:
        async def answer(request: object, context: object) -> bytes:
            return bytes(UNPACKED)

        return grpc.unary_unary_rpc_method_handler(answer)


def call(kind: str, address: str) -> None:
    """Make a call in the child process, and report what it costs."""
    from penstock.proto.errors import PenstockError
    from penstock.proto.rpc.calls import AsyncCoordinatorClient, CoordinatorClient
    from penstock.proto.v1 import coordinator_pb2 as pb

    async def waited() -> None:
        async with AsyncCoordinatorClient(address, "s" * 64, deadline_s=50) as client:
            await client.heartbeat(pb.HeartbeatRequest())

    before = peak()
    try:
        if kind == "blocking":
            with CoordinatorClient(address, "s" * 64, deadline_s=50) as client:
                client.heartbeat(pb.HeartbeatRequest())
        else:
            asyncio.run(waited())
    except PenstockError as error:
        print(type(error).__name__, peak() - before)


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_a_compressed_answer_is_not_unpacked(kind: str) -> None:
    async def run() -> bytes:
        options = [("grpc.max_send_message_length", -1)]
        server = grpc.aio.server(handlers=(Bomb(),), options=options, compression=grpc.Compression.Gzip)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        child = await asyncio.create_subprocess_exec(
            sys.executable, __file__, kind, f"127.0.0.1:{port}", stdout=subprocess.PIPE
        )
        said, _ = await child.communicate()
        await server.stop(0)
        return said

    error, grown = asyncio.run(asyncio.wait_for(run(), 60)).decode().split()
    assert error == "AuthenticationError"
    assert int(grown) < ALLOWED


if __name__ == "__main__":
    call(*sys.argv[1:])
