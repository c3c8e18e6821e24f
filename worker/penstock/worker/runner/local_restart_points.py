"""What a runner itself remembers of its restart points, to go back to where the loop left a pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.proto.state.position import PASSES_AHEAD

__all__ = ["Known", "OwnBases", "Ways"]

KEPT_BASES = 16
"""Origins, and snapshots, that are remembered."""
KEPT_BYTES = 64 << 20
"""Of origins, up to which those of all passes that it may be ahead of the loop are remembered."""
CHECKED_BATCHES = 4
"""Batches between a snapshot and the place to go back to, for all of them are compared on the way: nobody has proven
the snapshot."""


@dataclass(frozen=True)
class Known:
    """A base, encoded."""

    epoch: int
    total: int
    data: bytes


@dataclass(frozen=True)
class Ways:
    """Bases from which a place can be come to, each kind oldest first."""

    inside: list[Known]
    """Snapshots before it in its pass."""
    origins: list[Known]
    """Origins of its pass."""
    earlier: list[Known]
    """Of passes before."""
    there: list[Known]
    """Snapshots of just this place."""

    def in_order(self, epoch: int, *, origins_doubted: bool) -> list[Known]:
        """The best first.

        Best is a snapshot before the place: a loader that was just loaded and has yielded nothing may not know yet
        that it is in the middle of a pass, and would go on with it when the next one is opened. Then the pass's origin,
        which does not do for a loader that begins a pass in its first next(); then from before the pass, and last from
        just there.
        """
        first = [*self.inside[-1:], *self.origins[-1:]]
        if not self.inside and origins_doubted:
            first = [base for base in self.earlier if base.epoch or epoch == 1][-1:] + first
        return [*first, *self.earlier[-1:], *self.there[-1:]]


class OwnBases:
    """The newest origins and snapshots."""

    def __init__(self) -> None:
        self._origins: deque[Known] = deque()
        self._snapshots: deque[Known] = deque(maxlen=KEPT_BASES)

    def add(self, base: Known, *, origin: bool) -> None:
        """Remember one, and forget the oldest. A slot whose passes are short, or empty, is many of them ahead of the
        loop, which may leave any."""
        (self._origins if origin else self._snapshots).append(base)
        origins = self._origins
        while len(origins) > KEPT_BASES and (
            len(origins) > KEPT_BASES + PASSES_AHEAD or sum(len(known.data) for known in origins) > KEPT_BYTES
        ):
            origins.popleft()

    def forget_after(self, epoch: int) -> None:
        """What was taken of later passes never happened."""
        for bases in (self._origins, self._snapshots):
            while bases and bases[-1].epoch > epoch:
                bases.pop()

    def ways_to(self, epoch: int, total: int, left: Mapping[int, int], *, exact: bool) -> Ways:
        """Ways to the place after batch `total` in a pass. `left`: epoch -> batches when the loop left it. `exact`: the
        loader's snapshots need no proof."""
        snapshots = self._snapshots
        near = total - (1 if exact else CHECKED_BATCHES)
        earlier = [base for base in self._origins if base.epoch == 0 < epoch]
        earlier += [base for base in snapshots if base.epoch < epoch and base.total < left.get(base.epoch, total)]
        return Ways(
            [base for base in snapshots if base.epoch == epoch and base.total <= near],
            [base for base in self._origins if base.epoch == epoch and base.total <= total],
            earlier,
            [base for base in snapshots if base.epoch == epoch and base.total == total],
        )
