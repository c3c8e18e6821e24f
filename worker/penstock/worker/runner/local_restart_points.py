"""What a runner itself remembers of its restart points, to go back to where the loop left an epoch."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.proto.state.position import EPOCHS_AHEAD

__all__ = ["EncodedPoint", "LocalRestartPoints", "UsablePoints"]

KEPT_POINTS = 16
"""Origins, and snapshots, that are remembered."""
KEPT_BYTES = 64 << 20
"""Of origins, up to which those of all epochs that it may be ahead of the loop are remembered."""
CHECKED_BATCHES = 4
"""Batches between a snapshot and the place to go back to, for all of them are compared on the way: nobody has proven
the snapshot."""


@dataclass(frozen=True)
class EncodedPoint:
    """A base, encoded."""

    epoch: int
    total: int
    data: bytes


@dataclass(frozen=True)
class UsablePoints:
    """Bases from which a place can be come to, each kind oldest first."""

    inside: list[EncodedPoint]
    """Snapshots before it in its epoch."""
    epoch_starts: list[EncodedPoint]
    """Origins of its epoch."""
    earlier: list[EncodedPoint]
    """Of epochs before."""
    there: list[EncodedPoint]
    """Snapshots of just this place."""

    def in_order(self, epoch: int, *, origins_doubted: bool) -> list[EncodedPoint]:
        """The best first.

        Best is a snapshot before the place: a loader that was just loaded and has yielded nothing may not know yet
        that it is in the middle of an epoch, and would go on with it when the next one is opened. Then the epoch's
        origin, which does not do for a loader that begins an epoch in its first next(); then from before the epoch, and
        last from just there.
        """
        first = [*self.inside[-1:], *self.epoch_starts[-1:]]
        if not self.inside and origins_doubted:
            first = [point for point in self.earlier if point.epoch or epoch == 1][-1:] + first
        return [*first, *self.earlier[-1:], *self.there[-1:]]


class LocalRestartPoints:
    """The newest origins and snapshots."""

    def __init__(self) -> None:
        self._origins: deque[EncodedPoint] = deque()
        self._snapshots: deque[EncodedPoint] = deque(maxlen=KEPT_POINTS)

    def add(self, point: EncodedPoint, *, epoch_start: bool) -> None:
        """Remember one, and forget the oldest. A slot whose epochs are short, or empty, is many of them ahead of the
        loop, which may leave any."""
        (self._origins if epoch_start else self._snapshots).append(point)
        epoch_starts = self._origins
        while len(epoch_starts) > KEPT_POINTS and (
            len(epoch_starts) > KEPT_POINTS + EPOCHS_AHEAD
            or sum(len(known.data) for known in epoch_starts) > KEPT_BYTES
        ):
            epoch_starts.popleft()

    def forget_after(self, epoch: int) -> None:
        """What was taken of later epochs never happened."""
        for points in (self._origins, self._snapshots):
            while points and points[-1].epoch > epoch:
                points.pop()

    def ways_to(self, epoch: int, total: int, left: Mapping[int, int], *, exact: bool) -> UsablePoints:
        """Ways to the place after batch `total` in an epoch. `left`: epoch -> batches when the loop left it. `exact`:
        the loader's snapshots need no proof."""
        snapshots = self._snapshots
        near = total - (1 if exact else CHECKED_BATCHES)
        earlier = [point for point in self._origins if point.epoch == 0 < epoch]
        earlier += [point for point in snapshots if point.epoch < epoch and point.total < left.get(point.epoch, total)]
        return UsablePoints(
            [point for point in snapshots if point.epoch == epoch and point.total <= near],
            [point for point in self._origins if point.epoch == epoch and point.total <= total],
            earlier,
            [point for point in snapshots if point.epoch == epoch and point.total == total],
        )
