"""Execution of the plans that restart_plan.py makes: restoring a loader, and replaying batches with it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

from penstock.proto.errors import PenstockError, ReplayMismatchError
from penstock.worker.loader.positioned_loader import PositionedLoader
from penstock.worker.loader.restart_plan import Leg, Target, first_fit, route
from penstock.worker.loader.restart_points import UNFIT, RestartPoint

__all__ = ["catch_up", "cause_of", "leave", "recover", "replay", "restore", "travel"]

_log = logging.getLogger("penstock.worker")
Go = Callable[[Leg], object]


def recover(source: PositionedLoader, points: Sequence[RestartPoint], target: Target, go: Go) -> RestartPoint:
    """Bring the loader to the position `target` from the first restart point that leads there. Return this restart
    point.

    points: at least one, in the order in which they are tried. go: replays one leg (see restart_plan.py).
    """

    def log_mismatch(mismatch: Exception, instead: RestartPoint) -> None:
        _log.warning("%s; an older state of the loader is tried instead", cast(PenstockError, mismatch).message)

    # a state of a loader that vouches is right, or its difference is an error
    ways = points[:1] if source.is_vouched else points
    return first_fit(ways, lambda point: restore(source, point, target, go), UNFIT, log_mismatch)


def restore(source: PositionedLoader, point: RestartPoint, target: Target, go: Go) -> None:
    """Restore a restart point, then replay to the position `target`. `go` replays one leg (see restart_plan.py)."""
    source.restore(point)
    travel(source, target.with_abandoned(point.history.abandoned), go)


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
            f"that was delivered. {cause_of(source)}"
        )


def cause_of(source: PositionedLoader) -> str:
    """Return what may have caused a replay to make other batches, and the remedy, for an error."""
    if not source.is_vouched:
        return "The loader is not deterministic: run penstock doctor"
    return (
        f"The loader vouches for its states, but this one leads elsewhere: a {source.suspects}. The data or the code "
        "has changed, or a state lacks what the batches depend on: run penstock doctor"
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
    source.abandon_epoch(total)
