"""What a consumer hears that the daemon does not let in, on both lanes."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.lanes.conftest import next_frame

from penstock.client.landing import Lander
from penstock.proto.errors import AuthenticationError, PenstockError, SupersededError
from penstock.proto.lane import LANE_PROTOCOL, Consumer, connect_local
from penstock.proto.v1 import lane_pb2
from penstock.worker.lanes import LaneDoors


@contextmanager
def doors(error: PenstockError) -> Iterator[LaneDoors]:
    """Those of a daemon that refuses everybody for this reason."""

    async def refuse(connection: socket.socket, hello: lane_pb2.Hello) -> None:
        raise error

    opened = LaneDoors(refuse)
    ready = threading.Event()
    loop: asyncio.AbstractEventLoop
    over: asyncio.Event

    async def serve() -> None:
        nonlocal loop, over
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        opened.open("127.0.0.1:0")
        ready.set()
        await over.wait()
        opened.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(10)
    try:
        yield opened
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()


@pytest.fixture(scope="module")
def lander() -> Iterator[Lander]:
    lander = Lander()
    yield lander
    lander.stop()


@pytest.mark.parametrize("lane", ["local", "tcp"])
@pytest.mark.parametrize(
    ("error", "protocol", "kind", "name"),
    [
        (SupersededError("generation 2 is here"), LANE_PROTOCOL, lane_pb2.CLOSE, "SupersededError"),
        (AuthenticationError("no such ticket"), LANE_PROTOCOL, lane_pb2.ERROR, "AuthenticationError"),
        (AuthenticationError("not even asked"), LANE_PROTOCOL - 1, lane_pb2.ERROR, "VersionSkewError"),
    ],
)
def test_who_is_refused_hears_why(
    lander: Lander, lane: str, error: PenstockError, protocol: int, kind: int, name: str
) -> None:
    with doors(error) as opened:
        hello = lane_pb2.Hello(protocol=protocol, next_total=1)
        if lane == "tcp":
            hello.target = opened.tcp_address
        sock = connect_local(lander.start() if lane == "tcp" else opened.local_address, 5)
        sock.send(hello.SerializeToString())
        consumer = Consumer(sock, "a daemon")
        frame = next_frame(consumer)
        assert (frame.kind, frame.error.name) == (kind, name)
        consumer.close()
