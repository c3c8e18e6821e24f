"""A runner's own copies of its newest restart points (states of its loader with their positions), and its plan to
return to the batch after which the training loop abandoned an epoch (by `break`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from penstock.proto.state.position import EPOCHS_AHEAD
from penstock.worker.loader.restart_plan import Target

__all__ = ["EncodedPoint", "LocalRestartPoints", "Return"]

KEPT_POINTS = 16
"""Number of newest epoch starts that are always kept, and largest number of snapshots that are kept."""
KEPT_BYTES = 64 << 20
"""Total size in bytes up to which a runner keeps more than KEPT_POINTS epoch starts: one more for each epoch that it
may be ahead of the training loop."""
CHECKED_BATCHES = 4
"""Smallest number of batches between a snapshot and the position to which the runner returns from it. The snapshot is
not verified, so these batches are replayed and compared."""


@dataclass(frozen=True)
class EncodedPoint:
    """Encoded restart point, with its epoch and `total`, the number of the slot's batches before it over all epochs."""

    epoch: int
    total: int
    data: bytes


@dataclass(frozen=True)
class Return:
    """Plan by which a runner returns to the position where the training loop abandoned an epoch, after it has made
    batches beyond that position. The attributes are the restart points that may lead there; None = no such point is
    kept."""

    inside: EncodedPoint | None
    """Newest snapshot in the position's epoch that lies at least CHECKED_BATCHES batches before the position, so that
    the replay compares batches."""
    epoch_start: EncodedPoint | None
    """Newest start of the position's epoch that lies at or before the position."""
    earlier: EncodedPoint | None
    """Newest restart point before the position's epoch: a snapshot, or the start of the run's first epoch."""
    first: EncodedPoint | None
    """Newest restart point before the position's epoch, used if `epoch_start` has failed its test. A restart point in
    the run's first epoch is used only if the position is in the second epoch."""
    there: EncodedPoint | None
    """Newest snapshot taken exactly at the position to return to."""
    probe: Target | None = None
    """Position to which a replay from `epoch_start` must lead before `epoch_start` is trusted; None: `epoch_start` is
    not tested. Set if the training loop took no batch of the epoch: the return itself then replays no batch that could
    be compared."""

    def ways(self, *, origin_doubted: bool) -> list[EncodedPoint]:
        """Return the restart points to try, the best first; empty if none is kept.

        The first is a snapshot before the position. The second is the epoch's start, which is wrong for a loader that
        begins an epoch in its first next(). The third is a restart point before the epoch. The last is a snapshot of
        exactly the position: a loader whose state was loaded there, and which has yielded nothing since, may not know
        that it is in the middle of an epoch, and would continue this epoch when the next one is opened.

        origin_doubted: True if the epoch's start has failed its test (`probe`). Then a restart point before the epoch
        is tried first.
        """
        doubted = origin_doubted and self.inside is None
        order = [self.first if doubted else None, self.inside, self.epoch_start, self.earlier, self.there]
        return [way for way in order if way is not None]


class LocalRestartPoints:
    """A runner's own copies of its loader's newest epoch starts and snapshots."""

    def __init__(self) -> None:
        self._origins: deque[EncodedPoint] = deque()
        self._snapshots: deque[EncodedPoint] = deque(maxlen=KEPT_POINTS)

    def add(self, point: EncodedPoint, *, epoch_start: bool) -> None:
        """Add a restart point, and drop the oldest ones above the limits. Starts of several epochs are kept: a slot
        with short or empty epochs may be many epochs ahead of the training loop, which may abandon each of these."""
        (self._origins if epoch_start else self._snapshots).append(point)
        epoch_starts = self._origins
        while len(epoch_starts) > KEPT_POINTS and (
            len(epoch_starts) > KEPT_POINTS + EPOCHS_AHEAD
            or sum(len(known.data) for known in epoch_starts) > KEPT_BYTES
        ):
            epoch_starts.popleft()

    def forget_after(self, epoch: int) -> None:
        """Drop the restart points of epochs after `epoch`."""
        for points in (self._origins, self._snapshots):
            while points and points[-1].epoch > epoch:
                points.pop()

    def plan_return(self, target: Target, *, exact: bool, following: int = 0) -> Return:
        """Plan how the runner returns to the position `target`, where the training loop abandoned an epoch.

        Args:
            exact: True if the loader's snapshots need no verification.
            following: digest of the batch after the position in the same epoch; 0 if the digest is not known, or if the
                epoch start must not be tested.
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
