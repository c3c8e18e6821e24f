"""History of a box's stream, from which `penstock replay` recreates a delivered batch, as batches are not stored.

It needs the request that opened the box, abandoned epochs, skipped batches and any restart point: from the cluster
state, which is newer than the journal; from the journal for attempts that are over.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from google.protobuf.message import DecodeError

from penstock.appliance.core.entities import Attempt, AttemptState, Box, BoxPresence
from penstock.appliance.journal.database import damaged, read_only
from penstock.appliance.journal.journal import checked
from penstock.appliance.journal.snapshot_index import DurableSnapshot, SlotKey, SnapshotIndex
from penstock.proto.state.position import Position
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2

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
        history = pb.History(attempt=self.attempt, opening=self.opening, settled=self.settled)
        for name in ("attempt_key", "host_id"):
            history.opening.ClearField(name)
        history.opening.has_seed, history.opening.seed = True, self.seed
        history.opening.start.CopyFrom(self.start.to_proto())
        history.mixture_changes.extend(self.mixture_changes)
        history.known.extend(at.to_proto() if isinstance(at, Position) else at for at in self.known)
        history.abandoned.extend(
            pb.AbandonedEpoch(epoch=epoch, step=step) for epoch, step in sorted(self.abandoned.items())
        )
        for left_out, capabilities in self.slots:
            skips = [records_pb2.Skip(epoch=e, total=t, count=n) for (e, t), n in sorted(left_out.items())]
            history.slots.add(skips=skips, capabilities=capabilities)
        for key, kept in self.snapshots.items():
            headers = history.slots[key.slot].snapshots
            for one in kept:
                headers.add(
                    **key._asdict(), total=one.total, epoch=one.epoch, size=one.size, epoch_start=one.epoch_start
                )
        return history

    def thinned(self) -> BoxHistory:
        """Return a copy for the journal, with the last known position and about KNOWN earlier ones."""
        few = self.known[:-1][:: max(1, len(self.known) // KNOWN)]
        return replace(self, known=[*few, *self.known[-1:]])

    def serialised(self) -> bytes:
        """Return the bytes of a History message, without snapshots, which have an index of their own."""
        return self.message().SerializeToString()


def history_of(attempt: Attempt, box: Box, snapshot_index: SnapshotIndex | None = None) -> BoxHistory:
    """Return the history of a box of an open attempt, with its durable snapshots if the index is given."""
    reports = box.presence is BoxPresence.LIVE and attempt.state is AttemptState.OPEN
    settled = (box.reported and (reports or box.presence is BoxPresence.CLOSED)) or box.settled
    slots = [(dict(slot.skips), slot.capabilities) for slot in box.slots]
    changes = [change for change in attempt.mixture_changes if change.attempt <= attempt.number]
    snapshots = {slot.key: snapshot_index.snapshots(slot.key) for slot in box.slots} if snapshot_index else {}
    known, left = _known(box), dict(box.abandoned)
    return BoxHistory(
        attempt.number, attempt.seed, box.opening, box.start, settled, known, left, slots, changes, snapshots
    )


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
