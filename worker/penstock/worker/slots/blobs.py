"""Large values (blobs) of slots: a loader's arguments, the state to resume from. Each is fetched once, into a sealed
memfd whose descriptor children get: copies of 300 MB for 32 slots would take 10 GB. A thread fetches it, over its own
connection: the event loop could send no heartbeats for seconds."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

from penstock.proto.rpc.calls import CoordinatorClient
from penstock.worker.processes.control_channel import SEALS, ControlMessage, payload_of, write_all

AT_ONCE = 2


class Blobs:
    """Cache of the coordinator's values. connect: makes a client to fetch with."""

    def __init__(self, connect: Callable[[], CoordinatorClient]) -> None:
        self._connect = connect
        self._clients: set[CoordinatorClient] = set()
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="penstock-blobs")
        self._blobs: dict[str, asyncio.Task[int]] = {}

    async def descriptor(self, name: str) -> int:
        """Return a descriptor, which the caller must close. Raises the coordinator's error."""
        fetching = self._blobs.get(name)
        if fetching is None or (fetching.done() and (fetching.cancelled() or fetching.exception() is not None)):
            fetching = self._blobs[name] = asyncio.ensure_future(self._fetch(name))
        return os.dup(await asyncio.shield(fetching))

    async def read(self, name: str) -> bytes:
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
        for name in [name for name in self._blobs if name not in names]:
            self._blobs.pop(name).add_done_callback(_close_fetched)

    def close(self) -> None:
        self.keep(())
        for client in self._clients:
            client.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _close_fetched(fetching: asyncio.Task[int]) -> None:
    if not fetching.cancelled() and fetching.exception() is None:
        os.close(fetching.result())


def _fetched(client: CoordinatorClient, name: str) -> int:
    fd = os.memfd_create("penstock-blob", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        client.get_blob_into(name, lambda part: write_all(fd, part))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd
