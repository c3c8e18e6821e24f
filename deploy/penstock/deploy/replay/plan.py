"""Plan of the replay of a delivered batch: the box's position to start from, and how each worker is restored there.

A batch is a function of the stream's start and of the epochs that the loop abandoned by `break`. Which worker made step
S follows from the lengths of all workers' epochs, which are not recorded. So all workers of the box run again, from the
newest known position that each of them can reach: from a durable snapshot before it, from a checkpoint of it, or from
the start of the attempt. That yields the stream digest of the box too, which is compared where the box, or a
checkpoint, recorded it.

Pure: it reads the history, and runs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.client.states.saved_state import SavedState
from penstock.proto.errors import StateMismatchError, StateUnavailableError
from penstock.proto.state.position import Position
from penstock.proto.state.restartable import by_own_methods
from penstock.proto.v1 import coordinator_pb2 as pb

__all__ = ["KnownPosition", "ReplayPlan", "attempt_of", "plan"]

FURTHER = 1000
"""Largest number of steps replayed after the batch to reach a known stream digest; more if more steps were replayed
before it."""


@dataclass(frozen=True)
class KnownPosition:
    """Known position of the box."""

    position: Position
    checkpoint: SavedState | None = None
    """Checkpoint of this position, from which the workers can start."""


@dataclass(frozen=True)
class ReplayPlan:
    start: KnownPosition
    snapshots: tuple[pb.SnapshotHeader | None, ...]
    """Snapshot by slot, if the start has no checkpoint; None: restored as at the attempt's start."""
    abandoned: dict[int, int]
    check: Position | None
    """Position at which the stream digest is compared."""
    unverified: str
    """Reason why the stream digest is not compared, if `check` is None."""


def attempt_of(histories: Sequence[pb.History], box: int, step: int, number: int | None) -> pb.History:
    """Return the attempt that delivered the step: the newest that reached it. Raises StateUnavailableError."""
    of_number = [history for history in histories if number in (None, history.attempt)]
    if not of_number:
        have = ", ".join(str(history.attempt) for history in histories)
        raise StateUnavailableError(f"--attempt must be one that the coordinator still has, {have}, got {number}")
    begun = [history for history in of_number if history.opening.start.step < step]
    if not begun:
        first = min(history.opening.start.step for history in of_number) + 1
        raise StateUnavailableError(
            f"step {step} of box {box} is older than what the coordinator still has, which begins with step {first}: "
            "give a checkpoint of an earlier step instead of the RUN (--checkpoint)"
        )
    came = [history for history in begun if _last(history) >= step]
    chosen = (came or begun)[-1]
    if not came and chosen.settled:
        had = [f"{one.opening.start.step + 1} to {_last(one)} of attempt {one.attempt}" for one in of_number]
        raise StateUnavailableError(
            f"box {box} has not reported that step {step} was delivered: steps {', '.join(had)} can be replayed"
        )
    return chosen


def _last(history: pb.History) -> int:
    """Return the last step known to be delivered to the box."""
    return max(history.opening.start.step, max((position.step for position in history.known), default=0))


def plan(history: pb.History, checkpoints: Sequence[SavedState], step: int) -> ReplayPlan:
    """Return the plan that leads to the step. Raises StateMismatchError for a checkpoint that is not of this run."""
    opening = history.opening
    point = Position.from_proto(opening.start)
    abandoned = {abandoned_epoch.epoch: abandoned_epoch.step for abandoned_epoch in history.abandoned}
    known = [KnownPosition(point), *(KnownPosition(Position.from_proto(position)) for position in history.known)]
    for saved in checkpoints:
        position = _place_of(opening, point.step, saved)
        if position is not None:
            known.append(KnownPosition(position, saved))
    if history.slots and by_own_methods(history.slots[0].capabilities):
        for one in known:
            one.position.carry()
    start, snapshots = _start(history, known, abandoned, step)
    with_digest = [one.position for one in known if one.position.step >= step and one.position.chain is not None]
    check = min(with_digest, key=lambda position: position.step, default=None)
    unverified = ""
    if start.position.chain is None:
        check, unverified = (
            None,
            f"the stream digest is not known at step {start.position.step}, where the replay starts",
        )
    elif check is None and history.attempt and step > _last(history):
        unverified = f"the box has reported step {_last(history)}, and it is unknown whether this one was delivered"
    elif check is None:
        unverified = f"the stream digest is not known at step {step} or after it"
    elif check.step - step > max(FURTHER, step - start.position.step):
        unverified = (
            f"the next step at which the stream digest is known is {check.step}, {check.step - step} steps later"
        )
        check = None
    return ReplayPlan(start, snapshots, abandoned, check, unverified)


