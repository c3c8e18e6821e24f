"""Databases of the coordinator (SQLite): how they are opened, and how lost commits are detected.

SQLite takes the first frame of its log with a wrong checksum for the log's end, so a flipped bit silently loses the
last commits. Therefore each commit has a number, in the database and in a file beside it (`journal.commits`), and a
database that ends before it is refused, before SQLite empties its log. Peers also get the journal's number, signed
(`CommitMarks`), by which a coordinator detects an old copy of the directory. The file is written after each commit but
synced only when the database is opened: after a loss of power it may be seconds old, so the check is weaker but never
wrong.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from penstock.proto.errors import JournalError

SCHEMA = 2
PAGE = 4096
"""Bytes of a page of SQLite."""

META = "CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT) STRICT;"
"""Table of the last commit's number and of other small values."""

log = logging.getLogger("penstock.appliance")


def damaged(name: str, why: object) -> JournalError:
    return JournalError(f"{name} is damaged ({why}): restore a copy of the file, or move the file away to start anew")


def open_database(path: Path | None, script: str, cached_statements: int = 128) -> sqlite3.Connection:
    """Open or create a database (None: in memory); `script` makes its tables. `cached_statements`: number of statements
    that are kept, each with the values of its last use. Raises JournalError."""
    name = path or ":memory:"
    try:
        # check_same_thread: snapshot_store.py is used from one thread at a time, which is not the one that opened it.
        db = sqlite3.connect(
            name, isolation_level=None, check_same_thread=False, timeout=5.0, cached_statements=cached_statements
        )
        try:
            (found,) = db.execute("PRAGMA user_version").fetchone()
            if found == 0:  # only for a new database, because it writes, and an existing one may be damaged
                db.execute("PRAGMA auto_vacuum=INCREMENTAL")
            if path is not None:
                (mode,) = db.execute("PRAGMA journal_mode=WAL").fetchone()
                if mode != "wal":
                    raise JournalError(f"{path} must be on a local disk: SQLite's journal mode is {mode!r}")
            db.execute("PRAGMA synchronous=FULL")
            db.execute("PRAGMA secure_delete=OFF")  # some builds write zeros, which needs as much space as was used
            db.execute("PRAGMA journal_size_limit=67108864")
            if found == 0:
                db.executescript(f"BEGIN IMMEDIATE;\n{META}\n{script}\nPRAGMA user_version={SCHEMA};\nCOMMIT;")
            elif found != SCHEMA:
                raise JournalError(
                    f"the format of database {name} must be {SCHEMA}, got {found}, from another version of Penstock: "
                    "run that version"
                )
            return db
        except BaseException:
            db.close()
            raise
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorname", "").startswith(("SQLITE_FULL", "SQLITE_IOERR")):
            raise JournalError(f"{name} cannot be written ({error}): free space on the disk, or repair it") from error
        raise _unreadable(name, error) from error


