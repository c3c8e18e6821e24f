"""The plan of how to reach a position: which restart points lead to it, in which order to try them, and the legs from
each.

Pure functions of values: no loader, no socket, no torch. A plan says "restore this restart point, replay along these
legs, compare the last batch with this digest; on a mismatch take the next restart point". A runner (runner.py), a
helper process (replayer.py) or a resume (start.py) carries it out. The daemon plans in the same way with the restart
points that it keeps (snapshots.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Generic, Protocol, TypeVar

__all__ = ["BEGINNING", "Leg", "Recovery", "RestartPoint", "Target", "first_fit", "plan_recovery", "route", "usable"]

BEGINNING: Final = None
"""Way without a restart point: call input_fn again, and replay all batches from the beginning."""


class RestartPoint(Protocol):
    """Fields of a restart point that planning uses."""

    @property
    def epoch(self) -> int: ...
    @property
    def total(self) -> int:
        """Batches of the slot over all epochs when the restart point was taken."""

    @property
    def began(self) -> int:
        """Batches of the slot over all epochs when the restart point's epoch was opened."""

    @property
    def is_epoch_start(self) -> bool:
        """True if the restart point was taken at the beginning of an epoch, and not after a batch."""


class _History(Protocol):
    @property
    def abandoned(self) -> tuple[tuple[int, int], ...]: ...
    @property
    def complete(self) -> bool: ...


class _WithHistory(RestartPoint, Protocol):
    """Restart point with the history of the stream up to it."""

    @property
    def history(self) -> _History: ...
    @property
    def is_beginning(self) -> bool: ...


Point = TypeVar("Point", bound=RestartPoint)
PointWithHistory = TypeVar("PointWithHistory", bound=_WithHistory)
W = TypeVar("W")


@dataclass(frozen=True)
class Leg:
    """Part of a replay within one epoch: up to the slot's batch `total`, counted over all epochs."""

    epoch: int
    total: int
    leaves: bool = False
    """Flag that the loop abandoned the epoch after batch `total`, so the replay must abandon it too."""
    digest: int = 0
    """Digest of batch `total`, to compare it with; 0 = nothing to compare."""


@dataclass(frozen=True)
class Target:
    """A position in a slot's stream: after batch `total`, in this epoch."""

    epoch: int
    total: int
    left: Mapping[int, int] = field(default_factory=dict)
    """Epoch -> the slot's total where the loop abandoned that epoch."""
    digest: int = 0
    """Digest of batch `total`; 0 = not known."""

    def behind(self, left: Iterable[tuple[int, int]]) -> Target:
        """Return the same target, with the abandoned epochs of a restart point's history added."""
        return replace(self, left=dict(left) | dict(self.left))


def route(from_epoch: int, target: Target) -> list[Leg]:
    """Return the legs of a replay from one position to another; each abandoned epoch ends where the loop abandoned
    it."""
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
    """Return the restart points from which a position can be reached, in the given order.

    A snapshot of exactly the position where the loop abandoned an epoch comes last: a loader that was restored and has
    yielded nothing may continue this epoch when the next one is opened.
    """
    found = [point for point in points if _is_on_the_way(point, target)]
    return [point for point in found if point.is_epoch_start or point.total != target.left.get(point.epoch)] or found


@dataclass(frozen=True)
class Recovery(Generic[PointWithHistory]):
    """Plan of a runner that takes a slot over."""

    nearest: PointWithHistory
    """Restart point with the longest history."""
    ways: list[PointWithHistory | None]
    """Ways, the best first; at least one."""


def plan_recovery(
    points: Iterable[PointWithHistory], target: Target, *, counted: bool
) -> Recovery[PointWithHistory] | None:
    """Return the ways by which a runner that takes a slot over can recover; None if there is none.

    The best is the nearest restart point, if possible strictly before the last delivered batch, so that at least this
    batch is compared. Earlier restart points follow, because verification compared only a few batches. The beginning
    comes last, if the stream can be replayed from it. With `counted` the beginning is the only way, because the
    loader's own states lead to wrong batches.
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
    """Try ways to a position, in order; return the first that leads to it.

    Args:
        ways: at least one.
        take: tries a way; raises one of `unfit` if the way does not lead to the position.
        on_mismatch: called with this error and the way that is tried next.

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
