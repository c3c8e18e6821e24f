"""Does the coordinator know that calls wait which it has not heard?"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

from penstock.appliance.server.queue_probe import QueueProbe
from penstock.proto.rpc.channel import server_aio

EVERY_S = 0.05


@contextlib.asynccontextmanager
async def probe_on(address: str) -> AsyncIterator[QueueProbe]:
    probe = QueueProbe(address, EVERY_S)
    calling = asyncio.create_task(probe.run())
    try:
        yield probe
    finally:
        calling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await calling


def test_a_server_that_answers_has_heard(tmp_path: Path) -> None:
    async def look() -> float:
        address = f"unix:{tmp_path}/own"
        served = await server_aio("127.0.0.1:0", "token", lambda server: None, inner=address)
        async with probe_on(address) as probe:
            await asyncio.sleep(2.0)
            heard = probe.unreceived_s()
        await served.stop(0)
        return heard

    tmp_path.chmod(0o700)
    assert asyncio.run(look()) < 1.5


def test_calls_that_wait_are_known(tmp_path: Path) -> None:
    async def look() -> float:
        with socket.socket(socket.AF_UNIX) as silent:
            silent.bind(f"{tmp_path}/own")
            silent.listen()  # and takes no call
            async with probe_on(f"unix:{tmp_path}/own") as probe:
                await asyncio.sleep(1.5)
                return probe.unreceived_s()

    tmp_path.chmod(0o700)
    assert asyncio.run(look()) >= 1.5


def test_no_listener_keeps_no_lease_open(tmp_path: Path) -> None:
    async def look() -> float:
        async with probe_on(f"unix:{tmp_path}/own") as probe:
            await asyncio.sleep(2.0)
            return probe.unreceived_s()

    tmp_path.chmod(0o700)
    assert asyncio.run(look()) < 1.5