def reserved(disk: int) -> int:
    """Return the bytes that a database and its log, on a disk of this size, keep for a time in which that is full."""
    return min(4 << 20, disk // 32)


def disk_of(path: Path) -> tuple[int, int]:
    """Return the size of the disk that holds a file, and its free bytes."""
    disk = os.statvfs(path.parent)
    return disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize


def reserve(db: sqlite3.Connection, path: Path | None) -> None:
    """Let the database and its log hold some megabytes more than they use, so that rows can be written, and above all
    removed, while the disk is full. SQLite writes its log from the beginning again once all of it is in the database,
    which is done when half of what is kept is used. It removes the log when it closes the database: so this is done at
    each start, once the database is known to be sound. Raises sqlite3.Error."""
    if path is None:
        return
    disk, free = disk_of(path)
    size = reserved(disk)
    try:
        if free > 4 * size:
            db.executescript(
                f"""
                DROP TABLE IF EXISTS ballast; CREATE TABLE ballast (data BLOB);
                INSERT INTO ballast VALUES (zeroblob({size})); PRAGMA wal_checkpoint(PASSIVE); DROP TABLE ballast;
                PRAGMA wal_autocheckpoint({max(1, size // PAGE // 2)});
                """
            )
            return
    except sqlite3.Error as error:
        if not is_full(error):
            raise
    log.warning("%s: the disk has only %d bytes free, of which nothing can be reserved. Free space", path, free)


def is_full(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorname", "") == "SQLITE_FULL"


def _unreadable(name: object, error: Exception) -> JournalError:
    code = getattr(error, "sqlite_errorname", "")
    if code.startswith(("SQLITE_BUSY", "SQLITE_CANTOPEN")) or code in ("SQLITE_READONLY", "SQLITE_READONLY_DIRECTORY"):
        return JournalError(
            f"{name} cannot be opened ({error}): give the coordinator's user access to the file and its folder, and "
            "end other programs that use it"
        )
    return damaged(str(name), error)


@contextmanager
def read_only(path: Path, *, in_use: bool = False) -> Iterator[sqlite3.Connection]:
    """Open an existing database without changing it or its log; without a log, and not in use, no file is made beside
    it. Raises sqlite3.Error."""
    wal = path.with_name(f"{path.name}-wal")
    immutable = "" if in_use or (wal.exists() and wal.stat().st_size) else "&immutable=1"
    address = f"{path.absolute().as_uri()}?mode=ro{immutable}"
    with closing(sqlite3.connect(address, uri=True, timeout=5.0)) as db:
        db.row_factory = sqlite3.Row
        yield db


@contextmanager
def transaction(db: sqlite3.Connection, commits: CommitNumber) -> Iterator[None]:
    """Return a context whose changes become one commit, or none if it fails. Raises sqlite3.Error, JournalError."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        value = (str(commits.number + 1),)
        db.execute("INSERT INTO meta VALUES ('commits', ?) ON CONFLICT DO UPDATE SET value=excluded.value", value)
        db.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise
    commits.made()


def _number_in(db: sqlite3.Connection) -> int:
    """Return the number of the last commit; 0 from an older release, which did not number commits."""
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name='meta'").fetchone():
        return 0
    found = db.execute("SELECT value FROM meta WHERE name='commits'").fetchone()
    return int(found[0]) if found else 0


class CommitNumber:
    """Number of a database's last commit, and the file beside it that records it. Raises JournalError, and changes
    nothing, if the database ends before the recorded number."""

    def __init__(self, path: Path | None) -> None:
        self.number = 0
        """Number of the last commit that is on disk."""
        self._fd = -1
        if path is not None:
            self._file = beside(path)
            self.number = check_commits(path)
            try:
                self._open()
            except OSError as error:
                raise JournalError(f"{self._file} cannot be used: {error}. Free space or correct its rights") from error

    def _open(self) -> None:
        self._fd = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._record(self.number)
        os.fsync(self._fd)
        folder = os.open(self._file.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _record(self, number: int) -> None:
        os.pwrite(self._fd, _line(number), 0)

    def made(self) -> None:
        """Record that one more commit is on disk. Raises JournalError."""
        if self._fd >= 0:
            try:
                self._record(self.number + 1)
            except OSError as error:
                raise JournalError(f"{self._file} cannot be written: {error}. Free space on the disk") from error
        self.number += 1

    def expect(self, number: int) -> None:
        """Record a `number` that the database lacks, so that later starts refuse it."""
        if self._fd >= 0:
            self._record(number)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def beside(path: Path) -> Path:
    """Return the path of the file with the number of the database's last commit."""
    return path.with_suffix(".commits")


def check_commits(path: Path) -> int:
    """Return the number of the last commit, without changing a file. Raises JournalError if more are recorded or a
    file is unreadable."""
    file = beside(path)
    try:
        expected = recorded(file)
        found = 0
        if path.exists() and path.stat().st_size:
            with read_only(path) as db:
                (schema,) = db.execute("PRAGMA user_version").fetchone()
                found = _number_in(db) if schema <= SCHEMA else expected or 0
    except OSError as error:
        raise JournalError(f"{file} cannot be read: {error}. Correct its rights") from error
    except (sqlite3.Error, ValueError) as error:
        raise _unreadable(path, error) from error
    if expected is not None and found < expected:
        raise behind(path, found, expected, f"as {file} shows")
    if expected is None and found > 1:
        log.warning("%s is missing, so this start cannot detect whether %s has lost commits", file, path)
    return found


def behind(path: Path | str, found: int, expected: int, witness: str) -> JournalError:
    """Return the error for a database that lacks commit `expected`. `witness`: names the proof that it was made."""
    return JournalError(
        f"{path} ends at commit {found}, but commit {expected} was made, {witness}: the database or its log {path}-wal "
        "is damaged or an older copy. Restore a current copy of the whole directory, or move it away to start anew"
    )


def _line(number: int) -> bytes:
    """Return the file's content: of one length, within one sector, so that a disk writes all of it or nothing."""
    text = f"{number:020d}"
    return f"{text} {zlib.crc32(text.encode()):08x}\n".encode()


def recorded(file: Path) -> int | None:
    """Return the commit number; None if the file is missing or empty. Raises JournalError if it is damaged."""
    try:
        line = file.read_bytes()
    except FileNotFoundError:
        return None
    if not line:
        return None
    number = int(line[:20]) if line[:20].isdigit() else 0
    if line != _line(number):
        raise JournalError(
            f"{file} is damaged: it must hold the number of the database's last commit. Restore a copy of the "
            "directory; or remove the file, if you are sure that the database is complete"
        )
    return number


class CommitMarks:
    """Signed commit numbers, which peers keep and send back. A mark of another journal is ignored."""

    def __init__(self, secret: bytes, process: bytes, found: int) -> None:
        self._secret = secret
        self._process = process
        """Random id of this process, which tells its commits from lost ones with the same numbers."""
        self._found = found
        """Number of the last commit on disk when this process started."""

    def make(self, number: int) -> bytes:
        """Return a mark of 32 bytes: the process's id, the number, and the signature."""
        what = self._process + number.to_bytes(8, "big")
        return what + self._signed(what)

    def missing(self, mark: bytes) -> int | None:
        """Return the number of the commit in `mark` if it is lost: an earlier process made it, and this one did not
        find it. None also for an invalid signature."""
        what, number = mark[:16], int.from_bytes(mark[8:16], "big")
        if mark[:8] == self._process or number <= self._found:
            return None
        return number if hmac.compare_digest(mark[16:], self._signed(what)) else None

    def _signed(self, what: bytes) -> bytes:
        return hmac.new(self._secret, b"commit\0" + what, hashlib.sha256).digest()[:16]
