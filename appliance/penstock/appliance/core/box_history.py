"""History of a box's stream, from which `penstock replay` recreates a delivered batch, as batches are not stored.

It needs the request that opened the box, abandoned epochs, skipped batches and any restart point: from the cluster
state, which is newer than the journal; from the journal for attempts that are over.
"""

from __future__ import annotations

import sqlite3
from dataclasses import asdict
from pathlib import Path

from google.protobuf.message import DecodeError

from penstock.appliance.core.entities import Attempt, AttemptState, Box, BoxPresence
from penstock.appliance.journal.database import damaged, read_only
from penstock.appliance.journal.journal import checked
from penstock.appliance.journal.snapshot_index import SnapshotIndex
from penstock.proto.state.position import Position
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2

KNOWN = 8
"""Approximate number of a box's positions that the journal keeps; with 65,536 slots, one of every box takes 400 KB."""


def history_of(attempt: Attempt, box: Box, snapshot_index: SnapshotIndex | None = None) -> pb.History:
    """Return the history of a box of an open attempt, with its durable snapshots; without the index that for the
    journal, with the last known position and about KNOWN earlier ones."""
    reports = box.presence is BoxPresence.LIVE and attempt.state is AttemptState.OPEN
    settled = (box.reported and (reports or box.presence is BoxPresence.CLOSED)) or box.settled
    history = pb.History(attempt=attempt.number, opening=box.opening, settled=settled)
    for name in ("attempt_key", "host_id", "host"):
        history.opening.ClearField(name)
    history.opening.has_seed, history.opening.seed = True, attempt.seed
    history.opening.start.CopyFrom(box.start.to_proto())
    history.mixture_changes.extend(change for change in attempt.mixture_changes if change.attempt <= attempt.number)
    known = _known(box)
    if snapshot_index is None:
        known = [*known[:-1][:: max(1, len(known) // KNOWN)], *known[-1:]]
    history.known.extend(at.to_proto() if isinstance(at, Position) else at for at in known)
    history.abandoned.extend(pb.AbandonedEpoch(epoch=epoch, step=step) for epoch, step in sorted(box.abandoned.items()))
    for slot in box.slots:
        skips = [records_pb2.Skip(epoch=e, total=t, count=n) for (e, t), n in sorted(slot.skips.items())]
        headers = history.slots.add(skips=skips, capabilities=slot.capabilities).snapshots
        for one in snapshot_index.snapshots(slot.key) if snapshot_index is not None else ():
            headers.add(**slot.key._asdict(), **asdict(one))
    return history


def _known(box: Box) -> list[Position | records_pb2.BoxPosition]:
    """Return the known positions sorted by step, with those recorded before a restart of the coordinator."""
    found: dict[int, Position | records_pb2.BoxPosition] = {at.step: at for at in box.earlier}
    found |= {at.step: at for at in box.history}
    if box.delivered.slots:
        found.setdefault(box.delivered.step, box.delivered)
    return [found[step] for step in sorted(found)]


def past(journal: Path, run: str, box: int) -> list[pb.History]:
    """Return the box's histories in all attempts that are over, oldest first, from the journal that is open."""
    try:
        with read_only(journal, in_use=True) as db:
            which = "SELECT * FROM tracks WHERE run=? AND box=? AND over ORDER BY attempt"
            rows = [checked("tracks", row, str(journal)) for row in db.execute(which, (run, box))]
            return [pb.History.FromString(row["history"]) for row in rows]
    except (sqlite3.Error, DecodeError) as error:
        raise damaged(str(journal), error) from error
