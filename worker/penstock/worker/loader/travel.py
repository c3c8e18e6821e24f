"""Going along a stream with a loader: the thin half of restart_plan.py, which says where to."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from penstock.proto.errors import PenstockError, ReplayMismatchError
from penstock.worker.loader.restart_plan import Leg, Recovery, Target, first_fit, route
from penstock.worker.loader.restart_points import UNFIT, Base, Past

if TYPE_CHECKING:
    from penstock.worker.loader.restorable_loader import Source

__all__ = ["begin", "catch_up", "leave", "recover", "replay", "restore", "travel"]

_log = logging.getLogger("penstock.worker")
Go = Callable[[Leg], object]


def recover(source: Source, plan: Recovery[Base], target: Target, go: Go) -> Base:
    """Go to a place in the first of the ways that leads there; returns where it began."""
    beginning = plan.nearest

    def take(base: Base | None) -> None:
        nonlocal beginning
        if base is not None:
            restore(source, base, target, go)
            return
        past = plan.nearest.past
        begin(source, past)
        beginning = source.open_pass()
        travel(source, target.behind(past.left), go)

    def tell(mismatch: Exception, instead: Base | None) -> None:
        _log.warning("%s; it is replayed from an older place instead", cast(PenstockError, mismatch).message)

    return first_fit(plan.ways, take, UNFIT, tell) or beginning


def restore(source: Source, base: Base, target: Target, go: Go) -> None:
    """Go to a place from a restart point, the way that the loop went."""
    source.restore(base)
    travel(source, target.behind(base.past.left), go)


def begin(source: Source, past: Past) -> None:
    """Be at the beginning. `past`: what is known of the way from there."""
    source.past = past
    source.begin()


def travel(source: Source, target: Target, go: Go) -> None:
    """Go to a place the way that the loop went: out of the epochs that it left, where it did. `go` replays a leg."""
    for leg in route(source.place.epoch, target):
        go(leg)
        if leg.leaves:
            leave(source, leg.epoch, leg.total)


def replay(
    source: Source, leg: Leg, seen: Callable[[Any], None], open_pass: Callable[[], object] | None = None
) -> None:
    """Replay a leg. `seen` gets each batch and sets the source's digest; `open_pass` opens the epochs on the way.

    Raises ReplayMismatchError if the epoch ends before, or the last batch is another one.
    """
    before = source.place.total
    if not source.seek(leg.total, leg.epoch, seen, open_pass):
        raise ReplayMismatchError(
            f"{source.name}: pass {leg.epoch} ended after batch {source.place.total} of the slot, but batch "
            f"{leg.total} had been delivered: its data are not what they were"
        )
    if before < leg.total and leg.digest and source.digest != leg.digest:
        raise ReplayMismatchError(
            f"{source.name}: replayed from its last snapshot, batch {leg.total} of the slot differs from the one that "
            "was delivered; the loader does not reproduce its batches"
        )


def catch_up(source: Source, epoch: int) -> None:
    """Go to where pass `epoch` is opened, if the source is not that far, over the end of the pass that it is in and of
    those in between, of which it had no batch. Raises ReplayMismatchError if one comes."""
    while source.place.epoch < epoch:
        if not source.is_open:
            source.open_pass()
        source.reach_end()


def leave(source: Source, epoch: int, total: int) -> None:
    """Leave pass `epoch` after batch `total`, where the source stands, as the loop left it."""
    catch_up(source, epoch)
    if not source.is_open:
        source.open_pass()
    if not source.saves_state:
        source.reseed("left", epoch, total)
    source.abandon_pass(total)
