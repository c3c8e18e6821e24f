"""Restart of all slots of a run from a state within its launch, for loaders with four methods.

Such a loader starts only from an aggregated state, so a slot that moves replays from where its launch began. If that
takes longer than ALONE_S, all slots start anew from the newest saved state instead, as in cstorch: all, because
get_worker_state() counts from the state of the start, and counts of different states must never be aggregated together.

Box 0's training process sends the states that it has saved. A state is used if slot 0 of each box is next, because then
each slot keeps its worker number. The newest one waits in memory; the openings of the boxes, and so the journal, say
where the slots start now. If the loader makes other batches than were delivered, its methods are not exact, and all
slots go back to where the launch began. These functions decide; Placement restarts the slots.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.appliance.core.entities import Attempt, Box, BoxPresence, Slot, Worker
from penstock.appliance.journal.snapshot_index import SnapshotIndex
from penstock.proto.errors import SAME_RELEASE, InvalidArgumentError
from penstock.proto.rpc.bounds.message_bounds import owned
from penstock.proto.state.position import Position
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2

ALONE_S = 30.0
"""Seconds of work up to which a slot that moves replays alone, unless the job sets `replay_s`."""
_INEXACT = ("ReplayMismatchError", "StateMismatchError")


def note_offer(snapshot_index: SnapshotIndex, attempt: Attempt, box: Box, request: pb.WatchRunRequest) -> None:
    """Record a saved state that box 0 has uploaded, if the slots may restart from it. Raises InvalidArgumentError for
    positions that are not of all boxes at one step."""
    if not request.restarts:
        return
    positions = [Position.received(owned(restart.start), InvalidArgumentError) for restart in request.restarts]
    fits = {(at.step, len(at.total)) for at in positions} == {(positions[0].step, attempt.num_workers)}
    if box.number or len(positions) != attempt.num_boxes or not fits:
        raise InvalidArgumentError(
            f"box 0 must send states of one step, of all {attempt.num_boxes} boxes with {attempt.num_workers} workers, "
            f"got {len(positions)} from box {box.number}. {SAME_RELEASE}"
        )
    in_turn = all(len(at.live) == attempt.num_workers and at.live[at.cursor] == 0 for at in positions)
    stored = all(snapshot_index.has_blob(restart.resume.blob) for restart in request.restarts)
    newer = positions[0].step > max(box.launch_step, attempt.offered_step)
    if in_turn and stored and newer and not attempt.restarts_refuted:
        replaced = attempt.blobs
        attempt.offered = [owned(restart) for restart in request.restarts]
        attempt.name_blobs()
        snapshot_index.release_blobs(replaced - attempt.blobs)


def alone_s(box: Box) -> float:
    """Return the seconds of work up to which a slot of the box that moves replays alone."""
    options = box.opening.loader.options
    return options.replay_s if options.HasField("replay_s") else ALONE_S


def is_due(attempt: Attempt, box: Box, slot: Slot) -> bool:
    """Return whether all slots restart if this one moves: its replay would take long, and all boxes have passed a
    newer state, at which none abandoned an epoch."""
    if not attempt.offered or slot.worked_s <= alone_s(box) or attempt.offered_step in attempt.abandoned_after:
        return False
    return all(
        other.presence is BoxPresence.LIVE
        and other.step >= attempt.offered_step
        and all(each.phase != pb.FAILED for each in other.slots)
        for other in attempt.boxes.values()
    )


def fits_elsewhere(workers: Mapping[str, Worker], attempt: Attempt) -> bool:
    """Return whether the run's slots on draining workers all fit on other workers that can serve the run."""
    slots = (slot for box in attempt.boxes.values() for slot in box.slots)
    homes = (workers.get(slot.worker) for slot in slots)
    leaving = sum(home is not None and home.draining for home in homes)
    opening = next(iter(attempt.boxes.values())).opening
    return sum(worker.free for worker in workers.values() if worker.can_serve(opening)) >= leaving


def is_refuted(box: Box, slot: Slot, error: records_pb2.ErrorDetail) -> bool:
    """Return whether a runner failed because the loader does not continue exactly from a restart's state."""
    return box.opening.HasField("restart") and (error.name in _INEXACT or slot.phase != pb.READY)
