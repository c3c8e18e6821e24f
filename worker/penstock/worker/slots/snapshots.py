"""Snapshots and epoch starts that a daemon keeps for a slot, as encoded bytes.

A state may be requested at any step of the retention window (the newest `retention_steps` training steps). So the
newest usable restart point at or before the window's oldest step is kept, and all later ones while memory suffices.
When memory is short, every second snapshot is dropped. A state between two remaining snapshots then takes a longer
replay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from penstock.proto.state import position
from penstock.worker.loader.restart_plan import NEAR, Target, usable, worth_restoring

MAX_BYTES = 64 << 20
MAX_COUNT = 1024
"""Number of a slot's restart points above which snapshots are dropped."""
MOST = 16
"""Multiple of MAX_BYTES and MAX_COUNT above which epoch starts are dropped too: user code may open epochs without
end."""


@dataclass
class StoredSnapshot:
    """Restart point that the daemon keeps: the loader's state within an epoch (a snapshot) or at the start of an epoch.

    delivered, total: numbers of the slot's batches up to there, in its epoch and in all. samples: number of samples in
    all of them. step: training step of the box that `get_worker_state()` reported to the loader's state_dict(); 0 if it
    did not ask. data: the encoded restart point. durable: True if the coordinator keeps a copy, or if a copy was
    refused or could not be sent.
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
    begins: bool = False
    """True if this launch of the job began here: each runner of the slot can make the restart point again without its
    data."""
    spent_s: float = 0.0

    @property
    def began(self) -> int:
        return self.total - self.delivered

    @property
    def is_epoch_start(self) -> bool:
        return self.epoch_start

    @property
    def position(self) -> tuple[int, int, int, bool, int]:
        """A new restart point replaces an earlier one for which these are the same."""
        return self.epoch, self.delivered, self.total, self.epoch_start, self.step


class SlotSnapshots:
    def __init__(self) -> None:
        self._kept: list[StoredSnapshot] = []
        self._bytes = 0

    def __iter__(self) -> Iterator[StoredSnapshot]:
        return iter(self._kept)

    def __reversed__(self) -> Iterator[StoredSnapshot]:
        return reversed(self._kept)

    def add(self, point: StoredSnapshot, oldest_wanted: int, oldest_epoch: int = position.MOST) -> None:
        """Add a restart point, and drop those that are not needed any more or do not fit into memory. Replace one at
        the same position: the new one may come from a later runner, which knows of more skipped batches.

        oldest_wanted, oldest_epoch: earliest position for which a state may still be requested: number of the slot's
        batches over all epochs, and number of the epoch. The epoch matters for a slot without batches, where the first
        number is always 0.
        """
        self._keep_only([*(kept for kept in self._kept if kept.position != point.position), point])
        before = [kept for kept in self._kept if kept.total <= oldest_wanted and kept.epoch <= oldest_epoch]
        starts = [kept for kept in before if kept.epoch_start]
        far = [kept for kept in before if kept.total <= oldest_wanted - NEAR]
        needed = {id(kept) for kept in (*before[-1:], *starts[-1:], *far[-1:])}
        self._keep_only([kept for kept in self._kept if kept not in before or id(kept) in needed])
        for share, last in ((1, False), (MOST, True)):
            if self._bytes > share * MAX_BYTES or len(self._kept) > share * MAX_COUNT:
                inner = [kept for kept in self._kept[1:-1] if last or not kept.epoch_start]
                dropped = {id(kept) for kept in inner[::2]}
                self._keep_only([kept for kept in self._kept if id(kept) not in dropped])

    def forget_after(self, epoch: int, total: int) -> None:
        """Drop the restart points after the slot's batch `total` in epoch `epoch`, where the training loop abandoned
        it."""
        self._keep_only(
            [kept for kept in self._kept if kept.epoch < epoch or (kept.epoch == epoch and kept.total <= total)]
        )

    def exactly(self, epoch: int, delivered: int, total: int, step: int) -> StoredSnapshot | None:
        """Return the newest restart point at exactly this position and for this training step; None if there is
        none."""
        for kept in reversed(self._kept):
            if (kept.epoch, kept.delivered, kept.total) == (epoch, delivered, total) and kept.step in (0, step):
                return kept
        return None

    def nearest(
        self, epoch: int, total: int, *, abandoned: Mapping[int, int] = MappingProxyType({}), below: int = position.MOST
    ) -> StoredSnapshot | None:
        """Return the restart point from which the replay to the position is shortest; None if none leads there.

        abandoned: as in Target. below: it must lie before the slot's batch of this number.
        """
        candidates = usable([kept for kept in self._kept if kept.total < below], Target(epoch, total, abandoned))
        return max(candidates, key=lambda kept: (kept.epoch, kept.total, kept.epoch_start), default=None)

    def within(
        self, epoch: int, total: int, began: int, spent_s: float | None, replay_s: float
    ) -> StoredSnapshot | None:
        """Return the restart point of a pure loader for a position in an epoch: a snapshot that is worth restoring, or
        the epoch's beginning; None if neither is kept. The arguments are those of `worth_restoring`."""
        inside = [kept for kept in self._kept if kept.epoch == epoch and began <= kept.total <= total]
        beginning = next((kept for kept in inside if kept.total == began), None)
        if beginning is None and total == began and self._kept:
            return self._kept[-1]  # the beginning of an epoch needs no data
        return worth_restoring(inside, total, spent_s, replay_s) or beginning

    def _keep_only(self, kept: list[StoredSnapshot]) -> None:
        self._kept = kept
        self._bytes = sum(len(point.data) for point in kept)
