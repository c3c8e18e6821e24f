"""Large values (blobs) that slots need, such as a loader's arguments or the state to resume from. The worker daemon
fetches each value once.

A value is kept in a sealed memfd, and every child process gets a descriptor of it: copies of 300 MB for each of 32
slots would take 10 GB. A thread fetches the value, over a connection that is closed afterwards. If the daemon's event
loop fetched it, it could send no heartbeats for seconds.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from penstock.worker.processes.control_channel import ControlMessage, payload_of

__all__ = ["Blobs"]

AT_ONCE = 2
"""Largest number of values that are fetched at the same time."""
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class _Client(Protocol):
    def get_blob_into(self, name: str, write: Callable[[bytes], None]) -> None: ...
    def close(self) -> None: ...


class Blobs:
    """Cache of large values (such as a loader's arguments) that the coordinator holds, by name.

    Args:
        connect: returns a client with which a value is fetched from the coordinator.
    """

    def __init__(self, connect: Callable[[], _Client]) -> None:
        self._connect = connect
        self._clients: set[_Client] = set()
        """Clients that are fetching a value now."""
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="penstock-blobs")
        self._blobs: dict[str, asyncio.Task[int]] = {}

    async def descriptor(self, name: str) -> int:
        """Return a file descriptor of the value called `name`, fetched from the coordinator unless it is cached. The
        caller must close the descriptor. Raise the coordinator's error if the value cannot be fetched."""
        fetching = self._blobs.get(name)
        if fetching is None or (fetching.done() and (fetching.cancelled() or fetching.exception() is not None)):
            fetching = self._blobs[name] = asyncio.ensure_future(self._fetch(name))
        return os.dup(await asyncio.shield(fetching))

    async def read(self, name: str) -> bytes:
        """Return the bytes of the value called `name`."""
        fd = await self.descriptor(name)
        return await asyncio.to_thread(payload_of, ControlMessage("value", fds=[fd]))

    async def _fetch(self, name: str) -> int:
        client = self._connect()
        self._clients.add(client)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, _fetched, client, name)
        finally:
            self._clients.discard(client)
            client.close()

    def keep(self, names: Collection[str]) -> None:
        """Release all values except those called `names`."""
        for name in [name for name in self._blobs if name not in names]:
            self._blobs.pop(name).add_done_callback(_close_fetched)

    def close(self) -> None:
        """Release all values, and fetch no more."""
        self.keep(())
        for client in self._clients:
            client.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _close_fetched(fetching: asyncio.Task[int]) -> None:
    if not fetching.cancelled() and fetching.exception() is None:
        os.close(fetching.result())


def _fetched(client: _Client, name: str) -> int:
    fd = os.memfd_create("penstock-blob", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        client.get_blob_into(name, lambda part: _write(fd, part))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _write(fd: int, part: bytes) -> None:
    left = memoryview(part)
    while left:
        left = left[os.write(fd, left) :]
