"""Snapshots and epoch starts that a daemon keeps for a slot, encoded. A state may be requested for the newest
`retention_steps` steps, so the newest usable point before them and all later ones are kept. When memory is short, every
second snapshot is dropped, and replays take longer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from penstock.proto.state import position
from penstock.worker.loader.restart_plan import NEAR, Target, usable, worth_restoring

MAX_BYTES = 64 << 20
MAX_COUNT = 1024
"""Restart points of a slot above which snapshots are dropped."""
MOST = 16
MOST_COUNT = 2048
"""Multiple of MAX_BYTES, and number, above which epoch starts are dropped too: user code may open epochs without end,
and a new point is compared with all."""
HEADER = ("epoch", "delivered", "total", "samples", "epoch_start", "step")
"""Fields that a StoredSnapshot has in common with the coordinator's SnapshotHeader."""


@dataclass
class StoredSnapshot:
    """Restart point that the daemon keeps. delivered, total: batches in its epoch and in all; samples: in all. step:
    what `get_worker_state()` reported, 0 if not asked. durable: the coordinator has a copy, or none could be sent."""

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
    """True if this launch began here: each runner can make the point again without data."""
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
    """most_bytes: of all points together; the first and the last are kept in any case."""

    def __init__(self, most_bytes: int = MOST * MAX_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept: list[StoredSnapshot] = []
        self.bytes = 0

    def __iter__(self) -> Iterator[StoredSnapshot]:
        return iter(self._kept)

    def __reversed__(self) -> Iterator[StoredSnapshot]:
        return reversed(self._kept)

    def add(self, point: StoredSnapshot, oldest_wanted: int, oldest_epoch: int = position.MOST) -> None:
        """Add a point, in place of one at the same position (a later runner knows of more skipped batches), and drop
        what is not needed or does not fit. oldest_wanted, oldest_epoch: earliest position that may be requested, in
        batches over all epochs and epochs, as a slot without batches stays at batch 0."""
        # by the total first, which is quick: a runner may send a thousand points a second
        points = [kept for kept in self._kept if kept.total != point.total or kept.position != point.position]
        points.append(point)
        before = [kept for kept in points if kept.total <= oldest_wanted and kept.epoch <= oldest_epoch]
        starts = [kept for kept in before if kept.epoch_start]
        far = [kept for kept in before if kept.total <= oldest_wanted - NEAR]
        unneeded = {id(kept) for kept in before} - {id(kept) for kept in (*before[-1:], *starts[-1:], *far[-1:])}
        self._keep_only([kept for kept in points if id(kept) not in unneeded])
        if self.bytes > MAX_BYTES or len(self._kept) > MAX_COUNT:
            self._thin_out([kept for kept in self._kept[1:-1] if not kept.epoch_start])
        while (self.bytes > self._most_bytes or len(self._kept) > MOST_COUNT) and len(self._kept) > 2:
            self._thin_out(self._kept[1:-1])

    def forget_after(self, epoch: int, total: int) -> None:
        """Drop points after batch `total` in epoch `epoch`, where the training loop abandoned it."""
        self._keep_only(
            [kept for kept in self._kept if kept.epoch < epoch or (kept.epoch == epoch and kept.total <= total)]
        )

    def exactly(self, epoch: int, delivered: int, total: int, step: int) -> StoredSnapshot | None:
        for kept in reversed(self._kept):
            if (kept.epoch, kept.delivered, kept.total) == (epoch, delivered, total) and kept.step in (0, step):
                return kept
        return None

    def nearest(
        self, epoch: int, total: int, *, abandoned: Mapping[int, int] = MappingProxyType({}), below: int = position.MOST
    ) -> StoredSnapshot | None:
        """Return the point with the shortest replay to the position. below: it must lie before this batch."""
        candidates = usable([kept for kept in self._kept if kept.total < below], Target(epoch, total, abandoned))
        return max(candidates, key=lambda kept: (kept.epoch, kept.total, kept.epoch_start), default=None)

    def within(
        self, epoch: int, total: int, began: int, spent_s: float | None, replay_s: float
    ) -> StoredSnapshot | None:
        """Return a pure loader's snapshot worth restoring (`worth_restoring`), or its epoch's beginning, if kept."""
        inside = [kept for kept in self._kept if kept.epoch == epoch and began <= kept.total <= total]
        beginning = next((kept for kept in inside if kept.total == began), None)
        if beginning is None and total == began and self._kept:
            return self._kept[-1]  # the beginning of an epoch needs no data
        return worth_restoring(inside, total, spent_s, replay_s) or beginning

    def _thin_out(self, points: list[StoredSnapshot]) -> None:
        dropped = {id(point) for point in points[::2]}
        self._keep_only([kept for kept in self._kept if id(kept) not in dropped])

    def _keep_only(self, kept: list[StoredSnapshot]) -> None:
        self._kept = kept
        self.bytes = sum(len(point.data) for point in kept)
