"""Plans for bringing a loader to a position: the restart points that lead there, in which order, and the *legs*
replayed from each. A leg ends where the training loop abandoned an epoch, or at the replay's end; it may run through
several epochs.

The functions are pure: no loader, no socket, no torch. Runners, helper processes and resumes carry plans out, and the
daemon chooses by them among the restart points that it keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, TypeVar

from penstock.proto.v1 import records_pb2

NEAR: Final = 64
"""Batches by which a snapshot lies far enough before a position, see `worth_restoring`."""
REPLAY_S: Final = 2.0
"""Default for the seconds of a pure loader's work up to which an epoch is made again from its beginning."""


class RestartPoint(Protocol):
    """What plans need of the loader's or of a daemon's restart point."""

    @property
    def epoch(self) -> int: ...
    @property
    def total(self) -> int: ...
    @property
    def began(self) -> int: ...
    @property
    def is_epoch_start(self) -> bool: ...
    @property
    def spent_s(self) -> float: ...


Point = TypeVar("Point", bound=RestartPoint)
W = TypeVar("W")


@dataclass(frozen=True)
class Leg:
    """Part of a replay, which ends in epoch `epoch`, after the slot's batch `total` over all epochs."""

    epoch: int
    total: int
    abandons: bool = False
    """True if the training loop abandoned the epoch there; the replay then does so too."""
    digest: int = 0


@dataclass(frozen=True)
class Target:
    """Position that a replay must reach: in epoch `epoch`, after the slot's batch `total` over all epochs."""

    epoch: int
    total: int
    abandoned: Mapping[int, int] = field(default_factory=dict)
    """Abandoned epochs: number -> the slot's last batch in it."""
    digest: int = 0
    """Digest that batch `total` must have; 0 = any."""
    chain: int = 0
    """Hash that the epoch's batches up to `total` must have (position.py, `linked`); 0 = any."""

    def with_abandoned(self, epochs: Iterable[tuple[int, int]]) -> Target:
        return replace(self, abandoned=dict(epochs) | dict(self.abandoned))


def route(from_epoch: int, target: Target) -> list[Leg]:
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
    """Return the points from which a replay can reach the target, in order. A snapshot exactly where the loop abandoned
    an epoch comes only if there is no other: a loader restored there might continue the abandoned epoch."""
    on_the_way = [point for point in points if _is_on_the_way(point, target)]
    return [
        point for point in on_the_way if point.is_epoch_start or point.total != target.abandoned.get(point.epoch)
    ] or on_the_way


def plan_recovery(points: Iterable[Point], target: Target) -> list[Point]:
    """Return the points from which a new runner may reach the target, the best first: the nearest, if possible one
    before the last delivered batch, so that this is made again and compared; then earlier ones."""
    candidates = usable(points, target)
    before = [point for point in candidates if point.total < target.total] or candidates
    return sorted(before, key=lambda point: (point.epoch, point.total), reverse=True)


def replay_s(options: records_pb2.Options) -> float:
    """Seconds of a pure loader's work up to which its epoch is made again from the beginning."""
    return options.replay_s if options.HasField("replay_s") else REPLAY_S


def worth_restoring(points: Iterable[Point], total: int, spent_s: float | None, replay_s: float) -> Point | None:
    """Return the snapshot of a pure loader to restore; None: make the epoch again, because that is quick or no snapshot
    lies far enough back to be compared: NEAR batches, or `replay_s` seconds of work and one batch.

    points: of the position's epoch. total: the slot's batches up to the position. spent_s: seconds that the loader has
    spent on the epoch so far; None = not known.
    """
    snapshots = [point for point in points if not point.is_epoch_start and point.total < total]
    spent = max([point.spent_s for point in snapshots], default=0.0) if spent_s is None else spent_s
    far = [point for point in snapshots if is_compared(point, total, spent, replay_s)]
    return max(far, key=lambda point: point.total, default=None)


def is_compared(point: RestartPoint, total: int, spent_s: float, replay_s: float) -> bool:
    """Return whether the batches from a snapshot up to `total` are enough to compare it by."""
    return spent_s >= replay_s and (total - point.total >= NEAR or spent_s - point.spent_s >= replay_s)


def first_fit(
    ways: Sequence[W],
    reach: Callable[[W], object],
    unfit: tuple[type[Exception], ...],
    on_mismatch: Callable[[Exception], None],
) -> W:
    """Return the first way that leads to a position: `reach` raises one of `unfit` if a way does not. Raises the error
    of the last way, and any other error at once. on_mismatch: called with an error if another way follows."""
    for way in ways[:-1]:
        try:
            reach(way)
            return way
        except unfit as error:
            on_mismatch(error)
    reach(ways[-1])
    return ways[-1]
