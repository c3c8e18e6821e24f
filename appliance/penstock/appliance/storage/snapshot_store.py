"""Store: the database snapshots.db, with the data of snapshots and blobs and the last states of ended runs. The
snapshot index decides which values the store holds; the store writes, reads and removes them.

Only the service's writer thread uses the store, so that the commit of a large value does not delay the event loop and
with it the leases.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from penstock.appliance.model.entities import SlotKey
from penstock.appliance.states.closed_runs import ClosedRun
from penstock.appliance.storage.database import CommitNumber, open_database, transaction
from penstock.appliance.storage.journal import StateDir
from penstock.appliance.storage.snapshot_index import Drop, DropAttempt, DropBlob, DropSnapshot, DurableSnapshot
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
"""Largest number of rows that one call of `drop` removes."""
VACUUM_PAGES = 1024
"""Largest number of pages of 4 KiB that one call of `drop` gives back to the filesystem. New snapshots reuse free pages
anyway, and giving back all pages at once would rewrite the whole file while snapshots arrive."""


class Store:
    """Database with the data of snapshots and blobs, and the last states of ended runs. `directory`: None = in memory.
    Every method raises JournalError if the disk fails."""

    def __init__(self, directory: StateDir | None) -> None:
        self._path = directory.path / "snapshots.db" if directory else None
        self._commits = CommitNumber(self._path)
        self._db = open_database(self._path, _SCRIPT)

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise JournalError(
                f"{self._path or 'the snapshot store in memory'}: {what}: {error}. Free space on the disk, or repair it"
            ) from error

    def index(self) -> tuple[list[tuple[SlotKey, DurableSnapshot]], list[tuple[str, int]]]:
        """Return all snapshots as (slot, snapshot), and all blobs as (name, size in bytes), without their data."""
        with self._errors("cannot be read"):
            columns = "run, attempt, box, slot, total, epoch, size, header"
            rows = self._db.execute(f"SELECT {columns} FROM snapshots").fetchall()
            blobs = self._db.execute("SELECT name, size FROM blobs").fetchall()
        kept = []
        for *key, total, epoch, size, header in rows:
            kept.append(
                (SlotKey(*key), DurableSnapshot(total, epoch, size, pb.SnapshotHeader.FromString(header).epoch_start))
            )
        return kept, blobs

    def put_snapshot(self, header: pb.SnapshotHeader, data: bytes) -> None:
        self.put_snapshots([(header, data)])

    def put_snapshots(self, snapshots: Sequence[tuple[pb.SnapshotHeader, bytes]]) -> None:
        """Write all these snapshots, as (header, data), in one commit. If the commit fails, none is written."""
        size = sum(len(data) for _, data in snapshots)
        with self._errors(f"{len(snapshots)} snapshots of {size} bytes cannot be written"), self._transaction():
            for header, data in snapshots:
                place = (header.run, header.attempt, header.box, header.slot, header.total, header.epoch)
                row = (*place, len(data), header.SerializeToString(), data)
                self._db.execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with transaction(self._db, self._commits):
            yield

    def snapshot(self, key: SlotKey, kept: DurableSnapshot) -> tuple[pb.SnapshotHeader, bytes] | None:
        """Return the snapshot's header and data; None if the snapshot was removed from disk."""
        with self._errors("a snapshot cannot be read"):
            found = self._db.execute(
                f"SELECT header, data FROM snapshots WHERE {_AT}", (*key, kept.total, kept.epoch)
            ).fetchone()
        return None if found is None else (pb.SnapshotHeader.FromString(found[0]), bytes(found[1]))

    def put_blob(self, name: str, data: bytes) -> None:
        with self._errors(f"a blob of {len(data)} bytes cannot be written"), self._transaction():
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
        """Write the last state of a run in place of an older one. Remove the states of the runs `gone`. `parts`: the
        state as serialised messages."""
        with self._errors(f"a state of {one.size} bytes cannot be written"), self._transaction():
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
        """Carry out the first of these orders to remove values from disk, about PIECE rows. Return the orders that are
        left."""
        left = list(drops)
        with self._errors("old values cannot be removed"):
            with self._transaction():
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
            self._db.execute(f"PRAGMA incremental_vacuum({VACUUM_PAGES})").fetchall()
        return left

    def close(self) -> None:
        self._db.close()
        self._commits.close()
