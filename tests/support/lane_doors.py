"""A daemon's doors without the daemon."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.proto.errors import PenstockError
from penstock.proto.rpc.tls import Tls
from penstock.proto.v1 import lane_pb2
from penstock.worker.daemon.listeners import Attach, LaneListeners

__all__ = ["listeners", "refusing"]


def refusing(error: PenstockError) -> Attach:
    """A daemon that refuses everybody for this reason."""

    async def refuse(connection: socket.socket, hello: lane_pb2.Hello) -> None:
        raise error

    return refuse


@contextmanager
def listeners(attach: Attach, tls: Tls | None = None) -> Iterator[tuple[LaneListeners, asyncio.AbstractEventLoop]]:
    """Yield the listeners of a daemon, and the event loop in which they run."""
    opened = LaneListeners(attach, tls)
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
        yield opened, loop
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
