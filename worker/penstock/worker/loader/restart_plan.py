"""Plans for bringing a loader to a position: which restart points (states with their positions) lead there, in which
order these are tried, and which legs (batches of one epoch) are replayed from each.

The functions are pure: no loader, no socket, no torch. A plan says "restore this restart point, replay these legs,
compare the last batch with this digest; on a mismatch take the next restart point". A runner (runner.py), a helper
process (replayer.py) or a resume (start.py) carries the plan out. The daemon plans in the same way with the restart
points that it keeps (snapshots.py).
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
    """Interface of a restart point (a loader's state with its position) for planning."""

    @property
    def epoch(self) -> int: ...
    @property
    def total(self) -> int:
        """Number of the slot's batches, over all epochs, before the restart point."""

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
    """Interface of a restart point that also knows how the stream came to its position: where it began, and which
    epochs the loop abandoned. A replay needs that to repeat the way."""

    @property
    def history(self) -> _History: ...
    @property
    def is_beginning(self) -> bool: ...


Point = TypeVar("Point", bound=RestartPoint)
PointWithHistory = TypeVar("PointWithHistory", bound=_WithHistory)
W = TypeVar("W")


@dataclass(frozen=True)
class Leg:
    """Part of a replay within one epoch, up to the slot's batch `total`, counted over all epochs."""

    epoch: int
    total: int
    leaves: bool = False
    """True if the training loop abandoned the epoch after batch `total`, so that the replay must abandon it too."""
    digest: int = 0
    """Digest that batch `total` must have; 0 = not compared."""


@dataclass(frozen=True)
class Target:
    """Position in a slot's stream to be reached: after the slot's batch `total`, in epoch `epoch`."""

    epoch: int
    total: int
    left: Mapping[int, int] = field(default_factory=dict)
    """Epochs that the training loop abandoned: number of the epoch -> number of the slot's last batch there."""
    digest: int = 0
    """Digest that batch `total` must have; 0 = not known."""

    def behind(self, left: Iterable[tuple[int, int]]) -> Target:
        """Return the target with more abandoned epochs, from a restart point's history, given as (epoch, total)."""
        return replace(self, left=dict(left) | dict(self.left))


def route(from_epoch: int, target: Target) -> list[Leg]:
    """Return the legs of a replay to the target from a position in epoch `from_epoch`. The leg of an abandoned epoch
    ends at the batch where the training loop abandoned the epoch."""
    left = target.left
    legs = [Leg(epoch, left[epoch], leaves=True) for epoch in sorted(left) if from_epoch <= epoch < target.epoch]
    return [*legs, Leg(target.epoch, target.total, digest=target.digest)]


def _is_on_the_way(point: RestartPoint, target: Target) -> bool:
    if point.epoch > target.epoch or point.total > target.total:
        return False
    # If the loop abandoned the point's epoch or a later one before the point, the point is not on the way.
    if any(point.total > there for epoch, there in target.left.items() if epoch >= point.epoch):
        return False
    # If the point's epoch began after the batch where the loop abandoned the previous epoch, the runner was ahead.
    return point.began <= target.left.get(point.epoch - 1, point.began)


def usable(points: Iterable[Point], target: Target) -> list[Point]:
    """Return the restart points from which the target can be reached, in the given order.

    A snapshot taken exactly where the training loop abandoned an epoch is returned only if no other restart point is
    usable: a loader that was restored there, and has yielded nothing since, may continue the abandoned epoch when the
    next one is opened.
    """
    found = [point for point in points if _is_on_the_way(point, target)]
    return [point for point in found if point.is_epoch_start or point.total != target.left.get(point.epoch)] or found


@dataclass(frozen=True)
class Recovery(Generic[PointWithHistory]):
    """Plan by which a new runner brings its loader to a slot's position."""

    nearest: PointWithHistory
    """Restart point nearest to the target, which has the longest history."""
    ways: list[PointWithHistory | None]
    """Restart points to try, at least one, the best first; BEGINNING = no restart point."""


def plan_recovery(
    points: Iterable[PointWithHistory], target: Target, *, counted: bool
) -> Recovery[PointWithHistory] | None:
    """Return the plan by which a slot's new runner brings its loader to the position `target`; None if no restart point
    leads there.

    The best way is the nearest restart point, if possible one before the last delivered batch, so that this batch is
    made again and compared. Earlier restart points follow, because verification has compared only a few batches. The
    beginning is last, if the stream can be replayed from there.

    counted: True if the loader's own states lead to wrong batches. The beginning is then the only way, if the stream
    can be replayed from there.
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
    """Try ways to a position, in order, and return the first way that leads there.

    Args:
        ways: the ways to try, at least one.
        take: tries a way; raises one of `unfit` if the way does not lead to the position.
        unfit: errors after which the next way is tried.
        on_mismatch: called with the error and with the way that is tried next.

    Raises the error of the last way if all fail, and at once any error that is not one of `unfit`.
    """
    for number, way in enumerate(ways, 1):
        try:
            take(way)
            return way
        except unfit as error:
            if number == len(ways):
                raise
            on_mismatch(error, ways[number])
    raise ValueError("ways must hold at least one restart point or BEGINNING, got an empty sequence")
