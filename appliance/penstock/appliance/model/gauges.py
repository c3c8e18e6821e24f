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
    """Measurements of a slot."""

    queued: int = 0
    """Number of batches produced and not yet delivered, as of the last heartbeat. The number may be too high by one,
    because a runner that is inside user code does not notice that its last batch was taken."""
    mean_queued: float = 0.0
    """Mean of `queued` over time, with a half-life of QUEUE_HALF_S."""
    saved_at: float = 0.0
    """Monotonic time when the slot's newest durable snapshot was stored; 0 = none since the coordinator's start."""
    lost_at: float = 0.0
    """Monotonic time when the slot lost its runner; 0 = no loss, or the replacement has caught up."""
    behind: bool = False
    """True if the slot's runner is a replacement that has not yet made the batch that the loop waits for next."""
    _at: float = 0.0

    def report(self, now: float, produced: int, delivered: int) -> None:
        """Record a worker's report: totals of batches that the slot has produced and that the loop has received."""
        self.behind = self.behind and produced <= delivered
        self.queued = max(0, produced - delivered)
        kept = 0.5 ** ((now - self._at) / QUEUE_HALF_S) if self._at else 0.0
        self.mean_queued = kept * self.mean_queued + (1 - kept) * self.queued
        self._at = now

    def restart(self, now: float) -> None:
        """Record the loss of the slot's runner at the time `now`. `now` is 0 if no recovery is expected, for example
        because the box was lost too."""
        self.queued, self.mean_queued, self._at, self.lost_at, self.behind = 0, 0.0, 0.0, now, True


@dataclass
class BoxWaits:
    """Seconds that a box's loop waited for each of its slots, counted from the first batch on."""

    span_s: float = 0.0
    """Seconds over which the waits were measured, with the same decay."""
    _seconds: list[float] = field(default_factory=list)
    _late: list[float] = field(default_factory=list)
    _reported: list[float] = field(default_factory=list)
    _at: float = 0.0

    def report(self, now: float, waited: Sequence[float], queued: Sequence[int], *, begun: bool) -> None:
        """Record a report of the box.

        Args:
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
        """Share of the loop's time that it waited for any slot."""
        return min(1.0, sum(self._seconds) / self.span_s) if self.span_s else 0.0

    def of(self, slot: int) -> float:
        """Return the share of its time that the loop waited for this slot."""
        return min(1.0, self._seconds[slot] / self.span_s) if self.span_s else 0.0

    def late(self, slot: int) -> float:
        """Return the share of the loop's waiting for this slot in which the slot had batches ready, which then arrived
        late."""
        return self._late[slot] / self._seconds[slot] if self.span_s and self._seconds[slot] else 0.0
