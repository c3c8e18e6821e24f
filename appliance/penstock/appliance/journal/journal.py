"""Journal of the coordinator: the cluster state on disk, in SQLite with WAL and synchronous=FULL, committed before any
reply.

journal.db holds the ownership (runs, attempts, boxes, slots): a few rows per change, some 110 us per commit. If a
commit fails (disk full), the changes stay in memory: no call is acknowledged, and the next one tries again. Snapshots,
large and less valuable, have a database of their own (snapshot_store.py).

A file that cannot be read is never reset: the error names it, and a person decides. Network filesystems are refused,
because WAL needs locks and shared memory that work. An advisory lock, which the kernel releases when the process ends,
ensures one coordinator per state directory.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import sqlite3
import stat
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from penstock.appliance.journal.database import (
    CommitMarks,
    CommitNumber,
    behind,
    damaged,
    open_database,
    reserve,
    transaction,
)
from penstock.proto.errors import JournalError
from penstock.runtime.files import filesystems
from penstock.runtime.telemetry.counters import Histogram

Rows = dict[tuple[Any, ...], tuple[str, Any]]
"""Key -> (SQL statement, values), the last write of a key; for `put_all`, values is a function that makes many rows."""

SLOT_FIELDS = ("generation", "phase", "worker", "session", "ever_ready", "recovery", "restarts", "note")
"""Fields of entities.Slot that its row holds as they are."""
TABLES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # table: key columns, other columns. A seed is text: SQLite's integers are signed, seeds are unsigned 64-bit.
    "runs": (("run",), ("seed", "num_boxes", "num_workers", "attempt", "generation")),
    "attempts": (("run", "attempt"), ("key", "opened_by", "state", "why")),
    "boxes": (("run", "attempt", "box"), ("client_id", "place", "opening")),
    "slots": (("run", "attempt", "box", "slot"), (*SLOT_FIELDS, "capabilities", "error")),
    "skips": (("run", "attempt", "box", "slot", "epoch", "total"), ("count", "own")),
    # The highest generation reserved for a migration target of a slot: see migration.py.
    "reserved": (("run", "attempt", "box", "slot"), ("generation",)),
    "abandoned": (("run", "attempt", "box", "epoch"), ("step",)),
    # For `penstock replay` alone: see box_history.py. They stay when an attempt is over, as its rows in "boxes" do.
    "tracks": (("run", "attempt", "box"), ("over", "history")),
    # How the newest attempt that has ended did so: see run_end.py.
    "ends": (("run",), ("end",)),
    # Runs that have delivered nothing yet: see box_progress.py. An older release's run has no row, and counts as used.
    "unused": (("run",), ()),
    # Credentials of the boxes of open attempts, for budgets (slot_budgets.py). An older release's box has no row.
    "holders": (("run", "attempt", "box"), ("credential", "working")),
    # Changes of the weights of a run's mixture, numbered from 0: see mixture_orders.py.
    "mixture_changes": (("run", "number"), ("change",)),
}
_COLUMNS = {table: (*keys, *values) for table, (keys, values) in TABLES.items()}
_INSERT = {
    table: f"INSERT OR REPLACE INTO {table} ({', '.join(columns)}, sum) VALUES ({', '.join('?' * (len(columns) + 1))})"
    for table, columns in _COLUMNS.items()
}


def make_private(path: Path) -> None:
    """Create a state directory if it is missing. Raises OSError; JournalError if others own or can read it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != os.geteuid():
        raise JournalError(
            f"the owner of the state directory {path} must be user {os.geteuid()}, got {found.st_uid}: choose another"
        )
    if mode & 0o077:
        raise JournalError(f"the state directory {path} must have mode 0700, got {mode:04o}: run chmod 700 {path}")


