"""Execution of the plans that restart_plan.py and epoch_goal.py make: restoring a loader, and replaying batches with
it. `go`, wherever it is an argument, replays one leg of a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from penstock.proto.errors import ReplayMismatchError
from penstock.worker.loader.epoch_goal import EpochGoal
from penstock.worker.loader.restart_plan import Leg, Target, first_fit, route
from penstock.worker.loader.restart_points import UNFIT, RestartPoint
from penstock.worker.loader.slot_loader import SlotLoader

Go = Callable[[Leg], object]


def recover(source: SlotLoader, points: Sequence[RestartPoint], target: Target, go: Go) -> RestartPoint:
    """Bring the loader to the position `target` from the first restart point that leads there. Return this restart
    point.

    points: at least one, in the order in which they are tried.
    """
    # a state of a loader that vouches is right, or its difference is an error
    ways = points[:1] if source.is_vouched else points
    return first_fit(ways, lambda point: restore(source, point, target, go), UNFIT, source.log_unfit)


def restore(source: SlotLoader, point: RestartPoint, target: Target, go: Go) -> None:
    source.restore(point)
    travel(source, target.with_abandoned(point.history.abandoned), go)


def travel(source: SlotLoader, target: Target, go: Go) -> None:
    """Replay from the loader's position to `target`. Abandon each epoch that the training loop abandoned, at the same
    batch."""
    for leg in route(source.position.epoch, target):
        go(leg)
        if leg.abandons:
            leave(source, leg.epoch, leg.total)


def replay(
    source: SlotLoader, leg: Leg, seen: Callable[[Any], None], open_epoch: Callable[[], object] | None = None
) -> None:
    """Replay one leg of a plan: from the loader's position to the leg's last batch, through all epochs in between.

    seen: called with each batch; must set `source.digest`. open_epoch: opens the epochs on the way; None: the loader's
    own `open_epoch`.

    Raises ReplayMismatchError if the leg's epoch ends before its last batch, or if this batch differs from the
    delivered one.
    """
    before = source.position.total
    if not source.seek(leg.total, leg.epoch, seen, open_epoch):
        raise ReplayMismatchError(
            f"{source.name}: in a replay, epoch {leg.epoch} ended after batch {source.position.total} of the slot, but "
            f"batch {leg.total} had been delivered. The data have changed, or the loader is not deterministic: run "
            "penstock doctor"
        )
    if before < leg.total and leg.digest and source.digest != leg.digest:
        raise ReplayMismatchError(
            f"{source.name}: in a replay from an earlier position, batch {leg.total} of the slot differs from the one "
            f"that was delivered. {cause_of(source)}"
        )


def cause_of(source: SlotLoader) -> str:
    """Return what may have caused a replay to make other batches, and the remedy, for an error."""
    if not source.is_vouched:
        return "The loader is not deterministic: run penstock doctor"
    return (
        f"The loader vouches for its states, but this one leads elsewhere: a {source.suspects}. The data or the code "
        "has changed, or a state lacks what the batches depend on: run penstock doctor"
    )


def catch_up(source: SlotLoader, epoch: int) -> None:
    """Advance the loader to the beginning of epoch `epoch`: end all earlier epochs, which must have no batch left.
    Raise ReplayMismatchError if the loader yields one more batch."""
    while source.position.epoch < epoch:
        if not source.is_open:
            source.open_epoch()
        source.reach_end()


def leave(source: SlotLoader, epoch: int, total: int) -> None:
    """Abandon epoch `epoch` after the slot's batch `total`, as the training loop did. The loader must have reached that
    batch."""
    catch_up(source, epoch)
    if not source.is_open:
        source.open_epoch()
    source.abandon_epoch(total)


# ---- pure loaders


def reach_any(source: SlotLoader, goal: EpochGoal, go: Go) -> RestartPoint:
    return first_fit(goal.ways, lambda way: reach(source, goal, way, go), UNFIT, source.log_unfit)


def reach(source: SlotLoader, goal: EpochGoal, way: RestartPoint, go: Go) -> None:
    """Bring the loader to the goal by one of its ways. Raise ReplayMismatchError if the way leads to other batches."""
    begin(source, goal, way)
    finish(source, goal, way, go)


def begin(source: SlotLoader, goal: EpochGoal, way: RestartPoint) -> None:
    source.restore(way)
    source.require_seeds(goal.seeds)


def finish(source: SlotLoader, goal: EpochGoal, way: RestartPoint, go: Go) -> None:
    """Bring the loader from anywhere on one of the goal's ways to the goal; see `reach`."""
    go(Leg(goal.epoch, goal.total))
    if goal.chain and source.chain and source.chain != goal.chain:
        raise ReplayMismatchError(
            f"{source.name}: {_taken(way)}, the loader has not made the batches up to number {goal.total} of the slot "
            f"that were delivered. {_cause(way)}: run penstock doctor"
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
        f"{source.name}: {_taken(way)}, the loader {how} that followed batch {goal.total} of the slot when the state "
        f"was saved. {_cause(way)}: run penstock doctor. If you changed data or code on purpose, start a new run"
    )


def _taken(way: RestartPoint) -> str:
    return "made again from the beginning of its epoch" if way.is_epoch_start else "restored from its state"


def _cause(way: RestartPoint) -> str:
    if way.is_epoch_start:
        return "The data or the code has changed, or the loader is not deterministic"
    return "Its state_dict() must describe the position after the last batch that it has yielded"
