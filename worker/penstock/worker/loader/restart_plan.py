"""Plans for bringing a loader to a position: which restart points (states with their positions) lead there, in which
order these are tried, and which *legs* are replayed from each. A leg is the part of a replay up to the next position at
which the training loop abandoned an epoch, or up to the end of the replay. It may run through several epochs.

The functions are pure: no loader, no socket, no torch. A plan says "restore this restart point, replay these legs,
compare the last batch with this digest; on a mismatch take the next restart point". A runner (runner.py), a helper
process (replayer.py) or a resume (start.py) carries the plan out. The daemon uses the same functions to choose among
the restart points that it keeps (snapshots.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Generic, Protocol, TypeVar

__all__ = ["BEGINNING", "Leg", "Recovery", "RestartPoint", "Target", "first_fit", "plan_recovery", "route", "usable"]

BEGINNING: Final = None
"""Entry of `Recovery.ways` that stands for the beginning of the stream: call input_fn again, and replay all batches."""


class RestartPoint(Protocol):
    """Attributes of a restart point (a loader's state with its position in the slot's stream) that plans need."""

    @property
    def epoch(self) -> int: ...
    @property
    def total(self) -> int:
        """Number of batches that the slot had made in the run, over all epochs, at this restart point."""

    @property
    def began(self) -> int:
        """Number of batches that the slot had made in the run, over all epochs, when the restart point's epoch
        began."""

    @property
    def is_epoch_start(self) -> bool:
        """True if the restart point was taken at the beginning of an epoch, False if it was taken after a batch."""


class _History(Protocol):
    @property
    def abandoned(self) -> tuple[tuple[int, int], ...]: ...
    @property
    def complete(self) -> bool: ...


class _WithHistory(RestartPoint, Protocol):
    """Restart point with a history: where its stream began, and which epochs the training loop abandoned. A replay must
    abandon the same epochs."""

    @property
    def history(self) -> _History: ...
    @property
    def is_beginning(self) -> bool: ...


Point = TypeVar("Point", bound=RestartPoint)
PointWithHistory = TypeVar("PointWithHistory", bound=_WithHistory)
W = TypeVar("W")


@dataclass(frozen=True)
class Leg:
    """Part of a replay, which may run through several epochs. It ends in epoch `epoch`, after the slot's batch number
    `total`, counted over all epochs."""

    epoch: int
    total: int
    abandons: bool = False
    """True if the training loop abandoned epoch `epoch` after batch `total`, so that the replay must abandon it
    too."""
    digest: int = 0
    """Digest that batch `total` must have; 0 = any."""


@dataclass(frozen=True)
class Target:
    """Position in a slot's stream that a replay must reach: in epoch `epoch`, after the slot's batch number `total`,
    counted over all epochs."""

    epoch: int
    total: int
    abandoned: Mapping[int, int] = field(default_factory=dict)
    """Epochs that the training loop abandoned, as a dict: number of the epoch -> number of the slot's last batch in it,
    counted over all epochs."""
    digest: int = 0
    """Digest that batch `total` must have; 0 = any."""

    def with_abandoned(self, epochs: Iterable[tuple[int, int]]) -> Target:
        """Return a copy of the target that also names the abandoned `epochs` of a restart point's history, which
        are listed as (epoch, number of the slot's last batch in it)."""
        return replace(self, abandoned=dict(epochs) | dict(self.abandoned))


def route(from_epoch: int, target: Target) -> list[Leg]:
    """Return the legs of a replay from a position in epoch `from_epoch` to the target: one for each abandoned epoch
    before the target's, up to the batch after which the training loop abandoned it, and the last one up to the
    target."""
    abandoned = target.abandoned
    legs = [
        Leg(epoch, abandoned[epoch], abandons=True) for epoch in sorted(abandoned) if from_epoch <= epoch < target.epoch
    ]
    return [*legs, Leg(target.epoch, target.total, digest=target.digest)]


def _is_on_the_way(point: RestartPoint, target: Target) -> bool:
    if point.epoch > target.epoch or point.total > target.total:
        return False
    # A point after the batch at which the loop abandoned the point's epoch, or a later one, is not on the way.
    if any(point.total > there for epoch, there in target.abandoned.items() if epoch >= point.epoch):
        return False
    # If the point's epoch began after the batch where the loop abandoned the previous epoch, the runner was ahead.
    return point.began <= target.abandoned.get(point.epoch - 1, point.began)


def usable(points: Iterable[Point], target: Target) -> list[Point]:
    """Return the restart points from which a replay can reach the target, in the given order.

    A snapshot taken exactly where the training loop abandoned an epoch is returned only if no other restart point is
    usable: a loader that was restored there, and has yielded nothing since, may continue the abandoned epoch when the
    next one is opened.
    """
    found = [point for point in points if _is_on_the_way(point, target)]
    return [
        point for point in found if point.is_epoch_start or point.total != target.abandoned.get(point.epoch)
    ] or found


@dataclass(frozen=True)
class Recovery(Generic[PointWithHistory]):
    """Plan by which a new runner brings its loader to a slot's position: the restart points to try."""

    nearest: PointWithHistory
    """Restart point nearest to the position among those that `ways` may hold. The new runner takes the history of the
    stream from it, because no other of them has a longer one."""
    ways: list[PointWithHistory | None]
    """Restart points to try, at least one, the best first; BEGINNING = no restart point."""


def plan_recovery(
    points: Iterable[PointWithHistory], target: Target, *, counted: bool
) -> Recovery[PointWithHistory] | None:
    """Return the plan by which a slot's new runner brings its loader to the position `target`; None if none of the
    restart points leads there.

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
