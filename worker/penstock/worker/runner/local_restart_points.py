"""A runner's own record of its restart points, and its plan to return to where the loop abandoned an epoch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from penstock.proto.state.position import EPOCHS_AHEAD
from penstock.worker.loader.restart_plan import Target

__all__ = ["EncodedPoint", "LocalRestartPoints", "Return"]

KEPT_POINTS = 16
"""Number of epoch starts, and of snapshots, that are kept."""
KEPT_BYTES = 64 << 20
"""Bytes of epoch starts up to which more than KEPT_POINTS are kept: one for each epoch that the runner may be ahead of
the loop."""
CHECKED_BATCHES = 4
"""Batches between a snapshot and the position to return to; all of them are compared, because the snapshot is not
verified."""


@dataclass(frozen=True)
class EncodedPoint:
    """A restart point, encoded."""

    epoch: int
    total: int
    data: bytes


@dataclass(frozen=True)
class Return:
    """Plan to go back to a position in an epoch that the runner ran ahead of."""

    inside: EncodedPoint | None
    """Newest snapshot in the position's epoch, at least CHECKED_BATCHES before the position so that the replay compares
    batches."""
    epoch_start: EncodedPoint | None
    """Newest start of the position's epoch."""
    earlier: EncodedPoint | None
    """Newest start of an earlier epoch."""
    first: EncodedPoint | None
    """Newest earlier start to use if `epoch_start` is in doubt; that of the run's first epoch only for a position in
    the second."""
    there: EncodedPoint | None
    """Newest snapshot that was taken exactly at the position to return to."""
    probe: Target | None = None
    """Position that a replay from `epoch_start` must reach before `epoch_start` is trusted. Set if the loop took no
    batch of the epoch, because then no batch of the replay itself can be compared."""

    def ways(self, *, origin_doubted: bool) -> list[EncodedPoint]:
        """Return the restart points to try, the best first; empty if none is kept.

        The first is a snapshot before the position. The second is the epoch's start, which is wrong for a loader that
        begins an epoch in its first next(). The third is a point before the epoch. The last is a snapshot of exactly
        the position: a loader that was just loaded and has yielded nothing may not know that it is in the middle of
        an epoch, and would continue it when the next one is opened.
        """
        doubted = origin_doubted and self.inside is None
        order = [self.first if doubted else None, self.inside, self.epoch_start, self.earlier, self.there]
        return [way for way in order if way is not None]


class LocalRestartPoints:
    """The newest epoch starts and snapshots."""

    def __init__(self) -> None:
        self._origins: deque[EncodedPoint] = deque()
        self._snapshots: deque[EncodedPoint] = deque(maxlen=KEPT_POINTS)

    def add(self, point: EncodedPoint, *, epoch_start: bool) -> None:
        """Add a restart point, and drop the oldest. Several epochs are kept, because a slot with short or empty epochs
        may be many epochs ahead of the loop, which may abandon any of them."""
        (self._origins if epoch_start else self._snapshots).append(point)
        epoch_starts = self._origins
        while len(epoch_starts) > KEPT_POINTS and (
            len(epoch_starts) > KEPT_POINTS + EPOCHS_AHEAD
            or sum(len(known.data) for known in epoch_starts) > KEPT_BYTES
        ):
            epoch_starts.popleft()

    def forget_after(self, epoch: int) -> None:
        """Drop the restart points of later epochs."""
        for points in (self._origins, self._snapshots):
            while points and points[-1].epoch > epoch:
                points.pop()

    def plan_return(self, target: Target, *, exact: bool, following: int = 0) -> Return:
        """Plan the replay back to a position.

        Args:
            exact: the loader's snapshots need no verification.
            following: digest of the batch that came next in the same epoch; 0 if it is not known, or if the loader must
                not be tried.
        """
        epoch, total, left, snapshots = target.epoch, target.total, target.left, self._snapshots
        near = total - (1 if exact else CHECKED_BATCHES)
        epoch_start = _newest(point for point in self._origins if point.epoch == epoch and point.total <= total)
        earlier = [point for point in self._origins if point.epoch == 0 < epoch]
        earlier += [point for point in snapshots if point.epoch < epoch and point.total < left.get(point.epoch, total)]
        inside = _newest(point for point in snapshots if point.epoch == epoch and point.total <= near)
        probes = inside is None and epoch_start is not None and epoch_start.total == total and following
        return Return(
            inside,
            epoch_start,
            _newest(earlier),
            _newest(point for point in earlier if point.epoch or epoch == 1),
            _newest(point for point in snapshots if point.epoch == epoch and point.total == total),
            replace(target, total=total + 1, digest=following) if probes else None,
        )


def _newest(points: Iterable[EncodedPoint]) -> EncodedPoint | None:
    return next(reversed([*points]), None)
