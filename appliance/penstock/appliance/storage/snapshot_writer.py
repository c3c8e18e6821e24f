"""Writer of snapshots and blobs, in a thread of its own. It bounds the memory of values that wait to be written, and
writes many snapshots in one commit.

The thread is needed because a commit of megabytes takes as long as the disk needs, and leases must not wait for the
disk. Waiting snapshots share a commit, because a commit of any size costs one flush of the disk: with a commit for each
snapshot of 76 kB, the flushes would be the larger part of the work. The memory is bounded because a starting fleet
sends the first snapshots of all its slots at once.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

from penstock.appliance.model.limits import MIB
from penstock.appliance.storage.snapshot_index import Drop
from penstock.appliance.storage.snapshot_store import Store
from penstock.proto.v1 import coordinator_pb2 as pb

COMMIT_BYTES = 8 * MIB
"""Largest size of a commit of several snapshots, in bytes. Such a commit takes a tenth of a second on a disk of 80
MB/s, in which removals and reads wait. A larger snapshot has a commit of its own."""

_Result = TypeVar("_Result")


SMALL_SHARE = 8
"""Divisor of the memory budget: a value of at most an eighth of the budget counts as small."""


class InflowBudget:
    """Memory budget of snapshots or blobs that are being received or sent. One half is for small values and one for
    large ones, so that a small value never waits for a large one whose sender is slow."""

    def __init__(self, limit: int) -> None:
        self._small_size = limit // SMALL_SHARE
        self._small, self._large = MemoryBudget(limit // 2), MemoryBudget(limit // 2)

    def taken(self, size: int, credential: str = "") -> AbstractAsyncContextManager[None]:
        """Return a context that holds `size` bytes of the budget for a caller with this credential token. Entering the
        context waits until the bytes are free."""
        return (self._small if size <= self._small_size else self._large).taken(size, credential)


class MemoryBudget:
    """Budget of bytes in memory, with a queue of the values that wait for memory. The next value is of the credential
    token that holds the fewest bytes; values of one token are admitted in the order of their arrival. So no token waits
    for the whole queue of another token."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._by_token: Counter[str] = Counter()
        self._waiting: deque[tuple[int, str, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def taken(self, size: int, credential: str = "") -> AsyncIterator[None]:
        """Hold `size` bytes of the budget while the context is open. Entering the context waits until the bytes are
        free, without a deadline, because each waiting call has its own. A value that is larger than the budget is
        admitted when nothing else is in memory."""
        if self._waiting or not self._fits(size):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            entry = (size, credential, turn)
            self._waiting.append(entry)
            try:
                await turn
            except asyncio.CancelledError:
                if entry in self._waiting:
                    self._waiting.remove(entry)
                elif not turn.cancelled():  # admitted just before; a cancelled entry is skipped and not counted
                    self._count(-size, credential)
                self._admit_waiting()
                raise
        else:
            self._count(size, credential)
        try:
            yield
        finally:
            self._count(-size, credential)
            self._admit_waiting()

    def _count(self, size: int, credential: str) -> None:
        self._used += size
        self._by_token[credential] += size
        if not self._by_token[credential]:
            del self._by_token[credential]

    def _fits(self, size: int) -> bool:
        return self._used == 0 or self._used + size <= self._limit

    def _admit_waiting(self) -> None:
        while self._waiting:
            entry = min(self._waiting, key=lambda one: self._by_token[one[1]])
            size, credential, turn = entry
            if not self._fits(size):
                return
            self._waiting.remove(entry)
            if not turn.done():
                self._count(size, credential)
                turn.set_result(None)


class SnapshotWriter:
    """Writer of the store: its operations run in a thread of its own, one after the other."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, "penstock-store")
        self._queue: deque[tuple[pb.SnapshotHeader, bytes, asyncio.Future[None]]] = deque()
        self._writing: asyncio.Task[None] | None = None
        self._dropping: asyncio.Task[None] | None = None
        self._spared: set[Drop] = set()
        """Orders to remove values that are being written again, so that these values must be kept."""

    def close(self) -> None:
        self._thread.shutdown()

    async def run(self, work: Callable[..., _Result], *args: Any) -> _Result:
        """Run `work` in the writer's thread and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def put_snapshot(self, header: pb.SnapshotHeader, data: bytes) -> None:
        """Write the snapshot and return when it is on disk. Raises JournalError if the write fails."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((header, data, written))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.ensure_future(self._write())
        await written

    async def _write(self) -> None:
        while self._queue:
            batch: list[tuple[pb.SnapshotHeader, bytes, asyncio.Future[None]]] = []
            size = 0
            while self._queue and (not batch or size + len(self._queue[0][1]) <= COMMIT_BYTES):
                batch.append(self._queue.popleft())
                size += len(batch[-1][1])
            failure: Exception | None = None
            try:
                await self.run(self._store.put_snapshots, [(header, data) for header, data, _ in batch])
            except Exception as error:
                failure = error
            for _, _, written in batch:
                if written.done():  # its call was cancelled
                    continue
                if failure is None:
                    written.set_result(None)
                else:
                    written.set_exception(failure)

    @property
    def is_dropping(self) -> bool:
        return self._dropping is not None and not self._dropping.done()

    def drop(self, drops: list[Drop], failed: Callable[[list[Drop], Exception], None]) -> None:
        """Carry out orders to remove values from disk, in the background and a few at a time, so that concurrent writes
        do not wait long. Call this only while `is_dropping` is false. `failed`: called with the orders that were not
        carried out, and the error."""
        self._spared = set()
        self._dropping = asyncio.ensure_future(self._drop(drops, failed))

    def spare(self, drop: Drop) -> None:
        """Cancel an order of an earlier call of `drop`, because its value is about to be written again."""
        self._spared.add(drop)

    async def _drop(self, drops: list[Drop], failed: Callable[[list[Drop], Exception], None]) -> None:
        while drops := [drop for drop in drops if drop not in self._spared]:
            try:
                drops = await self.run(self._store.drop, drops)
            except Exception as error:
                failed([drop for drop in drops if drop not in self._spared], error)
                return
