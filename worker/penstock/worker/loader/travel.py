"""Execution of the plans of restart_plan.py and epoch_goal.py. `go`, wherever it is an argument, replays one leg."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from penstock.proto.errors import ReplayMismatchError
from penstock.worker.loader.epoch_goal import EpochGoal
from penstock.worker.loader.restart_plan import Leg, Target, first_fit, route
from penstock.worker.loader.restart_points import UNFIT, RestartPoint
from penstock.worker.loader.slot_loader import CHANGED, SlotLoader

Go = Callable[[Leg], object]


def recover(source: SlotLoader, points: Sequence[RestartPoint], target: Target, go: Go) -> RestartPoint:
    """Bring the loader to `target` from the first of the points, tried in order, that leads there; return this one."""
    # a state of a loader that vouches is right, or its difference is an error
    ways = points[:1] if source.is_vouched else points
    return first_fit(ways, lambda point: restore(source, point, target, go), UNFIT, source.log_unfit)


def restore(source: SlotLoader, point: RestartPoint, target: Target, go: Go) -> None:
    source.restore(point)
    travel(source, target.with_abandoned(point.history.abandoned), go)


def travel(source: SlotLoader, target: Target, go: Go) -> None:
    """Replay to `target`. Abandon each epoch that the training loop abandoned, at the same batch."""
    for leg in route(source.position.epoch, target):
        go(leg)
        if leg.abandons:
            leave(source, leg.epoch, leg.total)


def replay(
    source: SlotLoader, leg: Leg, seen: Callable[[Any], None], open_epoch: Callable[[], object] | None = None
) -> None:
    """Replay a leg, through all its epochs. seen: called with each batch; sets `source.digest`. open_epoch: None: the
    loader's own. Raises ReplayMismatchError if the epoch ends before the leg's last batch, or this differs from the
    delivered one."""
    before = source.position.total
    if not source.seek(leg.total, leg.epoch, seen, open_epoch):
        raise ReplayMismatchError(
            f"{source.name}: replayed epoch {leg.epoch} ended at batch {source.position.total}, too early. {CHANGED}"
        )
    if before < leg.total and leg.digest and source.digest != leg.digest:
        raise ReplayMismatchError(
            f"{source.name}: replayed batch {leg.total} of the slot differs from the delivered one. {cause_of(source)}"
        )


def cause_of(source: SlotLoader) -> str:
    """Return, for an error, what may have caused other batches in a replay, and the remedy."""
    if not source.is_vouched:
        return CHANGED
    return (
        f"The loader vouches for its states, but this one leads elsewhere: a {source.suspects}. The data or the code "
        "has changed, or a state lacks what the batches depend on: run penstock doctor"
    )


def catch_up(source: SlotLoader, epoch: int) -> None:
    """End all epochs before `epoch`. Raise ReplayMismatchError if one has a batch left."""
    while source.position.epoch < epoch:
        if not source.is_open:
            source.open_epoch()
        source.reach_end()


def leave(source: SlotLoader, epoch: int, total: int) -> None:
    """Abandon an epoch after the slot's batch `total`, which the loader has reached, as the training loop did."""
    catch_up(source, epoch)
    if not source.is_open:
        source.open_epoch()
    source.abandon_epoch(total)


# ---- pure loaders


def reach_any(source: SlotLoader, goal: EpochGoal, go: Go) -> RestartPoint:
    return first_fit(goal.ways, lambda way: reach(source, goal, way, go), UNFIT, source.log_unfit)


def reach(source: SlotLoader, goal: EpochGoal, way: RestartPoint, go: Go) -> None:
    """Bring the loader to the goal. Raise ReplayMismatchError if the way leads to other batches."""
    begin(source, goal, way)
    finish(source, goal, way, go)


def begin(source: SlotLoader, goal: EpochGoal, way: RestartPoint) -> None:
    source.restore(way)
    source.require_seeds(goal.seeds)


def finish(source: SlotLoader, goal: EpochGoal, way: RestartPoint, go: Go) -> None:
    """As `reach`, from anywhere on the way."""
    go(Leg(goal.epoch, goal.total))
    if goal.chain and source.chain and source.chain != goal.chain:
        raise ReplayMismatchError(
            f"{source.name}: {_taken(way)}, the loader has not made the batches up to {goal.total} again. {_cause(way)}"
        )
    if goal.ends or goal.next_digest:
        _compare_next(source, goal, way)


def _compare_next(source: SlotLoader, goal: EpochGoal, way: RestartPoint) -> None:
    link = source.peek_link()
    if link is None if goal.ends else link == goal.next_digest:
        return
    how = (
        "ends its epoch instead of yielding the batch"
        if link is None
        else f"yields another batch than {'the end of the epoch' if goal.ends else 'the batch'}"
    )
    raise ReplayMismatchError(
        f"{source.name}: {_taken(way)}, the loader {how} that followed batch {goal.total} of the slot. {_cause(way)}"
    )


def _taken(way: RestartPoint) -> str:
    return "made again from the beginning of its epoch" if way.is_epoch_start else "restored from its state"


def _cause(way: RestartPoint) -> str:
    if way.is_epoch_start:
        return CHANGED
    return "Its state_dict() must describe the position after the last batch that it has yielded: run penstock doctor"
