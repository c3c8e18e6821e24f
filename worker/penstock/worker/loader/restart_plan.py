"""Plans for bringing a loader to a position: which restart points (states with their positions) lead there, in which
order these are tried, and which *legs* are replayed from each. A leg is the part of a replay up to the next position at
which the training loop abandoned an epoch, or up to the end of the replay. It may run through several epochs.

The functions are pure: no loader, no socket, no torch. A runner, a helper process (replayer.py) or a resume (start.py)
carries a plan out. The daemon uses the same functions to choose among the restart points that it keeps (snapshots.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, TypeVar

from penstock.proto.v1 import records_pb2

NEAR: Final = 64
"""Number of batches by which a snapshot lies far enough before a position. See `worth_restoring`."""
REPLAY_S: Final = 2.0
"""Default for the seconds of a pure loader's work up to which an epoch is made again from its beginning."""


class RestartPoint(Protocol):
    """What plans need of a restart point: the loader's (restart_points.py), or the one that a daemon keeps
    (snapshots.py)."""

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
    """Part of a replay. It ends in epoch `epoch`, after the slot's batch number `total`, counted over all epochs."""

    epoch: int
    total: int
    abandons: bool = False
    """True if the training loop abandoned the epoch there, so that the replay must abandon it too."""
    digest: int = 0


@dataclass(frozen=True)
class Target:
    """Position in a slot's stream that a replay must reach: in epoch `epoch`, after the slot's batch number `total`,
    counted over all epochs."""

    epoch: int
    total: int
    abandoned: Mapping[int, int] = field(default_factory=dict)
    """Epochs that the training loop abandoned: number of the epoch -> number of the slot's last batch in it."""
    digest: int = 0
    """Digest that batch `total` must have; 0 = any."""
    chain: int = 0
    """Hash that the epoch's batches up to `total` must have (proto/state/position.py, `linked`); 0 = any."""

    def with_abandoned(self, epochs: Iterable[tuple[int, int]]) -> Target:
        """Return a copy of the target that also names the abandoned `epochs` of a restart point's history."""
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
    """Return the restart points from which a replay can reach the target, in the given order.

    A snapshot taken exactly where the training loop abandoned an epoch is returned only if no other restart point is
    usable: a loader that was restored there, and has yielded nothing since, may continue the abandoned epoch when the
    next one is opened.
    """
    on_the_way = [point for point in points if _is_on_the_way(point, target)]
    return [
        point for point in on_the_way if point.is_epoch_start or point.total != target.abandoned.get(point.epoch)
    ] or on_the_way


def plan_recovery(points: Iterable[Point], target: Target) -> list[Point]:
    """Return the restart points from which a slot's new runner may bring its loader to the target, the best first: the
    nearest one, if possible one before the last delivered batch, so that this batch is made again and compared. Earlier
    restart points follow."""
    candidates = usable(points, target)
    before = [point for point in candidates if point.total < target.total] or candidates
    return sorted(before, key=lambda point: (point.epoch, point.total), reverse=True)


def replay_s(options: records_pb2.Options) -> float:
    """Return the seconds of a pure loader's work up to which its epoch is made again from its beginning."""
    return options.replay_s if options.HasField("replay_s") else REPLAY_S


def worth_restoring(points: Iterable[Point], total: int, spent_s: float | None, replay_s: float) -> Point | None:
    """Return the snapshot of a pure loader to restore for a position in its epoch; None if the epoch is made again from
    its beginning, because that is quick, or because no snapshot lies far enough back.

    A snapshot is compared by the batches after it, so it must lie some way before the position: at least NEAR batches,
    or `replay_s` seconds of the loader's work, and one batch.

    points: restart points of the position's epoch. total: number of the slot's batches up to the position. spent_s:
    seconds that the loader has spent on the epoch up to the position; None = not known. replay_s: seconds of work up to
    which the epoch is made again.
    """
    snapshots = [point for point in points if not point.is_epoch_start and point.total < total]
    spent = max([point.spent_s for point in snapshots], default=0.0) if spent_s is None else spent_s
    far = [point for point in snapshots if is_compared(point, total, spent, replay_s)]
    return max(far, key=lambda point: point.total, default=None)


def is_compared(point: RestartPoint, total: int, spent_s: float, replay_s: float) -> bool:
    """Return whether the batches from a snapshot up to the slot's batch `total` are enough to compare it by. The
    arguments are those of `worth_restoring`."""
    return spent_s >= replay_s and (total - point.total >= NEAR or spent_s - point.spent_s >= replay_s)


def first_fit(
    ways: Sequence[W],
    reach: Callable[[W], object],
    unfit: tuple[type[Exception], ...],
    on_mismatch: Callable[[Exception], None],
) -> W:
    """Try ways to a position, in order, and return the first way that leads there.

    reach: tries a way; raises one of `unfit` if the way does not lead to the position. on_mismatch: called with such an
    error, unless it is the last way's.

    Raises the error of the last way if all fail, and at once any error that is not one of `unfit`.
    """
    for way in ways[:-1]:
        try:
            reach(way)
            return way
        except unfit as error:
            on_mismatch(error)
    reach(ways[-1])
    return ways[-1]
