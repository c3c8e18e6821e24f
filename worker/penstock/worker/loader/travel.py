"""Execution of the plans that restart_plan.py makes: restoring a loader, and replaying batches with it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

from penstock.proto.errors import PenstockError, ReplayMismatchError
from penstock.worker.loader.positioned_loader import PositionedLoader
from penstock.worker.loader.restart_plan import Leg, Recovery, Target, first_fit, route
from penstock.worker.loader.restart_points import UNFIT, RestartPoint, StreamHistory

__all__ = ["begin", "catch_up", "leave", "recover", "replay", "restore", "travel"]

_log = logging.getLogger("penstock.worker")
Go = Callable[[Leg], object]


def recover(source: PositionedLoader, plan: Recovery[RestartPoint], target: Target, go: Go) -> RestartPoint:
    """Bring the loader to the position `target` from the first restart point of the plan that leads there. Return this
    restart point.

    go: replays one leg (see restart_plan.py).
    """
    beginning = plan.nearest

    def take(point: RestartPoint | None) -> None:
        nonlocal beginning
        if point is not None:
            restore(source, point, target, go)
            return
        history = plan.nearest.history
        begin(source, history)
        beginning = source.open_epoch()
        travel(source, target.with_abandoned(history.abandoned), go)

    def log_mismatch(mismatch: Exception, instead: RestartPoint | None) -> None:
        _log.warning("%s; an older state of the loader is tried instead", cast(PenstockError, mismatch).message)

    return first_fit(plan.ways, take, UNFIT, log_mismatch) or beginning


def restore(source: PositionedLoader, point: RestartPoint, target: Target, go: Go) -> None:
    """Restore a restart point, then replay to the position `target`. `go` replays one leg (see restart_plan.py)."""
    source.restore(point)
    travel(source, target.with_abandoned(point.history.abandoned), go)


def begin(source: PositionedLoader, history: StreamHistory) -> None:
    """Bring the loader to the beginning of its stream. `history` is the history of the stream that is already known,
    for example the abandoned epochs that a replay must repeat."""
    source.history = history
    source.begin()


def travel(source: PositionedLoader, target: Target, go: Go) -> None:
    """Replay from the loader's position to `target`. Abandon each epoch that the training loop abandoned, at the same
    batch. `go` replays one leg (see restart_plan.py)."""
    for leg in route(source.position.epoch, target):
        go(leg)
        if leg.abandons:
            leave(source, leg.epoch, leg.total)


def replay(
    source: PositionedLoader, leg: Leg, seen: Callable[[Any], None], open_epoch: Callable[[], object] | None = None
) -> None:
    """Replay one leg of a plan: from the loader's position to the leg's last batch, through all epochs in between.

    Args:
        seen: called with each batch; must set `source.digest`.
        open_epoch: opens the epochs on the way; None: the loader's own `open_epoch`.

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
            "that was delivered. The loader is not deterministic: run penstock doctor"
        )


def catch_up(source: PositionedLoader, epoch: int) -> None:
    """Advance the loader to the beginning of epoch `epoch`: end all earlier epochs, which must have no batch left.
    Raise ReplayMismatchError if the loader yields one more batch."""
    while source.position.epoch < epoch:
        if not source.is_open:
            source.open_epoch()
        source.reach_end()


def leave(source: PositionedLoader, epoch: int, total: int) -> None:
    """Abandon epoch `epoch` after the slot's batch `total`, as the training loop did. The loader must have reached that
    batch."""
    catch_up(source, epoch)
    if not source.is_open:
        source.open_epoch()
    if not source.saves_state:
        source.reseed("left", epoch, total)
    source.abandon_epoch(total)
