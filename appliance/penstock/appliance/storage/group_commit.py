"""Commits of the journal, many calls to one, in a thread of their own.

A commit takes as long as the disk needs to flush: a tenth of a millisecond on an idle local one, several on a disk of
a cloud or one that others use. When a job of 10,000 slots starts there is something to write with each of 30,000
calls, and a coordinator that waited for each would hear no heartbeats meanwhile and take everybody for dead. So the
registry goes on with the next call, and every reply waits until all that was put before it is on disk.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from penstock.appliance.storage.journal import Journal
from penstock.proto.errors import JournalError
from penstock.runtime.telemetry.counters import Histogram

COMMIT_BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
"""From an idle local disk to one that is in trouble."""


class GroupCommit:
    """From now on the journal is written by this object alone.

    Args:
        journal: `commit` of it does nothing any more.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        journal.deferred = True
        self.seconds = Histogram(COMMIT_BOUNDS_S)
        """How long commits took."""
        self._thread = ThreadPoolExecutor(1, "penstock-journal")
        self._waiting: list[asyncio.Future[None]] = []
        self._writer: asyncio.Task[None] | None = None

    def close(self) -> None:
        self._thread.shutdown()

    @asynccontextmanager
    async def synced(self) -> AsyncIterator[None]:
        """Around what makes an answer, an error too: it leaves when all that it may speak of is on disk. For a call
        that was cancelled nobody waits; what it has put is written with the next one, or the next tick."""
        try:
            yield
        except Exception:
            await self.sync()
            raise
        await self.sync()

    async def sync(self) -> None:
        """Returns when all that was put so far is on disk. JournalError: it is not, and the next call tries again;
        or commits are missing (`Journal.lost`), and nothing is answered any more."""
        if self._journal.lost is not None:
            raise JournalError(self._journal.lost.message)
        busy = self._writer is not None and not self._writer.done()
        if not busy and not self._journal.pending:
            return
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(written)
        if not busy:
            self._writer = asyncio.ensure_future(self._write())
        await written

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            waiting, self._waiting = self._waiting, []
            rows, failure = self._journal.take(), None
            if rows:
                began = time.perf_counter()
                try:
                    await loop.run_in_executor(self._thread, self._journal.write, rows)
                except Exception as error:
                    self._journal.put_back(rows)
                    failure = error
                else:
                    self.seconds.add(time.perf_counter() - began)
            for written in waiting:
                if written.done():  # whoever waited has gone
                    continue
                if failure is None:
                    written.set_result(None)
                else:
                    written.set_exception(failure)
