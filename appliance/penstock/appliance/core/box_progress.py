"""Progress that a box reports: position, ends of its slots' epochs, where it began epochs. Snapshots that no state of
the last `retention_steps` steps needs are dropped."""

from __future__ import annotations

from bisect import bisect_right

from penstock.appliance.core.entities import Attempt, Box
from penstock.appliance.journal.snapshot_index import SnapshotIndex
from penstock.proto.errors import SAME_RELEASE, InvalidArgumentError
from penstock.proto.rpc.bounds.message_bounds import owned
from penstock.proto.state.position import Position
from penstock.proto.v1 import coordinator_pb2 as pb

HISTORY_ENTRIES = 64
"""Approximate number of reported positions kept per box, from which states of the last `retention_steps` steps come."""
ENDS_MAX = 1 << 20
"""Largest number of epochs' ends kept for a box; matters only if `retention_steps` is unlimited."""
_COMPARED_EPOCHS = 64
"""Number of newest epochs for which the coordinator knows which box left it first, and its label."""


def advance(snapshot_index: SnapshotIndex, attempt: Attempt, box: Box, request: pb.WatchRunRequest, now: float) -> None:
    """Record the reported position, which must not be before the recorded one, and drop snapshots that are too old."""
    position = Position.received(request.delivered, InvalidArgumentError)
    steps, box.delivered = position.step - box.step, owned(request.delivered)
    _note_ends(attempt, box, position)
    if any(position.delivered):  # the loop may still name an epoch of which it has taken nothing
        _note_first(attempt.named, position.epoch, (position.label, box.number))
    box.measure(now, steps)
    # Not every position of the window is kept, so snapshots may be dropped a fraction of the window late, never early.
    history, edge = box.history, box.step - box.retention
    if box.step - history[-1].step >= _spacing(box):
        history.append(position)
    while len(history) > 1 and history[1].step <= edge:
        history.popleft()
        box.ends = {end: total for end, total in box.ends.items() if end[1] >= history[0].epoch}
    if history[0].step <= edge:
        for slot in box.slots:
            snapshot_index.trim(slot.key, history[0].total[slot.key.slot])


def note_epoch_starts(attempt: Attempt, box: Box, request: pb.WatchRunRequest) -> bool:
    """Record where the box began epochs; after a restart of the coordinator a client sends all again. Return whether
    this is the last of these reports. Raises InvalidArgumentError for a position that is not the start of an epoch."""
    for message in request.epoch_starts:
        start = Position.received(owned(message), InvalidArgumentError)
        if not box.is_fresh(start) or start.step < box.start.step:
            raise InvalidArgumentError(
                f"an epoch's start must have no batch of it and come after step {box.start.step} of epoch "
                f"{box.start.epoch}, got step {start.step} of epoch {start.epoch}. {SAME_RELEASE}"
            )
        _note_ends(attempt, box, start)
        _note_first(attempt.left, start.epoch - 1, (start.step, box.number))
        index = bisect_right(box.history, start.step, key=lambda position: position.step)
        if index > 0 and start.step - box.history[index - 1].step >= _spacing(box):
            box.history.insert(index, start)
    is_last = not (box.reported or request.omits_epoch_starts)
    box.reported |= is_last
    return is_last


def _spacing(box: Box) -> int:
    return max(1, box.retention // HISTORY_ENTRIES)


def _note_first(noted: dict[int, tuple[int, int]], epoch: int, what: tuple[int, int]) -> None:
    noted.setdefault(epoch, what)
    if len(noted) > _COMPARED_EPOCHS:
        del noted[min(noted)]


def _note_ends(attempt: Attempt, box: Box, position: Position) -> None:
    for number in set(range(attempt.num_workers)) - set(position.live):
        box.ends[number, position.epoch] = position.total[number]
    if len(box.ends) > ENDS_MAX:
        epochs = sorted({epoch for _, epoch in box.ends})
        newer = epochs[len(epochs) // 2]
        box.ends = {end: total for end, total in box.ends.items() if end[1] > newer}
    if position.epoch > box.start.epoch:  # the epoch before ended or was abandoned at this position
        begun = zip(position.total, position.delivered, strict=True)
        box.ends |= {(k, position.epoch - 1): total - delivered for k, (total, delivered) in enumerate(begun)}
