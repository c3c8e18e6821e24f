"""Store: snapshots.db, with the data of snapshots and blobs and the last states of ended runs, as the index decides.
Only the service's writer thread uses it, so that a large commit does not delay the event loop and with it leases."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.appliance.journal.database import (
    PAGE,
    CommitNumber,
    disk_of,
    is_full,
    open_database,
    reserve,
    reserved,
    transaction,
)
from penstock.appliance.journal.journal import StateDir, settle
from penstock.appliance.journal.snapshot_index import (
    Drop,
    DropAttempt,
    DropBlob,
    DropSnapshot,
    DurableSnapshot,
    SlotKey,
)
from penstock.proto.errors import JournalError
from penstock.proto.v1 import coordinator_pb2 as pb

_SCRIPT = """
CREATE TABLE snapshots (
    run TEXT, attempt INTEGER, box INTEGER, slot INTEGER, total INTEGER, epoch INTEGER,
    size INTEGER, header BLOB, data BLOB, PRIMARY KEY (run, attempt, box, slot, total, epoch));
CREATE TABLE blobs (name TEXT PRIMARY KEY, size INTEGER, data BLOB);
CREATE TABLE closed (run TEXT PRIMARY KEY, attempt INTEGER, step INTEGER, wall REAL, size INTEGER);
CREATE TABLE closed_parts (run TEXT, number INTEGER, part BLOB, PRIMARY KEY (run, number));
"""
_AT = "run=? AND attempt=? AND box=? AND slot=? AND total=? AND epoch=?"


PIECE = 256
"""Most rows that one call of `drop` removes."""
VACUUM_PAGES = 1024
"""Most pages that one `drop` gives back: new snapshots reuse free pages anyway, and giving back all would
rewrite the file."""


@dataclass(frozen=True)
class ClosedRun:
    """The one kept state of an ended run, without its data: that of the highest step in memory when the run ended."""

    run: str
    attempt: int
    step: int
    wall_s: float
    """End of the run, in seconds since the Unix epoch."""
    size: int
    """Bytes of the serialised messages."""


class Store:
    """Database with snapshots, blobs and last states of ended runs (None: in memory). Raises JournalError."""

    def __init__(self, directory: StateDir | None) -> None:
        self._path = directory.path / "snapshots.db" if directory else None
        self._commits = CommitNumber(self._path)
        self._db = open_database(self._path, _SCRIPT, cached_statements=0)  # else each keeps its last value

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise JournalError(
                f"{self._path or 'the snapshot store in memory'}: {what}: {error}. Free space on the disk, or repair it"
            ) from error

    def index(self) -> tuple[list[tuple[SlotKey, DurableSnapshot]], list[tuple[str, int]]]:
        """Return all snapshots as (slot, snapshot), and all blobs as (name, bytes), without their data."""
        with self._errors("cannot be read"):
            columns = "run, attempt, box, slot, total, epoch, size, header"
            rows = self._db.execute(f"SELECT {columns} FROM snapshots").fetchall()
            blobs = self._db.execute("SELECT name, size FROM blobs").fetchall()
        kept = []
        for *key, total, epoch, size, header in rows:
            epoch_start = pb.SnapshotHeader.FromString(header).epoch_start
            kept.append((SlotKey(*key), DurableSnapshot(total, epoch, size, epoch_start)))
        return kept, blobs

    def reserve(self) -> None:
        """Reserve space for a time in which the disk is full, once `index` has been read."""
        with self._errors("space cannot be reserved"):
            reserve(self._db, self._path)

    def _check_space(self, what: str, size: int) -> None:
        """Raise JournalError unless the disk can take `size` bytes, first in SQLite's log and then in the database,
        and keeps what is reserved. Beyond that nothing could be removed either."""
        if self._path is None:
            return
        (unused,) = self._db.execute("PRAGMA freelist_count").fetchone()
        log = self._path.with_name(f"{self._path.name}-wal")
        in_log = log.stat().st_size if log.exists() else 0
        disk, free = disk_of(self._path)
        need = max(0, size - unused * PAGE) + max(0, size - in_log) + reserved(disk)
        if free < need:
            raise JournalError(
                f"{self._path}: {what} cannot be written: {need} bytes must be free on the disk, got {free}. Free space"
            )

    def put_snapshots(self, snapshots: Sequence[tuple[pb.SnapshotHeader, bytes]]) -> None:
        """Write these snapshots in one commit, all or none."""
        size = sum(len(data) for _, data in snapshots)
        what = f"{len(snapshots)} snapshots of {size} bytes"
        self._check_space(what, size)
        with self._errors(f"{what} cannot be written"), transaction(self._db, self._commits):
            for header, data in snapshots:
                place = (header.run, header.attempt, header.box, header.slot, header.total, header.epoch)
                row = (*place, len(data), header.SerializeToString(), data)
                self._db.execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)

    def snapshot(self, key: SlotKey, kept: DurableSnapshot) -> tuple[pb.SnapshotHeader, bytes] | None:
        """Return the snapshot's header and data; None if it was removed."""
        with self._errors("a snapshot cannot be read"):
            found = self._db.execute(
                f"SELECT header, data FROM snapshots WHERE {_AT}", (*key, kept.total, kept.epoch)
            ).fetchone()
        return None if found is None else (pb.SnapshotHeader.FromString(found[0]), bytes(found[1]))

    def put_blob(self, name: str, data: bytes) -> None:
        what = f"a value of {len(data)} bytes"
        self._check_space(what, len(data))
        with self._errors(f"{what} cannot be written"), transaction(self._db, self._commits):
            self._db.execute("INSERT OR REPLACE INTO blobs VALUES (?, ?, ?)", (name, len(data), data))

    def blob(self, name: str) -> bytes | None:
        with self._errors("a blob cannot be read"):
            found = self._db.execute("SELECT data FROM blobs WHERE name=?", (name,)).fetchone()
        return None if found is None else bytes(found[0])

    # ---- states of runs that have ended: see closed_runs.py

    def closed(self) -> list[ClosedRun]:
        with self._errors("cannot be read"):
            return [ClosedRun(*row) for row in self._db.execute("SELECT run, attempt, step, wall, size FROM closed")]

    def keep_closed(self, one: ClosedRun, parts: Sequence[bytes], gone: Iterable[str]) -> None:
        """Write the last state of a run in place of an older one, and remove those of the runs `gone`."""
        what = f"a state of {one.size} bytes"
        self._check_space(what, one.size)
        with self._errors(f"{what} cannot be written"), transaction(self._db, self._commits):
            for run in (*gone, one.run):
                for table in ("closed", "closed_parts"):
                    self._db.execute(f"DELETE FROM {table} WHERE run=?", (run,))
            row = (one.run, one.attempt, one.step, one.wall_s, one.size)
            self._db.execute("INSERT INTO closed VALUES (?, ?, ?, ?, ?)", row)
            rows = [(one.run, number, part) for number, part in enumerate(parts)]
            self._db.executemany("INSERT INTO closed_parts VALUES (?, ?, ?)", rows)

    def closed_parts(self, run: str) -> list[bytes]:
        with self._errors("a state cannot be read"):
            rows = self._db.execute("SELECT part FROM closed_parts WHERE run=? ORDER BY number", (run,))
            return [bytes(part) for (part,) in rows]

    def drop(self, drops: Sequence[Drop]) -> list[Drop]:
        """Carry out the first of these orders, about PIECE rows; return those that are left."""
        left = list(drops)
        with self._errors("old values cannot be removed"):
            with transaction(self._db, self._commits):
                rows = 0
                while left and rows < PIECE:
                    match left[0]:
                        case DropSnapshot(key, total, epoch):
                            self._db.execute(f"DELETE FROM snapshots WHERE {_AT}", (*key, total, epoch))
                            rows += 1
                        case DropAttempt(run, attempt):
                            few = "SELECT rowid FROM snapshots WHERE run=? AND attempt=? LIMIT ?"
                            done = self._db.execute(
                                f"DELETE FROM snapshots WHERE rowid IN ({few})", (run, attempt, PIECE - rows)
                            )
                            rows += max(1, done.rowcount)
                            if rows >= PIECE:
                                break  # the attempt may have more rows
                        case DropBlob(name):
                            self._db.execute("DELETE FROM blobs WHERE name=?", (name,))
                            rows += 1
                    del left[0]
            try:
                pages = 0 if self._path is None else VACUUM_PAGES  # 0: all
                self._db.execute(f"PRAGMA incremental_vacuum({pages})").fetchall()
            except sqlite3.Error as error:
                if not is_full(error):  # else the rows are gone, and a later drop gives back their pages
                    raise
        return left

    def close(self) -> None:
        self._db.close()
        self._commits.close()


