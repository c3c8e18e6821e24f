"""Going along a stream with a loader: the thin half of restart_plan.py, which says where to."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.proto.errors import ReplayMismatchError
from penstock.worker.loader.restart_plan import Leg, Target, route

if TYPE_CHECKING:
    from penstock.worker.loader.restorable_loader import Source

__all__ = ["catch_up", "leave", "replay", "travel"]


def travel(source: Source, target: Target, go: Callable[[Leg], object]) -> None:
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
