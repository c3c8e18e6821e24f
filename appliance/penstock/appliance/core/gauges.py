"""Measurements of slots and boxes: the lead of runners over the loop in batches, and the slots that loops wait for. No
measurement is in the journal.

The slot that a loop waits for at one moment proves nothing: the loop takes the slots in turn, and waits for each one,
if only for a microsecond. So the box reports its total wait for each slot. A gauge keeps these seconds with a decay by
half every HALF_S seconds. A slot's share of the total shows how much the slot has held up the box lately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

HALF_S = 15.0
"""Half-life of a measured wait, in seconds. Shares of waits are therefore those of about the last minute."""

QUEUE_HALF_S = 5.0
"""Half-life of the mean number of ready batches, in seconds; short because this number changes within seconds."""
AHEAD = 2
"""Smallest number of ready batches with which a slot counts as ahead. A single batch does not count, because the loop
may have taken it without the runner having noticed."""


@dataclass
class SlotGauge:
    """Measurements of a slot: batches that are ready, snapshots, recovery."""

    queued: int = 0
    """Number of batches produced and not yet delivered, as of the last heartbeat. The number may be too high by one,
    because a runner that is inside user code does not notice that its last batch was taken."""
    mean_queued: float = 0.0
    """Mean of `queued` over time, with a half-life of QUEUE_HALF_S."""
    saved_at: float = 0.0
    """Monotonic time when the slot's newest durable snapshot was stored; 0 = none since the coordinator's start."""
    lost_at: float = 0.0
    """Monotonic time when the slot lost its runner; 0 = no loss, or the new runner has caught up with the loop."""
    behind: bool = False
    """True if the slot's runner replaces an earlier one and has not yet made the batch that the loop needs next."""
    _at: float = 0.0

    def report(self, now: float, produced: int, delivered: int) -> None:
        """Record the newest totals of the slot: batches that its runners have produced, and batches that the loop has
        got, both counted over the run. `now`: monotonic seconds."""
        self.behind = self.behind and produced <= delivered
        self.queued = max(0, produced - delivered)
        kept = 0.5 ** ((now - self._at) / QUEUE_HALF_S) if self._at else 0.0
        self.mean_queued = kept * self.mean_queued + (1 - kept) * self.queued
        self._at = now

    def restart(self, now: float) -> None:
        """Record at the time `now` that the slot lost its runner. `now`: monotonic seconds; 0 if the recovery must not
        be reported as an event, because the slot migrated, or because its box is lost or closed."""
        self.queued, self.mean_queued, self._at, self.lost_at, self.behind = 0, 0.0, 0.0, now, True


@dataclass
class BoxWaits:
    """Seconds that a box's loop has waited for each of its slots, from the first batch on. Older seconds lose weight:
    half of it every HALF_S seconds."""

    span_s: float = 0.0
    """Seconds over which the waits were measured, where older seconds lose weight as the waits do."""
    _seconds: list[float] = field(default_factory=list)
    _late: list[float] = field(default_factory=list)
    _reported: list[float] = field(default_factory=list)
    _at: float = 0.0

    def report(self, now: float, waited: Sequence[float], queued: Sequence[int], *, begun: bool) -> None:
        """Record a report of the box.

        Args:
            now: monotonic seconds.
            waited: seconds that the loop has waited for each slot so far. A new executor counts from 0 again.
            queued: number of ready batches of each slot.
            begun: whether the loop has received its first batch.
        """
        known = begun and len(self._reported) == len(waited)
        before, self._reported = self._reported, list(waited) if begun else []
        span, self._at = now - self._at, now
        if not known:
            self._seconds, self._late, self.span_s = [0.0] * len(waited), [0.0] * len(waited), 0.0
            return
        kept = 0.5 ** (span / HALF_S)
        self.span_s = kept * self.span_s + span
        for slot, (last, new) in enumerate(zip(before, waited, strict=True)):
            more = min(max(0.0, new - last if new >= last else new), span)
            self._seconds[slot] = kept * self._seconds[slot] + more
            self._late[slot] = kept * self._late[slot] + (more if queued[slot] >= AHEAD else 0.0)

    @property
    def share(self) -> float:
        """Share of its time that the loop waited for data, whatever the slot, from 0 to 1."""
        return min(1.0, sum(self._seconds) / self.span_s) if self.span_s else 0.0

    def of(self, slot: int) -> float:
        """Return the share of its time that the loop waited for this slot, from 0 to 1."""
        return min(1.0, self._seconds[slot] / self.span_s) if self.span_s else 0.0

    def late(self, slot: int) -> float:
        """Return how much of the waiting for this slot happened while the slot had batches ready, as a share from 0 to
        1. Such batches are made in time, but arrive late."""
        return self._late[slot] / self._seconds[slot] if self.span_s and self._seconds[slot] else 0.0