# ---- writing

COMMIT_BYTES = 8 << 20
"""Largest commit of several snapshots in bytes: at 80 MB/s, reads wait a tenth of a second."""

_Result = TypeVar("_Result")


SMALL_SHARE = 8
"""Divisor of the memory budget: up to an eighth of it, a value is small."""


class InflowBudget:
    """Memory budget of values in transfer, half for small ones, which so never wait for a slow large one."""

    def __init__(self, limit: int) -> None:
        self._small_size = limit // SMALL_SHARE
        self._small, self._large = MemoryBudget(limit // 2), MemoryBudget(limit // 2)

    def taken(self, size: int, credential: str = "") -> AbstractAsyncContextManager[None]:
        """Return a context that holds `size` bytes, once they are free, for a caller with this credential token."""
        return (self._small if size <= self._small_size else self._large).taken(size, credential)


class MemoryBudget:
    """Budget of bytes in memory. The next value is of the credential token that holds the fewest bytes, so no token
    waits for another's whole queue."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._by_token: Counter[str] = Counter()
        self._waiting: deque[tuple[int, str, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def taken(self, size: int, credential: str = "") -> AsyncIterator[None]:
        """Hold `size` bytes while the context is open. Entering waits, without a deadline, because each call has its
        own; a value above the budget enters when nothing else is in memory."""
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
    """Writer of the store: its operations run in one thread, one after the other."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, "penstock-store")
        self._queue: deque[tuple[pb.SnapshotHeader, bytes, asyncio.Future[None]]] = deque()
        self._writing: asyncio.Task[None] | None = None
        self._dropping: asyncio.Task[None] | None = None
        self._spared: set[Drop] = set()
        """Orders to remove values that are being written again."""

    def close(self) -> None:
        self._thread.shutdown()

    async def run(self, work: Callable[..., _Result], *args: Any) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def put_snapshot(self, header: pb.SnapshotHeader, data: bytes) -> None:
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
            settle((written for _, _, written in batch), failure)

    @property
    def is_dropping(self) -> bool:
        return self._dropping is not None and not self._dropping.done()

    def drop(self, drops: list[Drop], failed: Callable[[list[Drop], Exception], None]) -> None:
        """Carry out orders in the background, a few at a time, so that writes do not wait long; only while not
        `is_dropping`. `failed`: called with orders not carried out, and the error."""
        self._spared = set()
        self._dropping = asyncio.ensure_future(self._drop(drops, failed))

    def spare(self, drop: Drop) -> None:
        """Cancel an order of an earlier `drop`, because its value is about to be written again."""
        self._spared.add(drop)

    async def _drop(self, drops: list[Drop], failed: Callable[[list[Drop], Exception], None]) -> None:
        while drops := [drop for drop in drops if drop not in self._spared]:
            try:
                drops = await self.run(self._store.drop, drops)
            except Exception as error:
                failed([drop for drop in drops if drop not in self._spared], error)
                return
