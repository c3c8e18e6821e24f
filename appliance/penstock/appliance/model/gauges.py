"""What is measured of slots and boxes: how far runners are ahead, and for whom loops wait. Nothing here is journaled.

For whom a loop waits at one moment says little: with slots taken in turn, whoever is due is waited for, be it for a
microsecond. So the box tells how long it has waited for each slot so far, and what is kept of that are seconds that
fade, by half in HALF_S. The shares that come of them answer "who has been holding this box up lately".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

HALF_S = 15.0
"""Seconds after which a wait counts half. So shares are those of the last minute or so."""

QUEUE_HALF_S = 5.0
"""The same of a queue, which fills and empties within seconds."""
AHEAD = 2
"""Batches that lie ready at a slot that is not at its limit. One may be there at any: its runner has not heard yet that
it was taken."""


@dataclass
class SlotGauge:
    """Of a slot."""

    queued: int = 0
    """Batches produced and not yet delivered, as of the last heartbeat. At most one too many: a runner within user code
    has not heard that its last one was taken."""
    mean_queued: float = 0.0
    """The same, over time."""
    saved_at: float = 0.0
    """When its newest durable snapshot was stored; 0 = none since the coordinator started."""
    lost_at: float = 0.0
    """When it lost its last runner; 0 = it did not, or another one has gone on."""
    behind: bool = False
    """Its runner is another one, and has not made the batch yet that the loop wants next: it starts, or replays."""
    _at: float = 0.0

    def report(self, now: float, produced: int, delivered: int) -> None:
        """`delivered`: the highest count that anybody knows of."""
        self.behind = self.behind and produced <= delivered
        self.queued = max(0, produced - delivered)
        kept = 0.5 ** ((now - self._at) / QUEUE_HALF_S) if self._at else 0.0
        self.mean_queued = kept * self.mean_queued + (1 - kept) * self.queued
        self._at = now

    def restart(self, now: float) -> None:
        """The slot has lost its runner; 0 = together with its box, which is no recovery."""
        self.queued, self.mean_queued, self._at, self.lost_at, self.behind = 0, 0.0, 0.0, now, True


@dataclass
class BoxWaits:
    """Of a box, since its loop was handed its first batch: what goes before is the start, and says nothing."""

    span_s: float = 0.0
    """Seconds that the shares speak of, faded as they are."""
    _seconds: list[float] = field(default_factory=list)
    _late: list[float] = field(default_factory=list)
    _told: list[float] = field(default_factory=list)
    _at: float = 0.0

    def report(self, now: float, told: Sequence[float], queued: Sequence[int], *, begun: bool) -> None:
        """
        Args:
            told: seconds that the loop has waited so far, by slot. A new executor counts from 0 again.
            queued: batches that lie ready at each slot.
            begun: the loop has had a batch.
        """
        known = begun and len(self._told) == len(told)
        before, self._told = self._told, list(told) if begun else []
        span, self._at = now - self._at, now
        if not known:
            self._seconds, self._late, self.span_s = [0.0] * len(told), [0.0] * len(told), 0.0
            return
        kept = 0.5 ** (span / HALF_S)
        self.span_s = kept * self.span_s + span
        for slot, (last, new) in enumerate(zip(before, told, strict=True)):
            more = min(max(0.0, new - last if new >= last else new), span)
            self._seconds[slot] = kept * self._seconds[slot] + more
            self._late[slot] = kept * self._late[slot] + (more if queued[slot] >= AHEAD else 0.0)

    @property
    def share(self) -> float:
        """Of the time, that the loop waited."""
        return min(1.0, sum(self._seconds) / self.span_s) if self.span_s else 0.0

    def of(self, slot: int) -> float:
        """Of the time, that the loop waited for this slot."""
        return min(1.0, self._seconds[slot] / self.span_s) if self.span_s else 0.0

    def late(self, slot: int) -> float:
        """Of the waiting for this slot, the part while batches lay ready there."""
        return self._late[slot] / self._seconds[slot] if self.span_s and self._seconds[slot] else 0.0
