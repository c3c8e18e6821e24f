"""Plan of the replay of a delivered batch: the position from which it starts, and how each worker is restored.

Which worker made a batch depends on the lengths of all epochs, which are not recorded. So all workers of the box run
again, from the newest recorded position that all can reach (a checkpoint, or durable snapshots), else the attempt's
start. The stream digest is compared where the box or a checkpoint recorded it. Pure: reads the history, and runs
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.client.states.saved_state import SavedState
from penstock.proto.errors import StateMismatchError, StateUnavailableError
from penstock.proto.state.loader_names import name_of
from penstock.proto.state.position import Position
from penstock.proto.state.restartable import by_own_methods
from penstock.proto.v1 import coordinator_pb2 as pb

FURTHER = 1000
"""Most steps replayed beyond the batch to a recorded stream digest, or as many as before it, if more."""


@dataclass(frozen=True)
class KnownPosition:
    """Position of the box, and the checkpoint that was saved there, if any."""

    position: Position
    checkpoint: SavedState | None = None


@dataclass(frozen=True)
class ReplayPlan:
    """Where the replay starts, and where the stream digest is compared."""

    start: KnownPosition
    snapshots: tuple[pb.SnapshotHeader | None, ...]
    """Snapshot from which each slot starts; None: the attempt's start. Empty for a start from a checkpoint."""
    abandoned: dict[int, int]
    """Epoch that the loop abandoned -> its last step."""
    check: Position | None
    """Position at which the stream digest is compared, if any."""
    unverified: str
    """Why the digest is not compared, if `check` is None; else ""."""


def attempt_of(histories: Sequence[pb.History], box: int, step: int) -> pb.History:
    """Return the newest attempt known to have delivered the step, else the newest that may have, after its last report.
    Raises StateUnavailableError if there is none, or it is certain that the step was not delivered."""
    begun = [history for history in histories if history.opening.start.step < step]
    if not begun:
        first = min(history.opening.start.step for history in histories) + 1
        raise StateUnavailableError(
            f"--step must be at least {first}, the oldest step of box {box} that the coordinator still has, got {step}"
            ". For older steps, pass a checkpoint of an earlier step (--checkpoint) instead of the RUN"
        )
    delivered = [history for history in begun if _last(history) >= step]
    chosen = (delivered or begun)[-1]
    if not delivered and chosen.settled:
        steps = ", ".join(
            f"{history.opening.start.step + 1} to {_last(history)} of attempt {history.attempt}"
            for history in histories
            if _last(history) > history.opening.start.step
        )
        raise StateUnavailableError(
            f"--step must be a step that was delivered to box {box} (steps {steps or 'none'}), got {step}"
        )
    return chosen


def _last(history: pb.History) -> int:
    return max(history.opening.start.step, max((position.step for position in history.known), default=0))


def plan(history: pb.History, checkpoints: Sequence[SavedState], step: int) -> ReplayPlan:
    """Return the plan up to `step`. Raises StateMismatchError if a checkpoint does not fit the attempt."""
    opening = history.opening
    point = Position.received(opening.start)
    abandoned = {abandoned_epoch.epoch: abandoned_epoch.step for abandoned_epoch in history.abandoned}
    known = [KnownPosition(point), *(KnownPosition(Position.received(position)) for position in history.known)]
    for saved in checkpoints:
        position = _position_in(opening, point.step, saved)
        if position is not None:
            known.append(KnownPosition(position, saved))
    if history.slots and by_own_methods(history.slots[0].capabilities):
        for place in known:
            place.position.carry()
    start, snapshots = _start(history, known, abandoned, step)
    near = step + max(FURTHER, step - start.position.step)
    with_digest = [place.position for place in known if place.position.chain is not None]
    later = [position for position in with_digest if step <= position.step <= near]
    check = min(later, key=lambda position: position.step, default=None) if start.position.chain is not None else None
    unverified = f"no stream digest is known both at step {start.position.step} and soon after step {step}"
    if history.attempt and step > _last(history):
        unverified = f"the box has reported step {_last(history)}, and it is unknown whether this one was delivered"
    return ReplayPlan(start, snapshots, abandoned, check, unverified)


def _position_in(opening: pb.OpenRunRequest, begun: int, saved: SavedState) -> Position | None:
    """Return the position in a saved state; None if it has none or is from before the attempt's start `begun`. With
    other numbers of boxes and workers, it is valid only there: the attempt was resumed from it."""
    if saved.input_fn != opening.loader.input_fn:
        raise StateMismatchError(
            f"the checkpoint must be of the run's loader, {name_of(opening.loader)}, got one of {saved.label}"
        )
    if not saved.positions:
        return None
    if saved.seed != opening.seed:
        raise StateMismatchError(
            f"the checkpoint of step {saved.step} must have the run's seed, {opening.seed}, got {saved.seed}"
        )
    if saved.step < begun:
        return None
    ours, theirs = (opening.num_boxes, opening.num_workers_per_box), (saved.num_boxes, saved.num_workers_per_box)
    if ours == theirs:
        return saved.positions[opening.box]
    if saved.step > begun:
        raise StateMismatchError(
            f"the checkpoint of step {saved.step} must be of {ours[0]} x {ours[1]} workers (boxes x workers per box), "
            f"as this attempt of the run, which began at step {begun}, got {theirs[0]} x {theirs[1]}. Omit it"
        )
    return saved.new_topology(*ours).positions[opening.box]


def _start(
    history: pb.History, known: Sequence[KnownPosition], abandoned: dict[int, int], step: int
) -> tuple[KnownPosition, tuple[pb.SnapshotHeader | None, ...]]:
    """Return the newest position before `step` to start from, and each worker's snapshot for it (None: from the
    attempt's start, the first of `known`), or no snapshots for a checkpoint."""
    before = [place for place in known if place.position.step < step]
    for place in sorted(before, key=lambda place: (place.position.step, place.checkpoint is not None), reverse=True):
        if place.checkpoint is not None:
            return place, ()
        snapshots = [_snapshot(history, slot, place.position, abandoned) for slot in range(len(place.position.total))]
        if None not in snapshots or place is known[0]:
            return place, tuple(snapshots)
    raise AssertionError("the workers must be able to start where the attempt began")


def _snapshot(history: pb.History, slot: int, at: Position, abandoned: dict[int, int]) -> pb.SnapshotHeader | None:
    """Return the newest durable snapshot from which a slot can reach `at`; None: from the attempt's start, also for a
    loader restored only by its aggregate_state_dict. One that is not exact shows in the stream digest."""
    if slot >= len(history.slots):
        return None
    kept = history.slots[slot]
    if by_own_methods(kept.capabilities):
        return None
    fits = [
        header
        for header in kept.snapshots
        if header.epoch <= at.epoch and header.total <= at.total[slot]
        # Across an abandoned epoch it cannot be computed which positions the workers reach.
        if not any(header.epoch <= epoch < at.epoch for epoch in abandoned)
        if header.size  # without a size, it is the attempt's start
    ]
    return max(fits, key=lambda header: (header.epoch, header.total), default=None)
