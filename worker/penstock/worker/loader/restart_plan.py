"""The plan of how to bring a loader to a position: which restart points lead to it, in which order they are tried, and
which legs are replayed from each.

Pure functions of values: no loader, no socket, no torch. A plan says "restore this restart point, replay these legs,
compare the last batch with this digest; on a mismatch take the next restart point". A runner (runner.py), a helper
process (replayer.py) or a resume (start.py) carries it out. The daemon plans in the same way with the restart points
that it keeps (snapshots.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Generic, Protocol, TypeVar

__all__ = ["BEGINNING", "Leg", "Recovery", "RestartPoint", "Target", "first_fit", "plan_recovery", "route", "usable"]

BEGINNING: Final = None
"""Entry of `Recovery.ways` that uses no restart point: call input_fn again, and replay all batches from the
beginning."""


class RestartPoint(Protocol):
    """Interface of a restart point that planning uses."""

    @property
    def epoch(self) -> int: ...
    @property
    def total(self) -> int:
        """Number of the slot's batches, over all epochs, when the restart point was taken."""

    @property
    def began(self) -> int:
        """Number of the slot's batches, over all epochs, when the restart point's epoch was opened."""

    @property
    def is_epoch_start(self) -> bool:
        """True if the restart point was taken when an epoch was opened, False if it was taken after a batch."""


class _History(Protocol):
    @property
    def abandoned(self) -> tuple[tuple[int, int], ...]: ...
    @property
    def complete(self) -> bool: ...


class _WithHistory(RestartPoint, Protocol):
    """Fields of a restart point that holds the history of the stream up to its position."""

    @property
    def history(self) -> _History: ...
    @property
    def is_beginning(self) -> bool: ...


Point = TypeVar("Point", bound=RestartPoint)
PointWithHistory = TypeVar("PointWithHistory", bound=_WithHistory)
W = TypeVar("W")


@dataclass(frozen=True)
class Leg:
    """Part of a replay that lies within one epoch. It ends after the slot's batch `total`, counted over all epochs."""

    epoch: int
    total: int
    leaves: bool = False
    """Flag that the training loop abandoned the epoch after batch `total`, so the replay must abandon it too."""
    digest: int = 0
    """Digest that batch `total` must have; 0 = not compared."""


@dataclass(frozen=True)
class Target:
    """Position in a slot's stream to reach: after batch `total`, in epoch `epoch`."""

    epoch: int
    total: int
    left: Mapping[int, int] = field(default_factory=dict)
    """Abandoned epochs: number of the epoch -> the slot's total at which the training loop abandoned it."""
    digest: int = 0
    """Digest that batch `total` must have; 0 = not known."""

    def behind(self, left: Iterable[tuple[int, int]]) -> Target:
        """Return the same target, with abandoned epochs added that a restart point's history names as (epoch,
        total)."""
        return replace(self, left=dict(left) | dict(self.left))


def route(from_epoch: int, target: Target) -> list[Leg]:
    """Return the legs of a replay to the target from a position in epoch `from_epoch`. An abandoned epoch ends where
    the training loop abandoned it."""
    left = target.left
    legs = [Leg(epoch, left[epoch], leaves=True) for epoch in sorted(left) if from_epoch <= epoch < target.epoch]
    return [*legs, Leg(target.epoch, target.total, digest=target.digest)]


def _is_on_the_way(point: RestartPoint, target: Target) -> bool:
    if point.epoch > target.epoch or point.total > target.total:
        return False
    # A restart point beyond the position where the loop abandoned its epoch, or a later one, is not on the way.
    if any(point.total > there for epoch, there in target.left.items() if epoch >= point.epoch):
        return False
    # The runner opened this epoch ahead of the loop if it began after the position where the loop abandoned the last
    # one.
    return point.began <= target.left.get(point.epoch - 1, point.began)


def usable(points: Iterable[Point], target: Target) -> list[Point]:
    """Return the restart points from which the target can be reached, in the given order.

    A snapshot taken exactly where the training loop abandoned an epoch is used only if there is no other: when the next
    epoch is opened, a loader that was restored there and has yielded nothing may continue the abandoned one.
    """
    found = [point for point in points if _is_on_the_way(point, target)]
    return [point for point in found if point.is_epoch_start or point.total != target.left.get(point.epoch)] or found


@dataclass(frozen=True)
class Recovery(Generic[PointWithHistory]):
    """Plan by which a new runner recovers a slot's position."""

    nearest: PointWithHistory
    """Restart point nearest to the target; its history is the longest."""
    ways: list[PointWithHistory | None]
    """Restart points to try, the best first; BEGINNING = no restart point. There is at least one."""


def plan_recovery(
    points: Iterable[PointWithHistory], target: Target, *, counted: bool
) -> Recovery[PointWithHistory] | None:
    """Return the plan by which a runner that takes a slot over recovers its position; None if no restart point leads
    there.

    The best way is the nearest restart point. If possible it lies before the last delivered batch, so that this batch
    is made again and compared. Earlier restart points follow, because verification compared only a few batches. The
    beginning comes last, if the stream can be replayed from it.

    counted: the loader's own states lead to wrong batches, so the beginning is the only way if the stream can be
    replayed from it.
    """
    found = usable(points, target)
    before = [point for point in found if point.total < target.total] or found
    if not before:
        return None
    order = sorted(before, key=lambda point: (point.epoch, point.total), reverse=True)
    nearest = order[0]
    ways: list[PointWithHistory | None] = [] if nearest.history.complete and counted else [*order]
    if nearest.history.complete and not (ways and order[-1].is_beginning):
        ways.append(BEGINNING)
    return Recovery(nearest, ways)


def first_fit(
    ways: Sequence[W],
    take: Callable[[W], object],
    unfit: tuple[type[Exception], ...],
    on_mismatch: Callable[[Exception, W], None],
) -> W:
    """Try ways to a position, in order. Return the first one that leads to it.

    Args:
        ways: the ways to try, at least one.
        take: tries a way. It raises one of `unfit` if the way does not lead to the position.
        unfit: errors after which the next way is tried.
        on_mismatch: called with the error and with the way that is tried next.

    Raises the error of the last way, and at once any error that is not one of `unfit`.
    """
    for number, way in enumerate(ways, 1):
        try:
            take(way)
            return way
        except unfit as error:
            if number == len(ways):
                raise
            on_mismatch(error, ways[number])
    raise ValueError("ways must hold at least one, got none")
