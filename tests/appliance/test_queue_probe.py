"""Does the coordinator know that calls wait which it has not heard?"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from penstock.appliance.server.queue_probe import QueueProbe
from penstock.proto.rpc.channel import server_aio

EVERY_S = 0.05


@contextlib.asynccontextmanager
async def probe_on(address: str, is_due: Callable[[], bool] = lambda: True) -> AsyncIterator[QueueProbe]:
    probe = QueueProbe(address, is_due)
    try:
        yield probe
    finally:
        await probe.close()


async def look_for(probe: QueueProbe, seconds: float) -> list[float]:
    """Return what the probe says in this time, asked as the coordinator's ticker asks it."""
    until, said = time.monotonic() + seconds, []
    while time.monotonic() < until:
        said.append(probe.unreceived_s())
        await asyncio.sleep(EVERY_S)
    return said


def test_a_server_that_answers_has_heard(tmp_path: Path) -> None:
    async def look() -> float:
        address = f"unix:{tmp_path}/own"
        served = await server_aio("127.0.0.1:0", "token", lambda server: None, inner=address)
        async with probe_on(address) as probe:
            said = await look_for(probe, 2.0)
        await served.stop(0)
        return said[-1]

    tmp_path.chmod(0o700)
    assert asyncio.run(look()) < 1.5


def test_calls_that_wait_are_known(tmp_path: Path) -> None:
    """Also after the probe is not due any more: it must end first."""

    async def look() -> float:
        with socket.socket(socket.AF_UNIX) as silent:
            silent.bind(f"{tmp_path}/own")
            silent.listen()  # and takes no call
            due = [True]
            async with probe_on(f"unix:{tmp_path}/own", lambda: bool(due and due.pop())) as probe:
                return (await look_for(probe, 1.6))[-1]

    tmp_path.chmod(0o700)
    assert asyncio.run(look()) >= 1.5


def test_no_listener_keeps_no_lease_open(tmp_path: Path) -> None:
    async def look() -> float:
        async with probe_on(f"unix:{tmp_path}/own") as probe:
            return (await look_for(probe, 2.0))[-1]

    tmp_path.chmod(0o700)
    assert asyncio.run(look()) < 1.5


def test_nothing_is_asked_while_nothing_is_late(tmp_path: Path) -> None:
    async def look() -> list[float]:
        with socket.socket(socket.AF_UNIX) as silent:
            silent.bind(f"{tmp_path}/own")
            silent.listen()
            async with probe_on(f"unix:{tmp_path}/own", lambda: False) as probe:
                said = await look_for(probe, 0.5)
            silent.setblocking(False)
            with pytest.raises(BlockingIOError):
                silent.accept()
            return said

    tmp_path.chmod(0o700)
    assert set(asyncio.run(look())) == {0.0}
