"""Group commit of the journal: many calls share one commit, which a separate thread makes.

A commit takes as long as the disk needs to flush: a tenth of a millisecond on an idle local disk, several milliseconds
on a cloud or shared disk. When a job of 10,000 slots starts, each of 30,000 calls has something to write. A coordinator
that waited for each commit would receive no heartbeats meanwhile and take every peer for dead. So the state machine
goes on with the next call, and each reply waits until all rows that were put before it are on disk.
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
"""Upper bounds of the buckets of the commit histogram in seconds, from an idle local disk to a failing one."""


class GroupCommit:
    """Writer of the journal, in a thread of its own. Once it exists, nothing else writes the journal.

    Args:
        journal: journal to write. Its `commit` does nothing from now on.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        journal.deferred = True
        self.seconds = Histogram(COMMIT_BOUNDS_S)
        """Histogram of the durations of commits, in seconds."""
        self._thread = ThreadPoolExecutor(1, "penstock-journal")
        self._waiting: list[asyncio.Future[None]] = []
        self._writer: asyncio.Task[None] | None = None

    def close(self) -> None:
        self._thread.shutdown()

    @asynccontextmanager
    async def synced(self) -> AsyncIterator[None]:
        """Return a context in which the state machine handles a call. Leaving the context waits until all changes so
        far are on disk, so that the caller gets the reply or the error only after that. A call that is cancelled does
        not wait: its rows are written with the next call or tick."""
        try:
            yield
        except Exception:
            await self.sync()
            raise
        await self.sync()

    async def sync(self) -> None:
        """Wait until all rows put so far are on disk.

        Raises JournalError if the write failed, or if earlier commits are missing. The next call tries a failed write
        again. If commits are missing (`Journal.lost`), the coordinator answers no call from then on.
        """
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
                if written.done():  # the waiting call was cancelled
                    continue
                if failure is None:
                    written.set_result(None)
                else:
                    written.set_exception(failure)
