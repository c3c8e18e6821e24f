"""Rates of a runner, computed from two readings of its progress page (counters in shared memory). The coordinator uses
these rates to balance slots between workers.

The batches per second show how fast the training loop takes batches. The runner's time per batch shows how fast the
runner could be: it is the time spent on making a batch, without waits for the loop and for free memory in the ring. A
batch under way counts as soon as it takes longer than usual.

The time per batch includes waits for a processor, which grow with more workers on the same cores. So the processor time
of a batch and its wait for a processor are measured too.

The functions are pure: clock and figures are arguments. A runner's user code can write anything into the progress page,
so impossible figures are ignored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.worker.resources.processor_time import NOTHING, ProcessorUse

__all__ = ["BatchRates"]

WINDOW_S = 1.0
"""Shortest time between two readings of a progress page, in seconds."""


@dataclass
class BatchRates:
    """Rates of one runner, as of the last reading of its progress page."""

    since: float
    """Monotonic time of the last reading, in seconds."""
    batches_per_s: float = 0.0
    """Batches that the runner made, per second."""
    batch_s: float = 0.0
    """Seconds of work per batch; 0 = not known."""
    batch_cpu_s: float = 0.0
    """Seconds of processor time per batch; 0 = not known."""
    batch_delay_s: float = 0.0
    """Seconds per batch in which the runner waited for a processor; included in `batch_s`."""
    _total: int = 0
    _worked_s: float = 0.0
    _used: ProcessorUse = NOTHING
    """Processor time that the runner had used at the last reading with a new batch. `_worked_s` and `_done` are the
    seconds of work and the number of batches at the same reading."""
    _done: int = 0

    def due(self, now: float) -> bool:
        """Return True if WINDOW_S seconds have passed since the last reading. now: monotonic time in seconds."""
        return now - self.since >= WINDOW_S

    def look(self, now: float, total: int, worked_s: float, used: ProcessorUse = NOTHING) -> None:
        """Update the rates from a reading of the progress page, if WINDOW_S seconds have passed since the last one.

        Args:
            now: monotonic time, seconds.
            total: number of batches made so far.
            worked_s: seconds spent on batches so far.
            used: processor time used so far.
        """
        if not self.due(now):
            return
        self.batches_per_s = max(0, total - self._total) / (now - self.since)
        self.since, self._total = now, total
        spent, made = worked_s - self._worked_s, total - self._done
        if not math.isfinite(spent) or spent < 0 or made < 0:
            self._worked_s, self._done = (worked_s if math.isfinite(worked_s) else 0.0), total
            self._used = used
        elif made:
            self._set_rates(spent, used, made)
            self._worked_s, self._used, self._done = worked_s, used, total
        elif self.batch_s and spent > self.batch_s:
            self._set_rates(spent, used, 1)

    def _set_rates(self, spent: float, used: ProcessorUse, made: int) -> None:
        """Set the seconds per batch from `made` batches that took `spent` seconds of work: those since the last reading
        with a new batch, or the one under way."""
        self.batch_s = spent / made
        self.batch_cpu_s = max(0.0, used.cpu_s - self._used.cpu_s) / made
        self.batch_delay_s = min(spent, max(0.0, used.delay_s - self._used.delay_s)) / made
