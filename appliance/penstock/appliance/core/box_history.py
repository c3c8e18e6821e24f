"""History of a box's stream, from which `penstock replay` recreates a delivered batch, as batches are not stored.

It needs the request that opened the box, abandoned epochs, skipped batches and any restart point: from the cluster
state of a running coordinator, which is newer than its files; from the journal for attempts that are over or a stopped
coordinator. Its files are only read, under the lock of the state directory, so that no coordinator starts meanwhile.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from penstock.appliance.core.entities import Attempt, AttemptState, Box, BoxPresence
from penstock.appliance.core.opening import start_of
from penstock.appliance.journal.database import check_commits, check_schema, read_only
from penstock.appliance.journal.journal import TABLES, checked
from penstock.appliance.journal.snapshot_index import DurableSnapshot, SlotKey, SnapshotIndex
from penstock.proto.errors import JournalError
from penstock.proto.state.position import Position
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2

__all__ = ["BoxHistory", "StoppedCoordinator", "history_of", "past", "with_snapshots"]

KNOWN = 8
"""Approximate number of a box's positions that the journal keeps; with 65,536 slots, one of every box takes 400 KB."""


@dataclass(frozen=True)
class BoxHistory:
    """History of one box in one attempt: a copy that another thread serialises, because a large attempt takes seconds,
    in which the event loop would receive no heartbeat."""

    attempt: int
    seed: int
    opening: pb.OpenRunRequest
    start: Position
    settled: bool
    """True if the box was live or closed in order, and `known` ends with its newest position; else it may have taken
    more steps, of which the coordinator knows nothing."""
    known: Sequence[Position | records_pb2.BoxPosition]
    abandoned: Mapping[int, int]
    """Abandoned epoch -> the last step that the loop took of it."""
    slots: Sequence[tuple[Mapping[tuple[int, int], int], records_pb2.LoaderCapabilities | None]]
    """By slot: skipped batches, as (epoch, total) -> count, and the loader's capabilities."""
    mixture_changes: Sequence[records_pb2.MixtureChange] = ()
    snapshots: Mapping[SlotKey, Sequence[DurableSnapshot]] = field(default_factory=dict)

    def message(self) -> pb.History:
        history = _opened(self.attempt, self.opening, self.start, self.seed)
        history.settled = self.settled
        history.mixture_changes.extend(self.mixture_changes)
        history.known.extend(at.to_proto() if isinstance(at, Position) else at for at in self.known)
        history.abandoned.extend(
            pb.AbandonedEpoch(epoch=epoch, step=step) for epoch, step in sorted(self.abandoned.items())
        )
        for left_out, capabilities in self.slots:
            skips = [records_pb2.Skip(epoch=e, total=t, count=n) for (e, t), n in sorted(left_out.items())]
            history.slots.add(skips=skips, capabilities=capabilities)
        for key, kept in self.snapshots.items():
            headers = (_header(key, one.total, one.epoch, one.size, one.epoch_start) for one in kept)
            history.slots[key.slot].snapshots.extend(headers)
        return history

    def thinned(self) -> BoxHistory:
        """Return a copy for the journal, with the last known position and about KNOWN earlier ones."""
        few = self.known[:-1][:: max(1, len(self.known) // KNOWN)]
        return replace(self, known=[*few, *self.known[-1:]])

    def serialised(self) -> bytes:
        """Return the bytes of a History message, without snapshots, which have an index of their own."""
        return self.message().SerializeToString()


def history_of(attempt: Attempt, box: Box) -> BoxHistory:
    """Return the history of a box of an open attempt, without its snapshots."""
    reports = box.presence is BoxPresence.LIVE and attempt.state is AttemptState.OPEN
    settled = (box.reported and (reports or box.presence is BoxPresence.CLOSED)) or box.settled
    slots = [(dict(slot.skips), slot.capabilities) for slot in box.slots]
    changes = [change for change in attempt.mixture_changes if change.attempt <= attempt.number]
    return BoxHistory(
        attempt.number, attempt.seed, box.opening, box.start, settled, _known(box), dict(box.abandoned), slots, changes
    )


def _known(box: Box) -> list[Position | records_pb2.BoxPosition]:
    """Return the known positions sorted by step, with those recorded before a restart of the coordinator."""
    found: dict[int, Position | records_pb2.BoxPosition] = {at.step: at for at in box.earlier}
    found |= {at.step: at for at in box.history}
    if box.delivered.slots:
        found.setdefault(box.delivered.step, box.delivered)
    return [found[step] for step in sorted(found)]


def with_snapshots(attempt: Attempt, box: Box, snapshot_index: SnapshotIndex) -> BoxHistory:
    """Return the history of a box of an open attempt, with its durable snapshots."""
    snapshots = {slot.key: list(snapshot_index.snapshots(slot.key)) for slot in box.slots}
    return replace(history_of(attempt, box), snapshots=snapshots)


def _opened(attempt: int, opening: pb.OpenRunRequest, start: Position, seed: int) -> pb.History:
    history = pb.History(attempt=attempt, opening=opening)
    for name in ("attempt_key", "host_id"):
        history.opening.ClearField(name)
    history.opening.has_seed, history.opening.seed = True, seed
    history.opening.start.CopyFrom(start.to_proto())
    return history


def _header(key: SlotKey, total: int, epoch: int, size: int, epoch_start: bool) -> pb.SnapshotHeader:
    return pb.SnapshotHeader(**key._asdict(), total=total, epoch=epoch, size=size, epoch_start=epoch_start)


# ---- from files


@contextmanager
def _reading(path: Path, *, in_use: bool = False) -> Iterator[sqlite3.Connection]:
    """Open a coordinator's database read-only; `in_use`: a coordinator may have it open. Raises JournalError."""
    try:
        with read_only(path, in_use=in_use) as db:
            (found,) = db.execute("PRAGMA user_version").fetchone()
            check_schema(path, found)
            yield db
    except (sqlite3.Error, DecodeError) as error:
        raise JournalError(
            f"{path} cannot be read as a coordinator's database: {error}. Check the path, or restore a copy of the file"
        ) from error


def _rows(db: sqlite3.Connection, table: str, **where: str | int) -> list[Any]:
    """Return the rows with these column values, sorted by key; none if an older release made no such table."""
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name=?", (table,)).fetchone():
        return []
    condition = " AND ".join(f"{column}=?" for column in where)
    keys = ", ".join(TABLES[table][0]) if table in TABLES else "epoch, total"
    rows = db.execute(f"SELECT * FROM {table} WHERE {condition} ORDER BY {keys}", tuple(where.values())).fetchall()
    name = db.execute("PRAGMA database_list").fetchone()["file"]
    return [checked(table, row, name) for row in rows] if table in TABLES else rows


def past(journal: Path, run: str, box: int, *, in_use: bool = True) -> list[pb.History]:
    """Return the box's histories in all attempts that are over, oldest first. `in_use`: see `_reading`."""
    with _reading(journal, in_use=in_use) as db:
        return [pb.History.FromString(row["history"]) for row in _rows(db, "tracks", run=run, box=box) if row["over"]]


class StoppedCoordinator:
    """State directory of a stopped coordinator, opened for reading and locked until `close`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._journal, self._store = path / "journal.db", path / "snapshots.db"
        if not self._journal.is_file():
            raise JournalError(
                f"{path} must be a coordinator's state directory, got a path without a file journal.db in it: pass the "
                "directory that the coordinator had as --state-dir"
            )
        try:
            self._lock = os.open(path / "lock", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise JournalError(
                f"the state directory {path} cannot be read: {error}. Run this command as the coordinator's user"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise JournalError(
                f"the state directory {path} is in use by a running coordinator: pass that coordinator's address "
                "(--coordinator) instead"
            ) from error
        try:
            for database in (self._journal, self._store):
                check_commits(database)
        except JournalError:
            self.close()
            raise

    def __enter__(self) -> StoppedCoordinator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._lock)

    def histories(self, run: str, box: int) -> list[pb.History]:
        """Return the box's histories in all attempts of the run, oldest first."""
        found = past(self._journal, run, box, in_use=False)
        with _reading(self._journal) as db:
            for row in _rows(db, "boxes", run=run, box=box):
                if row["opening"] is not None:
                    (of_run,) = _rows(db, "runs", run=run)
                    found.append(self._open_one(db, run, row, int(of_run["seed"])))
        return found

    def _open_one(self, db: sqlite3.Connection, run: str, row: Any, seed: int) -> pb.History:
        place: dict[str, str | int] = {"run": run, "attempt": row["attempt"], "box": row["box"]}
        opening = pb.OpenRunRequest.FromString(row["opening"])
        history = _opened(row["attempt"], opening, start_of(opening), seed)
        changes = _rows(db, "mixture_changes", run=run)
        history.mixture_changes.extend(records_pb2.MixtureChange.FromString(change["change"]) for change in changes)
        for track in _rows(db, "tracks", **place):
            last = pb.History.FromString(track["history"])
            history.known.extend(last.known)
            # If the box was open, its loop may have continued since then with the batches that its lanes held.
            history.settled = last.settled and row["place"] == BoxPresence.CLOSED.value
        history.abandoned.extend(
            pb.AbandonedEpoch(epoch=abandoned_epoch["epoch"], step=abandoned_epoch["step"])
            for abandoned_epoch in _rows(db, "abandoned", **place)
        )
        with _reading(self._store) as store:
            for slot in _rows(db, "slots", **place):
                at = {**place, "slot": slot["slot"]}
                of_slot = history.slots.add(
                    skips=[
                        records_pb2.Skip(epoch=skip["epoch"], total=skip["total"], count=skip["count"])
                        for skip in _rows(db, "skips", **at)
                    ],
                    snapshots=[pb.SnapshotHeader.FromString(one["header"]) for one in _rows(store, "snapshots", **at)],
                )
                if slot["capabilities"] is not None:
                    of_slot.capabilities.ParseFromString(slot["capabilities"])
        return history

    def find_snapshot(self, header: pb.SnapshotHeader) -> bytes | None:
        with _reading(self._store) as db:
            at = ("run", "attempt", "box", "slot", "total", "epoch")
            rows = _rows(db, "snapshots", **{name: getattr(header, name) for name in at})
        return bytes(rows[0]["data"]) if rows else None

    def blob(self, name: str) -> bytes | None:
        with _reading(self._store) as db:
            found = db.execute("SELECT data FROM blobs WHERE name=?", (name,)).fetchone()
        return bytes(found["data"]) if found else None
