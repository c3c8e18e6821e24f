"""What a daemon keeps of a slot's snapshots and origins: pure bookkeeping over opaque bytes.

A state may be asked for at any step of the retention window, so the newest base at or before its far edge that a loader
may be restored from stays, and everything after that as long as there is room. When room is short, every other snapshot
goes: a state between two of them is then a longer replay, not an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from penstock.proto.state import position
from penstock.worker.loader.restart_plan import Target, usable

__all__ = ["SlotSnapshots", "StoredSnapshot"]

MAX_BYTES = 64 << 20
MAX_COUNT = 1024
MOST = 16
"""Times these, beyond which origins go too: they are for a child whose user code sends them without end."""


@dataclass
class StoredSnapshot:
    """One base. `step` is the box's step that its state speaks of, 0 if the state does not depend on it."""

    epoch: int
    delivered: int
    total: int
    samples: int
    epoch_start: bool
    step: int
    data: bytes
    durable: bool = False
    inherited: bool = False
    """From the slot's runner before this one."""
    proven: bool = False
    """It leads to the batches that were delivered; needs no proof, or was proven. See proofs.py."""
    refuted: bool = False
    """It does not, or nobody could find out."""
    lapses: int = 0
    """Proofs of it that came to no verdict."""
    generators: int = 0
    """Hash of the random generators after the next batch, 0 if it is not known: for the proof."""
    start: bool = False
    """The stream of this runner comes from there."""
    begins: bool = False
    """The attempt began there: any runner of the slot can come there as the first one did."""
    compared: int = 0
    """Batches that its proof compared."""
    crossed: bool = False
    """It was looked at how the loader gets over the end of the epoch from here."""
    wanted: bool = False
    """Taken because a checkpoint at this step was announced."""

    @property
    def began(self) -> int:
        """Batches in all when its epoch was opened."""
        return self.total - self.delivered

    @property
    def is_epoch_start(self) -> bool:
        return self.epoch_start

    @property
    def position(self) -> tuple[int, int, int, bool, int]:
        """What it describes."""
        return self.epoch, self.delivered, self.total, self.epoch_start, self.step


class SlotSnapshots:
    """The bases of one slot and generation, in the order they were taken."""

    def __init__(self, usable: Callable[[StoredSnapshot], bool] = lambda kept: kept.proven) -> None:
        """`usable`: whether a loader may be restored from a base."""
        self._kept: list[StoredSnapshot] = []
        self._bytes = 0
        self._usable = usable

    def __iter__(self) -> Iterator[StoredSnapshot]:
        return iter(self._kept)

    def __reversed__(self) -> Iterator[StoredSnapshot]:
        return reversed(self._kept)

    def add(self, point: StoredSnapshot, oldest_wanted: int, oldest_epoch: int = position.MOST) -> None:
        """Keep a base, instead of one that says the same: a runner that took over may know of batches to leave out.
        `oldest_wanted`: the smallest total that may still be asked for; `oldest_epoch`: the first epoch. A slot without
        batches has one total in all epochs, and makes their origins as far ahead of the loop as it may."""
        self._keep_only([*(kept for kept in self._kept if kept.position != point.position), point])
        before = [kept for kept in self._kept if kept.total <= oldest_wanted and kept.epoch <= oldest_epoch]
        usable = [kept for kept in before if self._usable(kept)]
        history = {id(kept) for kept in before} - {id(kept) for kept in (*before[-1:], *usable[-1:])}
        self._keep_only([kept for kept in self._kept if id(kept) not in history])
        for share, last in ((1, False), (MOST, True)):
            if self._bytes > share * MAX_BYTES or len(self._kept) > share * MAX_COUNT:
                inner = [kept for kept in self._kept[1:-1] if last or not (kept.epoch_start or kept.proven)]
                dropped = {id(kept) for kept in inner[::2]}
                self._keep_only([kept for kept in self._kept if id(kept) not in dropped])

    def forget_after(self, epoch: int, total: int) -> None:
        """The loop left this epoch after `total`: what was taken of it later, or of an epoch after it, never
        happened."""
        self._keep_only(
            [kept for kept in self._kept if kept.epoch < epoch or (kept.epoch == epoch and kept.total <= total)]
        )

    def exactly(self, epoch: int, delivered: int, total: int, step: int) -> StoredSnapshot | None:
        """A base of just this place, whose state speaks of this step. Newest first: an origin of the place counts."""
        for kept in reversed(self._kept):
            if (kept.epoch, kept.delivered, kept.total) == (epoch, delivered, total) and kept.step in (0, step):
                return kept
        return None

    def nearest(
        self, epoch: int, total: int, *, left: Mapping[int, int] = MappingProxyType({})
    ) -> StoredSnapshot | None:
        """The base to replay from: the latest usable one at or before a place, in the latest pass.

        `left`: epoch -> total where the loop left that epoch. See `usable` in restart_plan.py, which a runner asks too.
        """
        found = usable((kept for kept in self._kept if self._usable(kept)), Target(epoch, total, left))
        return max(found, key=lambda kept: (kept.epoch, kept.total, kept.epoch_start), default=None)

    def _keep_only(self, kept: list[StoredSnapshot]) -> None:
        self._kept = kept
        self._bytes = sum(len(point.data) for point in kept)
