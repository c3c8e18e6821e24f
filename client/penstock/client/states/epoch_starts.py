"""Positions at which a box (a data-parallel rank) began its epochs, as the box reports them to the coordinator.

The coordinator computes the box's position at an earlier step from a known position before it, and from the batches
after which each worker slot ended its epochs. It may lack both. Reports come every few seconds and may skip whole
epochs, and a restarted coordinator has had no reports. A slot's new runner begins at a late restart point, and does not
know the ends of earlier epochs. So the box reports the start of each epoch: a position that also tells after which
batches the slots ended the epoch before.
"""

from __future__ import annotations

from penstock.proto.state.position import Position
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2

__all__ = ["EpochStarts"]

LARGEST_NUMBER = 256
"""Largest number of epoch starts that are kept and reported; equal to the coordinator's limit
(Limits.epoch_starts_at_once)."""
SLOTS_IN_ALL = 1 << 15
"""Largest number of worker slots in all kept epoch starts together, so that a report of a box with many slots stays
small."""


class EpochStarts:
    """Starts of the newest epochs of a box. The training thread adds starts, and the watch thread reports them.

    Each report contains the starts that the coordinator has not confirmed by an answer to an earlier report. A
    coordinator that was restarted requests all starts, and the next report contains them.
    """

    def __init__(self) -> None:
        self._starts: tuple[records_pb2.BoxPosition, ...] = ()
        self._confirmed = -1
        """Number of the newest epoch whose start was in an answered report; -1: none."""

    def add(self, position: Position) -> None:
        """Add the start of the epoch that begins at this position."""
        most = max(1, min(LARGEST_NUMBER, SLOTS_IN_ALL // len(position.total)))
        self._starts = (*self._starts, position.to_proto())[-most:]

    def put_into(self, request: pb.WatchRunRequest) -> None:
        """Put the starts that are not confirmed into a report. Leave out epochs after the epoch of the position in the
        report: the training thread may have begun one meanwhile."""
        starts, confirmed = self._starts, self._confirmed
        request.epoch_starts.extend(start for start in starts if confirmed < start.epoch <= request.delivered.epoch)
        request.omits_epoch_starts = bool(starts) and starts[0].epoch <= confirmed

    def answered(self, request: pb.WatchRunRequest, reply: pb.WatchRunReply) -> None:
        """Record that the coordinator has answered a report: its starts are confirmed. If the reply requests all
        starts, none is confirmed."""
        if reply.wants_epoch_starts:
            self._confirmed = -1
        elif request.epoch_starts:
            self._confirmed = max(self._confirmed, request.epoch_starts[-1].epoch)
