"""Measurements of slots and boxes: how far runners are ahead, and which slots loops wait for. None is journaled.

The slot that a loop waits for at one moment is no evidence: the loop takes slots in turn, and waits for each next one,
if only for a microsecond. So the box reports its total wait for each slot, and the gauge keeps these seconds with a
decay by half every HALF_S. Their shares show which slot has been holding the box up lately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

HALF_S = 15.0
"""Half-life of a wait, in seconds: shares are those of the last minute or so."""

QUEUE_HALF_S = 5.0
"""Half-life of a queue's mean, in seconds: a queue fills and empties within seconds."""
AHEAD = 2
"""Smallest number of ready batches of a slot that counts as ahead. One is not enough: the loop may have taken it
without its runner having noticed."""


@dataclass
class SlotGauge:
    """Measurements of a slot."""

    queued: int = 0
    """Batches produced and not yet delivered, as of the last heartbeat. It may be one too high, because a runner within
    user code does not notice yet that its last batch was taken."""
    mean_queued: float = 0.0
    """Mean of `queued` over time."""
    saved_at: float = 0.0
    """Time when its newest durable snapshot was stored; 0 = none since the coordinator started."""
    lost_at: float = 0.0
    """Time when it lost its last runner; 0 = never, or another runner has taken over."""
    behind: bool = False
    """Flag of a replacement runner that has not yet made the batch that the loop waits for next."""
    _at: float = 0.0

    def report(self, now: float, produced: int, delivered: int) -> None:
        """Record a report. `delivered`: the highest count that the box or the worker reported."""
        self.behind = self.behind and produced <= delivered
        self.queued = max(0, produced - delivered)
        kept = 0.5 ** ((now - self._at) / QUEUE_HALF_S) if self._at else 0.0
        self.mean_queued = kept * self.mean_queued + (1 - kept) * self.queued
        self._at = now

    def restart(self, now: float) -> None:
        """Record the loss of the runner. `now` is 0 if its box was lost with it, which needs no recovery."""
        self.queued, self.mean_queued, self._at, self.lost_at, self.behind = 0, 0.0, 0.0, now, True


@dataclass
class BoxWaits:
    """Waits of a box's loop for its slots, counted from its first batch on."""

    span_s: float = 0.0
    """Seconds that the shares refer to, decayed like the waits."""
    _seconds: list[float] = field(default_factory=list)
    _late: list[float] = field(default_factory=list)
    _reported: list[float] = field(default_factory=list)
    _at: float = 0.0

    def report(self, now: float, waited: Sequence[float], queued: Sequence[int], *, begun: bool) -> None:
        """Record a report.

        Args:
            waited: seconds that the loop has waited so far, by slot. A new executor counts from 0 again.
            queued: batches that are ready at each slot.
            begun: whether the loop has received a batch.
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
        """Share of its time that the loop waited."""
        return min(1.0, sum(self._seconds) / self.span_s) if self.span_s else 0.0

    def of(self, slot: int) -> float:
        """Return the share of its time that the loop waited for this slot."""
        return min(1.0, self._seconds[slot] / self.span_s) if self.span_s else 0.0

    def late(self, slot: int) -> float:
        """Return the share of the waiting for this slot during which its batches were ready."""
        return self._late[slot] / self._seconds[slot] if self.span_s and self._seconds[slot] else 0.0
