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
"""Number of newest epoch starts that are kept whatever their size, and largest number of snapshots that are kept."""
KEPT_BYTES = 64 << 20
"""Largest total size of the kept epoch starts, in bytes, if there are more than KEPT_POINTS. Below this size
KEPT_POINTS + EPOCHS_AHEAD epoch starts are kept, because the runner may be EPOCHS_AHEAD epochs ahead of the loop."""
CHECKED_BATCHES = 4
"""Smallest number of batches between a snapshot and the position to which the runner returns from it. The snapshot is
not verified, so these batches are replayed and compared. For a loader that declares `exact_states` one batch is
enough."""


@dataclass(frozen=True)
class EncodedPoint:
    """Encoded restart point, with the number of its epoch, and with `total`, the number of the slot's batches before it
    over all epochs."""

    epoch: int
    total: int
    data: bytes


@dataclass(frozen=True)
class Return:
    """Plan by which a runner returns to the position where the training loop abandoned an epoch (*the position* below).
    The runner may have made batches beyond that position. Each attribute but `probe` is a restart point that may lead
    there; None if no such restart point is kept."""

    inside: EncodedPoint | None
    """Newest snapshot in the position's epoch that lies at least CHECKED_BATCHES batches before the position (one for
    exact states), so that the replay makes batches that can be compared."""
    epoch_start: EncodedPoint | None
    """Newest start of the position's epoch that lies at or before the position."""
    earlier: EncodedPoint | None
    """Newest snapshot in an epoch before the position's. If none is kept: the start of the run's first epoch."""
    first: EncodedPoint | None
    """Restart point to try first if `epoch_start` has failed its test. It is the same as `earlier`, except that a
    restart point in the run's first epoch is used only if the position is in the second epoch."""
    there: EncodedPoint | None
    """Newest snapshot taken exactly at the position to return to."""
    probe: Target | None = None
    """Test of `epoch_start`: the batch to which a replay from there must lead; None = no test. There is a test if the
    position is the start of its epoch: the return itself then replays no batch that could be compared."""

    def ways(self, *, epoch_start_failed: bool) -> list[EncodedPoint]:
        """Return the restart points to try, the best first; empty if none is kept.

        The first is `inside`, a snapshot before the position. The second is the epoch's start, which is wrong for a
        loader that begins an epoch in its first next(). The third is `earlier`, a restart point before the epoch. The
        last is `there`, a snapshot of exactly the position. It is last because a loader whose state was loaded there,
        and which has yielded nothing since, may continue this epoch when the next one is opened.

        epoch_start_failed: True if the epoch's start has failed its test (`probe`). Then `first`, a restart point
        before the epoch, comes first.
        """
        doubted = epoch_start_failed and self.inside is None
        order = [self.first if doubted else None, self.inside, self.epoch_start, self.earlier, self.there]
        return [way for way in order if way is not None]


class LocalRestartPoints:
    """A runner's own copies of its loader's newest epoch starts and snapshots."""

    def __init__(self) -> None:
        self._epoch_starts: deque[EncodedPoint] = deque()
        self._snapshots: deque[EncodedPoint] = deque(maxlen=KEPT_POINTS)

    def add(self, point: EncodedPoint, *, epoch_start: bool) -> None:
        """Add a restart point, and drop the oldest ones above the limits. Starts of several epochs are kept, because a
        slot with short or empty epochs may be many epochs ahead of the training loop, and the loop may abandon any of
        these epochs."""
        (self._epoch_starts if epoch_start else self._snapshots).append(point)
        epoch_starts = self._epoch_starts
        while len(epoch_starts) > KEPT_POINTS and (
            len(epoch_starts) > KEPT_POINTS + EPOCHS_AHEAD
            or sum(len(known.data) for known in epoch_starts) > KEPT_BYTES
        ):
            epoch_starts.popleft()

    def forget_after(self, epoch: int) -> None:
        """Drop the restart points of epochs after `epoch`."""
        for points in (self._epoch_starts, self._snapshots):
            while points and points[-1].epoch > epoch:
                points.pop()

    def plan_return(self, target: Target, *, exact: bool, following: int = 0) -> Return:
        """Return the plan by which the runner returns to the position `target`, where the training loop abandoned an
        epoch.

        Args:
            exact: True if the loader's snapshots need no verification.
            following: digest of the batch after the position in the same epoch, with which the epoch start is tested; 0
                if the digest is not known or the epoch start must not be tested.
        """
        epoch, total, abandoned, snapshots = target.epoch, target.total, target.abandoned, self._snapshots
        near = total - (1 if exact else CHECKED_BATCHES)
        epoch_start = _newest(point for point in self._epoch_starts if point.epoch == epoch and point.total <= total)
        earlier = [point for point in self._epoch_starts if point.epoch == 0 < epoch]
        earlier += [
            point for point in snapshots if point.epoch < epoch and point.total < abandoned.get(point.epoch, total)
        ]
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
