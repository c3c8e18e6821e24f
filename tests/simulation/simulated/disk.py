"""A disk that remembers what was synced, and nothing else, with a coordinator's journal and store on it.

A commit is one atomic sync, as SQLite makes it. The moments that matter are around it, and each write asks fate which
one this is: nothing happens; the process dies before the sync, and all of it is lost; it dies after the sync and before
anybody hears of it; the disk is full, and the write is refused. A journal whose process has died writes nothing more.

The contract that these two share with the real ones stands in test_disk.py, and runs on both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

from simulated.virtual import Crash

from penstock.appliance.journal.database import CommitMarks, behind
from penstock.appliance.journal.journal import TABLES, Journal, Rows
from penstock.appliance.journal.snapshot_index import (
    Drop,
    DropAttempt,
    DropBlob,
    DropSnapshot,
    DurableSnapshot,
    SlotKey,
)
from penstock.appliance.journal.snapshot_store import ClosedRun, Store
from penstock.proto.errors import JournalError
from penstock.proto.v1 import coordinator_pb2 as pb

__all__ = ["Disk", "Fate", "SimulatedJournal", "SimulatedStore"]


class Fate(Enum):
    """Outcome of one write."""

    FINE = "fine"
    LOST = "crash before the sync"
    UNHEARD = "crash after the sync"
    FULL = "disk full"


_Row = dict[str, Any]


class Disk:
    """Content that survives a crash."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[tuple[Any, ...], _Row]] = {table: {} for table in TABLES}
        self.notes: dict[str, str] = {}
        self.secret = b"\x5a" * 32
        self.boots = 0
        self.commits = self.recorded = 0
        """The number of the journal's last commit: in it, and beside it."""
        self.snapshots: dict[tuple[SlotKey, int, int], tuple[bytes, bytes]] = {}
        """(slot, total, epoch) -> header and data."""
        self.blobs: dict[str, bytes] = {}
        self.closed: dict[str, tuple[ClosedRun, list[bytes]]] = {}


class _Writer:
    """Writer of one incarnation of the coordinator."""

    def __init__(self, disk: Disk, fate: Callable[[], Fate], die: Callable[[], None]) -> None:
        self.disk = disk
        self._fate = fate
        self._die = die
        self._dead = False

    def write(self, what: str, sync: Callable[[], None]) -> None:
        """Raises JournalError, or Crash when the process does not outlive it."""
        if self._dead:
            raise Crash
        fate = self._fate()
        if fate is Fate.FULL:
            raise JournalError(f"the simulated disk is full: {what} cannot be written")
        if fate is not Fate.LOST:
            sync()
        if fate is not Fate.FINE:
            self.cut_off()
            self._die()
            raise Crash

    def cut_off(self) -> None:
        """Its process is dead."""
        self._dead = True


class SimulatedJournal(Journal):
    """A Journal on a simulated disk. What is put waits and is taken as in the real one.

    `changed` is called at the end of every event, which is where the state machine commits, and `written` after each
    write that leaves nothing more to be written.
    """

    def __init__(
        self,
        disk: Disk,
        fate: Callable[[], Fate] = lambda: Fate.FINE,
        die: Callable[[], None] = lambda: None,
        changed: Callable[[bool], None] = lambda wrote: None,
        written: Callable[[], None] = lambda: None,
    ) -> None:
        self.writer = _Writer(disk, fate, die)
        self.pending = {}
        self.name, self.path, self.deferred = "the simulated journal", None, False
        self._disk = disk
        self._changed = changed
        self._written = written
        self.lost = None
        if disk.commits < disk.recorded:
            raise behind(self.name, disk.commits, disk.recorded, "as the file beside it shows")
        disk.boots += 1
        self.boots = disk.boots
        self.secret, self.found = disk.secret, disk.commits
        self.marks = CommitMarks(disk.secret, disk.boots.to_bytes(8, "big"), self.found)

    @property
    def committed(self) -> int:
        return self._disk.commits

    def _missing(self, number: int, witness: str) -> JournalError:
        self._disk.recorded = number
        return behind(self.name, self.found, number, f"as {witness} was told")

    def rows(self, table: str) -> list[Mapping[str, Any]]:
        rows = self._disk.tables[table]
        return [dict(rows[key]) for key in sorted(rows)]

    def noted(self, name: str, default: str) -> str:
        return self._disk.notes.get(name, default)

    def note(self, name: str, value: str) -> None:
        self._add(("meta", name), "note", (name, value))

    def put(self, table: str, row: Mapping[str, Any]) -> None:
        key, stored = _as_stored(table, row)
        self._add((table, *key), "put", (table, key, stored))

    def put_all(self, table: str, rows: Callable[[], Iterable[Mapping[str, Any]]], **which: str | int) -> None:
        self._add(("all", table, *which.items()), "all", (table, rows))

    def drop(self, table: str, **where: str | int) -> None:
        self._add(("drop", table, *where.items()), "drop", (table, where))

    def commit(self) -> None:
        wrote = bool(self.pending)
        super().commit()
        self._changed(wrote)

    def write(self, rows: Rows) -> None:
        self.writer.write(f"{len(rows)} rows", lambda: self._sync(rows))
        if not self.pending:
            self._written()

    def _sync(self, rows: Rows) -> None:
        self._disk.commits += 1
        self._disk.recorded = self._disk.commits
        for what, values in rows.values():
            if what == "note":
                self._disk.notes.update([values])
            elif what == "put":
                table, key, stored = values
                self._disk.tables[table][key] = {name: at() if callable(at) else at for name, at in stored.items()}
            elif what == "all":
                table, rows_of = values
                for key, stored in [_as_stored(table, row) for row in rows_of()]:
                    self._disk.tables[table][key] = {name: at() if callable(at) else at for name, at in stored.items()}
            else:
                table, where = values
                kept = self._disk.tables[table]
                for key in [key for key, row in kept.items() if all(row[name] == at for name, at in where.items())]:
                    del kept[key]

    def close(self) -> None:
        self.writer.cut_off()


