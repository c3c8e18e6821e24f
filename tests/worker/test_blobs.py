"""Large values are fetched once for all slots, off the event loop."""

from __future__ import annotations

import asyncio
import mmap
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
from coroutines import in_loop

from penstock.proto.errors import CoordinatorUnavailableError
from penstock.worker.processes.control_channel import ControlMessage, payload_of
from penstock.worker.slots.blobs import Blobs

VALUE = bytes(range(256)) * 100


class Coordinator:
    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.away = True
        self.open = 0

    def connected(self) -> Any:
        self.open += 1
        return self

    def get_blob_into(self, name: str, write: Callable[[bytes], None]) -> None:
        self.asked.append((name, threading.get_ident()))
        if self.away:
            self.away = False
            raise CoordinatorUnavailableError("it is away")
        write(VALUE[:1000])
        write(VALUE[1000:])

    def close(self) -> None:
        self.open -= 1


@in_loop
async def test_value_is_fetched_once_by_a_thread() -> None:
    coordinator = Coordinator()
    blobs = Blobs(coordinator.connected)
    with pytest.raises(CoordinatorUnavailableError):
        await blobs.descriptor("one")
    fds = await asyncio.gather(*[blobs.descriptor("one") for _ in range(3)])
    assert [name for name, _ in coordinator.asked] == ["one", "one"]
    assert coordinator.open == 0, "each fetch closes its connection"
    assert threading.get_ident() not in [thread for _, thread in coordinator.asked]
    with pytest.raises(PermissionError), mmap.mmap(fds[0], 0):
        pass  # no child can change what the others read
    assert await blobs.read("one") == VALUE
    blobs.keep({"one"})
    os.close(await blobs.descriptor("one"))
    assert len(coordinator.asked) == 2
    blobs.keep(())
    assert [payload_of(ControlMessage("resume", fds=[fd])) for fd in fds] == [VALUE] * 3
    os.close(await blobs.descriptor("one"))
    assert len(coordinator.asked) == 3, "nobody had needed it any more"
    before = len(os.listdir("/proc/self/fd"))
    blobs.close()
    await asyncio.sleep(0)
    assert len(os.listdir("/proc/self/fd")) == before - 1
