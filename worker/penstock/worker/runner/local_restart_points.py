"""What a runner itself remembers of its restart points, and its plan to go back to where the loop left an epoch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from penstock.proto.state.position import PASSES_AHEAD
from penstock.worker.loader.restart_plan import Target

__all__ = ["Known", "OwnBases", "Return"]

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
class Return:
    """How to go back to a place of an epoch that the runner ran ahead of."""

    inside: Known | None
    """The newest snapshot before it in its epoch, with batches between that are compared."""
    origin: Known | None
    """The newest start of its epoch."""
    earlier: Known | None
    """The newest of the epochs before."""
    first: Known | None
    """The same, where its epoch's start is in doubt: of the run's first epoch only for a place in the second."""
    there: Known | None
    """The newest snapshot of just this place."""
    probe: Target | None = None
    """To go to from `origin` first: nothing was taken of the epoch, so no other batch would show that a loader that is
    restored there is elsewhere. `origin` is in doubt if it does not lead there."""

    def ways(self, *, origin_doubted: bool) -> list[Known]:
        """Return the ways, the best first; empty if there is none.

        Best is a snapshot before the place: a loader that was just loaded and has yielded nothing may not know yet
        that it is in the middle of a pass, and would go on with it when the next one is opened. Then the pass's origin,
        which does not do for a loader that begins a pass in its first next(); then from before the pass, and last from
        just there.
        """
        doubted = origin_doubted and self.inside is None
        order = [self.first if doubted else None, self.inside, self.origin, self.earlier, self.there]
        return [way for way in order if way is not None]


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

    def plan_return(self, target: Target, *, exact: bool, following: int = 0) -> Return:
        """Plan the way back to a place.

        Args:
            exact: the loader's snapshots need no proof.
            following: digest of the batch that came next there, of the same epoch; 0 if it is not known, or the loader
                is not to be tried.
        """
        epoch, total, left, snapshots = target.epoch, target.total, target.left, self._snapshots
        near = total - (1 if exact else CHECKED_BATCHES)
        origin = _newest(base for base in self._origins if base.epoch == epoch and base.total <= total)
        earlier = [base for base in self._origins if base.epoch == 0 < epoch]
        earlier += [base for base in snapshots if base.epoch < epoch and base.total < left.get(base.epoch, total)]
        inside = _newest(base for base in snapshots if base.epoch == epoch and base.total <= near)
        probes = inside is None and origin is not None and origin.total == total and following
        return Return(
            inside,
            origin,
            _newest(earlier),
            _newest(base for base in earlier if base.epoch or epoch == 1),
            _newest(base for base in snapshots if base.epoch == epoch and base.total == total),
            replace(target, total=total + 1, digest=following) if probes else None,
        )


def _newest(bases: Iterable[Known]) -> Known | None:
    return next(reversed([*bases]), None)