def _as_stored(table: str, row: Mapping[str, Any]) -> tuple[tuple[Any, ...], _Row]:
    """Key and row; SQLite knows no booleans."""
    keys, values = TABLES[table]
    stored = {name: int(row[name]) if isinstance(row[name], bool) else row[name] for name in (*keys, *values)}
    return tuple(row[name] for name in keys), stored


class SimulatedStore(Store):
    """A Store on the same disk."""

    def __init__(
        self, disk: Disk, fate: Callable[[], Fate] = lambda: Fate.FINE, die: Callable[[], None] = lambda: None
    ) -> None:
        self.writer = _Writer(disk, fate, die)
        self._disk = disk

    def index(self) -> tuple[list[tuple[SlotKey, DurableSnapshot]], list[tuple[str, int]]]:
        kept = []
        for (key, total, epoch), (header, data) in self._disk.snapshots.items():
            kept.append(
                (key, DurableSnapshot(total, epoch, len(data), pb.SnapshotHeader.FromString(header).epoch_start))
            )
        return kept, [(name, len(data)) for name, data in self._disk.blobs.items()]

    def put_snapshots(self, snapshots: Sequence[tuple[pb.SnapshotHeader, bytes]]) -> None:
        stored = {}
        for header, data in snapshots:
            place = (SlotKey(header.run, header.attempt, header.box, header.slot), header.total, header.epoch)
            stored[place] = (header.SerializeToString(), bytes(data))
        self.writer.write(f"{len(stored)} snapshots", lambda: self._disk.snapshots.update(stored))

    def snapshot(self, key: SlotKey, kept: DurableSnapshot) -> tuple[pb.SnapshotHeader, bytes] | None:
        found = self._disk.snapshots.get((key, kept.total, kept.epoch))
        return None if found is None else (pb.SnapshotHeader.FromString(found[0]), found[1])

    def put_blob(self, name: str, data: bytes) -> None:
        self.writer.write("a blob", lambda: self._disk.blobs.update({name: bytes(data)}))

    def blob(self, name: str) -> bytes | None:
        return self._disk.blobs.get(name)

    def closed(self) -> list[ClosedRun]:
        return [one for one, _ in self._disk.closed.values()]

    def keep_closed(self, one: ClosedRun, parts: Sequence[bytes], gone: Iterable[str]) -> None:
        def sync() -> None:
            for run in gone:
                self._disk.closed.pop(run, None)
            self._disk.closed[one.run] = (one, list(parts))

        self.writer.write("the state of a closed run", sync)

    def closed_parts(self, run: str) -> list[bytes]:
        return self._disk.closed[run][1] if run in self._disk.closed else []

    def drop(self, drops: Sequence[Drop]) -> list[Drop]:
        """Remove one value at a time."""
        self.writer.write("a removal", lambda: self._remove(drops[0]))
        return list(drops[1:])

    def _remove(self, drop: Drop) -> None:
        match drop:
            case DropSnapshot(key, total, epoch):
                self._disk.snapshots.pop((key, total, epoch), None)
            case DropAttempt(run, attempt):
                for place in [place for place in self._disk.snapshots if place[0][:2] == (run, attempt)]:
                    del self._disk.snapshots[place]
            case DropBlob(name):
                self._disk.blobs.pop(name, None)

    def close(self) -> None:
        self.writer.cut_off()
