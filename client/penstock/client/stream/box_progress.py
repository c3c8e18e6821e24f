"""Progress of a box, which the training thread writes, and another thread reports to the coordinator."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.proto.errors import ProtocolError
from penstock.proto.state.counts import MOST_GROUPS, Rows, is_whole, merged_rows, read_changes
from penstock.proto.state.position import Position
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2

MOST_EPOCH_STARTS = 256
"""Epoch starts that are kept and reported; equal to the coordinator's limit (Limits.epoch_starts_at_once)."""
SLOTS_IN_ALL = 1 << 15
"""Slots in all kept epoch starts together, so that a report of a box with many slots stays small."""
FOLDED_AT = 64
"""Batches of a slot until their counts are decoded: kept as bytes, they cost the training thread little."""


class EpochStarts:
    """Positions at which the box began its newest epochs. The watch thread reports those that no answered report had.

    The coordinator computes a position at an earlier step from one before it, and from the batches after which each
    slot ended its epochs. It may lack both: reports skip whole epochs, a restarted coordinator has had none, and a
    slot's new runner does not know the ends of epochs before its restart point."""

    def __init__(self) -> None:
        self._starts: tuple[records_pb2.BoxPosition, ...] = ()
        self._confirmed = -1
        """Newest epoch whose start was in an answered report; -1: none."""

    def add(self, position: Position) -> None:
        most = max(1, min(MOST_EPOCH_STARTS, SLOTS_IN_ALL // len(position.total)))
        self._starts = (*self._starts, position.to_proto())[-most:]

    def put_into(self, request: pb.WatchRunRequest) -> None:
        """Add the unconfirmed starts, but no later epoch than the report's position: one may have begun meanwhile."""
        starts, confirmed = self._starts, self._confirmed
        request.epoch_starts.extend(start for start in starts if confirmed < start.epoch <= request.delivered.epoch)
        request.omits_epoch_starts = bool(starts) and starts[0].epoch <= confirmed

    def answered(self, request: pb.WatchRunRequest, reply: pb.WatchRunReply) -> None:
        if reply.wants_epoch_starts:
            self._confirmed = -1
        elif request.epoch_starts:
            self._confirmed = max(self._confirmed, request.epoch_starts[-1].epoch)


class DeliveredCounts:
    """Counts of delivered samples and tokens, a row for each (source, key), of which a batch brings the changed ones.
    The training thread takes these; any thread may read the sums."""

    def __init__(self, slots: int) -> None:
        self._changes: list[deque[bytes]] = [deque() for _ in range(slots)]
        self._rows: list[Rows] = [{} for _ in range(slots)]
        self._lock = threading.Lock()

    def begin(self, rows: Rows) -> None:
        """Begin with a loaded state's counts. The box's are those of slot 0, whose loader continues them."""
        with self._lock:
            self._rows[0] = dict(rows)

    def take(self, slot: int, changes: bytes) -> None:
        """Add a batch's changed counts. Raises ProtocolError if FOLDED_AT changes wait and one is malformed."""
        kept = self._changes[slot]
        if is_whole(changes):
            kept.clear()  # these are all counts of the slot, not only changed ones
        kept.append(changes)
        if len(kept) >= FOLDED_AT:
            with self._lock:
                self._fold(slot)

    def rows(self) -> Rows:
        """Return the counts of all slots together. Raises ProtocolError if a slot sent malformed counts."""
        with self._lock:
            for slot in range(len(self._rows)):
                self._fold(slot)
            return merged_rows(self._rows)

    def _fold(self, slot: int) -> None:
        changes = self._changes[slot]
        while True:
            try:
                newest = changes.popleft()  # the training thread may clear the queue meanwhile
            except IndexError:
                return
            rows = read_changes(newest)
            self._rows[slot] = rows = rows if is_whole(newest) else {**self._rows[slot], **rows}
            if len(rows) > MOST_GROUPS:
                raise ProtocolError(
                    f"a loader must count at most {MOST_GROUPS} groups (pairs of source and key), got {len(rows)}"
                )


@dataclass
class BoxProgress:
    """Progress of a box. Values are replaced as a whole, so that the reporting thread reads whole ones; only the
    numbers in `waited_by_slot` are increased in place."""

    position: Callable[[], records_pb2.BoxPosition | None] = lambda: None
    waiting_for: int = 0
    """1 + number of the slot for whose batch the loop waits; 0: none."""
    waiting_since: float = 0.0
    """A time of time.monotonic()."""
    waited_by_slot: list[float] = field(default_factory=list)
    """Seconds of waiting for each slot's batches. Assign a new list to start again from 0."""
    epoch_ended: bool = False
    first_digest: int = 0
    """Digest of the first batch that was taken; 0: none yet."""
    finished: bool = False
    """The last loop came to its end."""
    failed_at: int = -1
    """Step after which the loop got an error instead of a batch; -1: none."""
    error: records_pb2.ErrorDetail | None = None
    """That error; not the exception, whose traceback would keep the loop's batches and its loader alive."""
    unreachable: Callable[[], list[tuple[int, int, str]]] = list
    """Returns (slot, generation, reason) for each slot on a worker that this host cannot reach."""
    counts: DeliveredCounts | None = None
    """None before the run has a reader."""
    abandoned: tuple[tuple[int, int], ...] = ()
    """Pairs (epoch, last step)."""
    epoch_starts: EpochStarts = field(default_factory=EpochStarts)
    _reported_waits: tuple[list[float], list[float]] = field(default=([], []))

    def waits(self) -> list[float]:
        """Return `waited_by_slot` with the present wait. A value never decreases, even at the end of a wait."""
        counted = self.waited_by_slot
        seconds, slot = list(counted), self.waiting_for - 1
        if 0 <= slot < len(seconds):
            seconds[slot] += max(0.0, time.monotonic() - self.waiting_since)
        reported_list, before = self._reported_waits
        if reported_list is counted:
            seconds = [max(pair) for pair in zip(before, seconds, strict=True)]
        self._reported_waits = (counted, seconds)
        return seconds