def _place_of(opening: pb.OpenRunRequest, begun: int, saved: SavedState) -> Position | None:
    """Return the box's position when the state was saved; None if it is before the attempt's start.

    A state of another topology is valid at the attempt's start, because the attempt was resumed from it; later ones
    belong to another attempt. Raises StateMismatchError.
    """
    ours, theirs = (opening.num_boxes, opening.num_workers_per_box), (saved.num_boxes, saved.num_workers_per_box)
    if saved.input_fn != opening.loader.input_fn:
        raise StateMismatchError(
            f"the checkpoint must be of the run's input_fn, {opening.loader.input_fn}, got one of {saved.input_fn}"
        )
    if not saved.positions:
        return None
    if saved.seed != opening.seed:
        raise StateMismatchError(
            f"the checkpoint of step {saved.step} must have the run's seed, {opening.seed}, got {saved.seed}"
        )
    if saved.step < begun:
        return None
    if ours == theirs:
        return saved.positions[opening.box]
    if saved.step > begun:
        raise StateMismatchError(
            f"the checkpoint of step {saved.step} was saved on {theirs[0]} x {theirs[1]} workers, and this attempt of "
            f"the run, which began at step {begun}, has {ours[0]} x {ours[1]}: leave it out, or name the attempt that "
            "it is of (--attempt)"
        )
    return saved.new_topology(*ours).positions[opening.box]


def _start(
    history: pb.History, known: Sequence[KnownPosition], abandoned: dict[int, int], step: int
) -> tuple[KnownPosition, tuple[pb.SnapshotHeader | None, ...]]:
    """Return the newest known position before the step that all workers can be restored to; the first known one is
    the attempt's start."""
    before = [one for one in known if one.position.step < step]
    for one in sorted(before, key=lambda one: (one.position.step, one.checkpoint is not None), reverse=True):
        if one.checkpoint is not None:
            return one, ()
        snapshots = [_snapshot(history, slot, one.position, abandoned) for slot in range(len(one.position.total))]
        if None not in snapshots or one is known[0]:
            return one, tuple(snapshots)
    raise AssertionError("an attempt can be started where it began")


def _left(first: int, epoch: int, abandoned: dict[int, int]) -> bool:
    """Return whether the loop abandoned an epoch in [first, epoch); then the workers' positions cannot be computed
    beforehand."""
    return any(first <= abandoned_epoch < epoch for abandoned_epoch in abandoned)


def _snapshot(history: pb.History, slot: int, at: Position, abandoned: dict[int, int]) -> pb.SnapshotHeader | None:
    """Return the newest durable snapshot from which the slot's position can be reached. It is used without a check,
    because only verified snapshots are stored. Return None if there is none, or if the loader can be restored only by
    its own state methods; then it is replayed from the attempt's start."""
    if slot >= len(history.slots):
        return None
    kept = history.slots[slot]
    if by_own_methods(kept.capabilities):
        return None
    fits = [
        header
        for header in kept.snapshots
        if header.epoch <= at.epoch and header.total <= at.total[slot] and not _left(header.epoch, at.epoch, abandoned)
        if header.size  # else it is the attempt's start
    ]
    return max(fits, key=lambda header: (header.epoch, header.total), default=None)
