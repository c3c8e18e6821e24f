"""Snapshots and epoch starts that a daemon keeps for a slot, as encoded bytes.

A state may be requested at any step of the retention window (the newest `retention_steps` training steps). So the
newest usable restart point at or before the window's oldest step is kept, and all later ones while memory suffices.
When memory is short, every second snapshot that is not verified is dropped. A state between two remaining snapshots
then takes a longer replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from penstock.proto.state import position
from penstock.worker.loader.restart_plan import Target, usable

__all__ = ["SlotSnapshots", "StoredSnapshot"]

MAX_BYTES = 64 << 20
"""Total size of a slot's restart points above which snapshots that are not verified are dropped, in bytes."""
MAX_COUNT = 1024
"""Number of a slot's restart points above which snapshots that are not verified are dropped."""
MOST = 16
"""Multiple of MAX_BYTES and MAX_COUNT above which epoch starts and verified snapshots are dropped too, because user
code may open epochs without end."""


@dataclass
class StoredSnapshot:
    """Restart point that the daemon keeps: the loader's state within an epoch (a snapshot) or at the start of an epoch.

    epoch, delivered, total: position, as the epoch's number from 0, the slot's batches in this epoch, and its batches
    in all epochs. samples: number of samples in the slot's batches of all epochs. step: training step of the box
    (data-parallel rank) that `get_worker_state()` reported to the loader's state_dict(); 0 if it did not ask. data: the
    encoded restart point. durable: True if the coordinator keeps a copy, or if a copy was refused or could not be sent.
    """

    epoch: int
    delivered: int
    total: int
    samples: int
    epoch_start: bool
    step: int
    data: bytes
    durable: bool = False
    inherited: bool = False
    """True if an earlier runner of the slot made this restart point."""
    verified: bool = False
    """True if this restart point leads to the delivered batches, as a verification has shown, or needs no verification.
    See verification.py."""
    refuted: bool = False
    """True if this restart point does not lead to the delivered batches, or if its verifications gave no result."""
    lapses: int = 0
    """Number of verifications of this restart point that ended without a result, for example because the helper process
    died."""
    generators: int = 0
    """Hash that the random generators must have after the first batch that follows this restart point; 0 if not known.
    A verification compares it."""
    start: bool = False
    """True if the runner's stream begins at this restart point."""
    begins: bool = False
    """True if this launch of the job began at this restart point. Each runner of the slot can then make the restart
    point again without its data."""
    compared: int = 0
    """Number of batches that the verification of this restart point has compared."""
    crossed: bool = False
    """True if a verification of this restart point had a result. The restart point is then not used again to find the
    loader's crossing (its way into the next epoch)."""
    wanted: bool = False
    """True if this snapshot was taken because a checkpoint at its step was announced."""

    @property
    def began(self) -> int:
        """Number of batches that the slot had made, over all epochs, when the restart point's epoch began."""
        return self.total - self.delivered

    @property
    def is_epoch_start(self) -> bool:
        return self.epoch_start

    @property
    def position(self) -> tuple[int, int, int, bool, int]:
        """(epoch, delivered, total, epoch_start, step) of the restart point. A new restart point replaces an earlier
        one for which these are the same."""
        return self.epoch, self.delivered, self.total, self.epoch_start, self.step


class SlotSnapshots:
    """Restart points of one generation of a slot, in the order in which they were taken."""

    def __init__(self, usable: Callable[[StoredSnapshot], bool] = lambda kept: kept.verified) -> None:
        """Start empty.

        usable: returns True if a loader may be restored from the restart point.
        """
        self._kept: list[StoredSnapshot] = []
        self._bytes = 0
        self._usable = usable

    def __iter__(self) -> Iterator[StoredSnapshot]:
        return iter(self._kept)

    def __reversed__(self) -> Iterator[StoredSnapshot]:
        return reversed(self._kept)

    def add(self, point: StoredSnapshot, oldest_wanted: int, oldest_epoch: int = position.MOST) -> None:
        """Add a restart point, and drop restart points that are not needed any more or do not fit into memory. Replace
        a restart point at the same position, because the new one may come from a later runner, which knows of more
        skipped batches.

        oldest_wanted, oldest_epoch: earliest position for which a state may still be requested: number of the slot's
        batches over all epochs, and number of the epoch. The epoch matters for a slot without batches, where the first
        number is always 0.
        """
        self._keep_only([*(kept for kept in self._kept if kept.position != point.position), point])
        before = [kept for kept in self._kept if kept.total <= oldest_wanted and kept.epoch <= oldest_epoch]
        usable = [kept for kept in before if self._usable(kept)]
        history = {id(kept) for kept in before} - {id(kept) for kept in (*before[-1:], *usable[-1:])}
        self._keep_only([kept for kept in self._kept if id(kept) not in history])
        for share, last in ((1, False), (MOST, True)):
            if self._bytes > share * MAX_BYTES or len(self._kept) > share * MAX_COUNT:
                inner = [kept for kept in self._kept[1:-1] if last or not (kept.epoch_start or kept.verified)]
                dropped = {id(kept) for kept in inner[::2]}
                self._keep_only([kept for kept in self._kept if id(kept) not in dropped])

    def forget_after(self, epoch: int, total: int) -> None:
        """Drop the restart points after the position where the training loop abandoned epoch `epoch`: those after the
        slot's batch `total` in this epoch, and those in later epochs."""
        self._keep_only(
            [kept for kept in self._kept if kept.epoch < epoch or (kept.epoch == epoch and kept.total <= total)]
        )

    def exactly(self, epoch: int, delivered: int, total: int, step: int) -> StoredSnapshot | None:
        """Return the newest restart point (snapshot or epoch start) at exactly this position and for this training
        step; None if the slot has no such point."""
        for kept in reversed(self._kept):
            if (kept.epoch, kept.delivered, kept.total) == (epoch, delivered, total) and kept.step in (0, step):
                return kept
        return None

    def nearest(
        self, epoch: int, total: int, *, abandoned: Mapping[int, int] = MappingProxyType({})
    ) -> StoredSnapshot | None:
        """Return the restart point from which the replay to the position is shortest, among those from which a loader
        may be restored; None if no such point leads there. A runner chooses by the same function, `usable` in
        restart_plan.py.

        epoch, total: the position: number of the epoch, and number of the slot's batches over all epochs. abandoned:
        abandoned epochs, as number of the epoch -> number of the slot's last batch in it, counted over all epochs.
        """
        found = usable((kept for kept in self._kept if self._usable(kept)), Target(epoch, total, abandoned))
        return max(found, key=lambda kept: (kept.epoch, kept.total, kept.epoch_start), default=None)

    def _keep_only(self, kept: list[StoredSnapshot]) -> None:
        self._kept = kept
        self._bytes = sum(len(point.data) for point in kept)
