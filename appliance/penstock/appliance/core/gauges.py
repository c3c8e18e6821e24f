"""Measurements of slots and boxes: how far runners are ahead, and which slots loops wait for; never in the journal.

The loop takes the slots in turn and waits for each, if only for a microsecond, so the slot of one moment proves
nothing. A gauge keeps a box's total waits for each slot, with a decay by half every HALF_S seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

HALF_S = 15.0
"""Half-life of a measured wait in seconds: shares are those of about the last minute."""

QUEUE_HALF_S = 5.0
"""Half-life in seconds of the mean number of ready batches, which changes within seconds."""
AHEAD = 2
"""Ready batches with which a slot counts as ahead: the loop may have taken a single one, unnoticed by the runner."""


@dataclass
class SlotGauge:
    queued: int = 0
    """Batches made and not yet delivered at the last heartbeat; perhaps one too many, because a runner inside user
    code does not notice that its last batch was taken."""
    mean_queued: float = 0.0
    """Mean of `queued`, with a half-life of QUEUE_HALF_S."""
    saved_at: float = 0.0
    """Monotonic time when the newest durable snapshot was stored; 0 = none since the coordinator's start."""
    lost_at: float = 0.0
    """Monotonic time when the slot lost its runner; 0 = no loss, or caught up since."""
    behind: bool = False
    """True if a replacement runner has not yet made the batch that the loop needs next."""
    _at: float = 0.0

    def report(self, now: float, produced: int, delivered: int) -> None:
        """Record totals over the run: batches produced by runners, and got by the loop. `now`: monotonic seconds."""
        self.behind = self.behind and produced <= delivered
        self.queued = max(0, produced - delivered)
        kept = 0.5 ** ((now - self._at) / QUEUE_HALF_S) if self._at else 0.0
        self.mean_queued = kept * self.mean_queued + (1 - kept) * self.queued
        self._at = now

    def restart(self, now: float) -> None:
        """Record a loss of the runner; `now` is 0 if its recovery is no event: migrated, or box lost or closed."""
        self.queued, self.mean_queued, self._at, self.lost_at, self.behind = 0, 0.0, 0.0, now, True


@dataclass
class BoxWaits:
    """Seconds that a box's loop has waited for each slot, from the first batch on, halved every HALF_S seconds."""

    span_s: float = 0.0
    """Seconds over which the waits were measured, which lose weight as the waits do."""
    still_s: float = 0.0
    """Seconds since the loop's last step, as reported; 0 before the first batch."""
    step_s: float = 0.0
    """Seconds between the last two reports of a step."""
    _seconds: list[float] = field(default_factory=list)
    _late: list[float] = field(default_factory=list)
    _reported: list[float] = field(default_factory=list)
    _at: float = 0.0

    def report(
        self, now: float, waited: Sequence[float], queued: Sequence[int], *, begun: bool, stepped: bool = False
    ) -> None:
        """Record the seconds waited for each slot so far (a new executor counts from 0 again) and the ready batches of
        each slot. `begun`: the loop has received its first batch; `stepped`: it has made a step since the last report.
        """
        known = begun and len(self._reported) == len(waited)
        before, self._reported = self._reported, list(waited) if begun else []
        span, self._at = now - self._at, now
        if not known:
            self._seconds, self._late, self.span_s = [0.0] * len(waited), [0.0] * len(waited), 0.0
            return
        self.still_s += span
        if stepped:
            self.step_s, self.still_s = self.still_s, 0.0
        kept = 0.5 ** (span / HALF_S)
        self.span_s = kept * self.span_s + span
        for slot, (last, new) in enumerate(zip(before, waited, strict=True)):
            more = min(max(0.0, new - last if new >= last else new), span)
            self._seconds[slot] = kept * self._seconds[slot] + more
            self._late[slot] = kept * self._late[slot] + (more if queued[slot] >= AHEAD else 0.0)

    @property
    def share(self) -> float:
        """Share of its time that the loop waited for data, from 0 to 1."""
        return min(1.0, sum(self._seconds) / self.span_s) if self.span_s else 0.0

    def of(self, slot: int) -> float:
        """Return the share of its time that the loop waited for this slot, from 0 to 1."""
        return min(1.0, self._seconds[slot] / self.span_s) if self.span_s else 0.0

    def late(self, slot: int) -> float:
        """Return the share, from 0 to 1, of the waiting for this slot while its batches were ready but late."""
        return self._late[slot] / self._seconds[slot] if self.span_s and self._seconds[slot] else 0.0