class StateDir:
    """State directory, locked until `close`, readable by its user alone: the journal has the secret of tickets. Raises
    JournalError."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            make_private(self.path)
            kind = filesystems.filesystem(self.path, Path("/proc/self/mountinfo").read_text())
            if kind in filesystems.NETWORK:
                raise JournalError(f"the state directory {self.path} must be on a local disk, got filesystem {kind}")
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise JournalError(f"the state directory {self.path} cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._lock, 64, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._lock)
            raise JournalError(
                f"the state directory {self.path} is in use by another coordinator (process {holder}): stop it"
            ) from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        os.close(self._lock)


def _table(name: str) -> str:
    keys, values = TABLES[name]
    columns = ", ".join((*keys, *values, "sum"))
    return f"CREATE TABLE IF NOT EXISTS {name} ({columns}, PRIMARY KEY ({', '.join(keys)})) WITHOUT ROWID"


class Journal:
    """Journal: collects rows, writes them at a commit, and returns whole tables at the start."""

    def __init__(self, directory: StateDir | None) -> None:
        self.path = directory.path / "journal.db" if directory else None
        self.name = str(self.path or "the journal in memory")
        path = self.path
        if path is not None and path.with_name("snapshots.db").exists() and not (path.exists() and path.stat().st_size):
            # The journal is made before snapshots.db. SQLite would take an empty file for a new database.
            raise JournalError(
                f"{self.path} is missing or empty, but snapshots.db is beside it: restore a copy of the file, or move "
                "the directory away to start anew"
            )
        self._commits = CommitNumber(self.path)
        self.found = self._commits.number
        """Last commit on disk at the start."""
        self._db = open_database(self.path, "\n".join(f"{_table(table)};" for table in TABLES))
        self._db.row_factory = sqlite3.Row
        self.pending: Rows = {}
        self.deferred = False
        """True if `commit` does nothing, because GroupCommit writes the rows."""
        self.lost: JournalError | None = None
        """Set when a peer's mark shows that commits are missing: no call is answered, and the process ends."""
        try:
            (verdict,) = self._db.execute("PRAGMA integrity_check(1)").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(" ".join(str(verdict).split()))
            self.secret = bytes.fromhex(self._meta("secret", secrets.token_hex(32)))
            """Secret from which tickets are derived, stored so that they stay valid after a restart."""
            self.marks = CommitMarks(self.secret, secrets.token_bytes(8), self.found)
            self.boots = int(self._meta("boots", "0")) + 1
            """Coordinator processes that have opened this journal. Versions of this one start above the last one's, so
            that no peer takes a new view for one that it has seen."""
            with transaction(self._db, self._commits):
                for table in TABLES:  # an older release that wrote this journal may not have made all tables
                    self._db.execute(_table(table))
                self._db.execute("UPDATE meta SET value=? WHERE name='boots'", (str(self.boots),))
            reserve(self._db, path)
        except sqlite3.Error as error:
            self.close()
            raise damaged(self.name, error) from error

    def _meta(self, name: str, default: str) -> str:
        self._db.execute("INSERT OR IGNORE INTO meta VALUES (?, ?)", (name, default))
        (value,) = self._db.execute("SELECT value FROM meta WHERE name=?", (name,)).fetchone()
        return str(value)

    def note(self, name: str, value: str) -> None:
        """Store a small value with the next commit."""
        self._add(("meta", name), "INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    def noted(self, name: str, default: str) -> str:
        """Return the value under this name; if there is none, store `default` and return it."""
        try:
            return self._meta(name, default)
        except sqlite3.Error as error:
            raise damaged(self.name, error) from error

    def rows(self, table: str) -> list[Mapping[str, Any]]:
        """Return all rows of a table, sorted by key."""
        keys, _ = TABLES[table]
        try:
            rows = self._db.execute(f"SELECT * FROM {table} ORDER BY {', '.join(keys)}")
            return [checked(table, row, self.name) for row in rows]
        except sqlite3.Error as error:
            raise damaged(self.name, error) from error

    def put(self, table: str, row: Mapping[str, Any]) -> None:
        """Write a whole row with the next commit; a callable value is called when the row is written."""
        key = (table, *(row[key] for key in TABLES[table][0]))
        self._add(key, _INSERT[table], (*(row[column] for column in _COLUMNS[table]), _SUM))

    def put_all(self, table: str, rows: Callable[[], Iterable[Mapping[str, Any]]], **which: str | int) -> None:
        """Write many rows with the next commit. `rows` may be called in another thread and more than once, so what it
        reads must not change. Of two calls with the same table and `which`, only the later counts."""

        def values() -> Iterator[tuple[Any, ...]]:
            return ((*(row[column] for column in _COLUMNS[table]), _SUM) for row in rows())

        self._add(("all", table, *which.items()), _INSERT[table], values)

    def drop(self, table: str, **where: str | int) -> None:
        """Remove the rows with these column values, with the next commit."""
        condition = " AND ".join(f"{column}=?" for column in where)
        self._add(("drop", table, *where.items()), f"DELETE FROM {table} WHERE {condition}", tuple(where.values()))

    def _add(self, key: tuple[Any, ...], sql: str, values: Any) -> None:
        self.pending.pop(key, None)  # a row put twice is written once, at its latest position in the order
        self.pending[key] = (sql, values)

    def commit(self) -> None:
        """Write all pending changes. Raises JournalError; then the next call tries again."""
        if not self.pending or self.deferred:
            return
        rows = self.take()
        try:
            self.write(rows)
        except JournalError:
            self.put_back(rows)
            raise

    def take(self) -> Rows:
        rows, self.pending = self.pending, {}
        return rows

    def put_back(self, rows: Rows) -> None:
        """Put back rows that could not be written, except where a newer one was put."""
        newer, self.pending = self.pending, rows
        for key, (sql, values) in newer.items():
            self._add(key, sql, values)

    def write(self, rows: Rows) -> None:
        """Write the rows in one commit, in any thread, but only one at a time. Raises JournalError."""
        if self.lost is not None:
            raise JournalError(self.lost.message)
        try:
            with transaction(self._db, self._commits):
                for sql, values in rows.values():
                    if callable(values):
                        self._db.executemany(sql, map(_made, values()))
                    else:
                        self._db.execute(sql, _made(values))
        except sqlite3.Error as error:
            raise JournalError(
                f"{self.name} cannot be written ({error}); {len(rows)} changes wait. Free space on the disk, or make "
                "the file writable; the next call tries again"
            ) from error

    # ---- commit marks that peers keep

    def mark(self) -> bytes:
        return self.marks.make(self.committed)

    @property
    def committed(self) -> int:
        return self._commits.number

    def confirm(self, mark: bytes, witness: str) -> None:
        """Raise JournalError, now and in each later call, if a peer's mark shows that commits are missing."""
        number = self.marks.missing(mark)
        if number is not None and self.lost is None:
            self.lost = self._missing(number, witness)
        if self.lost is not None:
            raise JournalError(self.lost.message)

    def _missing(self, number: int, witness: str) -> JournalError:
        self._commits.expect(max(number, self.committed + 1))  # this process's commits reuse the lost numbers
        return behind(self.name, self.found, number, f"as a mark of {witness} shows")

    def close(self) -> None:
        self._db.close()
        self._commits.close()


_SUM = object()
"""Placeholder in a row for the checksum of its other values."""


def _made(values: tuple[Any, ...]) -> list[Any]:
    """Return the values to write, with callables called and the checksum in its place."""
    made = [value() if callable(value) else value for value in values]
    return [*made[:-1], _sum(made[:-1])] if made and made[-1] is _SUM else made


def _sum(values: list[Any]) -> int:
    return zlib.crc32(repr([int(value) if isinstance(value, bool) else value for value in values]).encode())


def checked(table: str, row: sqlite3.Row, name: str) -> dict[str, Any]:
    """Return the row without its checksum. Raises JournalError if it does not match: SQLite has none in its pages.
    Rows of older releases have none."""
    keys, values = TABLES[table]
    found = {name: row[name] for name in (*keys, *values)}
    if "sum" in row.keys() and row["sum"] not in (None, _sum(list(found.values()))):  # noqa: SIM118 (no mapping)
        at = ", ".join(f"{key} {found[key]}" for key in keys)
        raise damaged(name, f"table {table}, row with {at}: its checksum does not match")
    return found


COMMIT_BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
"""Buckets of the commit histogram in seconds, from an idle local disk to a failing one."""


class GroupCommit:
    """Writer of the journal in its own thread, in place of `Journal.commit`: many calls share one commit.

    A flush takes a tenth of a millisecond on an idle local disk, several on a cloud disk. When a job of 10,000 slots
    starts, 30,000 calls have something to write; waiting for each would leave no time for heartbeats. So the state
    machine goes on, and each reply waits until all rows put before it are on disk.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        journal.deferred = True
        self.seconds = Histogram(COMMIT_BOUNDS_S)
        """Durations of commits, in seconds."""
        self._thread = ThreadPoolExecutor(1, "penstock-journal")
        self._waiting: list[asyncio.Future[None]] = []
        self._writer: asyncio.Task[None] | None = None

    def close(self) -> None:
        self._thread.shutdown()

    @asynccontextmanager
    async def synced(self) -> AsyncIterator[None]:
        """Return a context for a call, left once all changes so far are on disk, so that a reply or error comes only
        after that. A cancelled call does not wait: its rows come with the next one."""
        try:
            yield
        except Exception:
            await self.sync()
            raise
        await self.sync()

    async def sync(self) -> None:
        """Wait until all rows put so far are on disk. Raises JournalError for a failed write, which the next call
        tries again, or for missing commits (`Journal.lost`): then no call is answered any more."""
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
            settle(waiting, failure)


def settle(waiting: Iterable[asyncio.Future[None]], failure: Exception | None) -> None:
    """Let waiting calls continue, or raise `failure`."""
    for written in waiting:
        if written.done():  # the waiting call was cancelled
            continue
        if failure is None:
            written.set_result(None)
        else:
            written.set_exception(failure)
