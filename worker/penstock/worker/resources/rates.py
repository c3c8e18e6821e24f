"""How fast a runner is, from two looks at its progress page: for the coordinator, which balances by it.

Batches a second say how fast the loop takes them. What a batch takes the runner says how fast it could be: the time
that it was at work, waits for the loop and for room in the ring left out. One that makes no batch for long is as slow
as it has been at it, before that batch is done.

That time includes waits for a processor, which more workers on the same cores would only make longer. So the processor
time of a batch and its wait for a processor are measured, too.

Pure: the clock and the figures are given. A runner's user code can write into the progress page what it likes, so
figures that cannot be true count as none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.worker.resources.processor_time import NOTHING, ProcessorUse

__all__ = ["BatchRates"]

WINDOW_S = 1.0
"""Between two looks that count."""


@dataclass
class BatchRates:
    """Of one runner."""

    since: float
    """Monotonic seconds of the last look."""
    batches_per_s: float = 0.0
    batch_s: float = 0.0
    """Seconds of work a batch; 0 = not known."""
    batch_cpu_s: float = 0.0
    """Seconds of processor time a batch; 0 = not known."""
    batch_delay_s: float = 0.0
    """Part of `batch_s` in which the runner waited for a processor, in seconds."""
    _total: int = 0
    _worked_s: float = 0.0
    _used: ProcessorUse = NOTHING
    """Up to when the newest batch that counts was done, as `_worked_s`."""
    _done: int = 0

    def due(self, now: float) -> bool:
        """Return whether a look would count."""
        return now - self.since >= WINDOW_S

    def look(self, now: float, total: int, worked_s: float, used: ProcessorUse = NOTHING) -> None:
        """`total`: batches made so far. `worked_s`: seconds at work so far. `used`: processor time so far."""
        if not self.due(now):
            return
        self.batches_per_s = max(0, total - self._total) / (now - self.since)
        self.since, self._total = now, total
        spent, made = worked_s - self._worked_s, total - self._done
        if not math.isfinite(spent) or spent < 0 or made < 0:
            self._worked_s, self._done = (worked_s if math.isfinite(worked_s) else 0.0), total
            self._used = used
        elif made:
            self._takes(spent, used, made)
            self._worked_s, self._used, self._done = worked_s, used, total
        elif self.batch_s and spent > self.batch_s:
            self._takes(spent, used, 1)

    def _takes(self, spent: float, used: ProcessorUse, made: int) -> None:
        """That many batches took so much, since the last that counts."""
        self.batch_s = spent / made
        self.batch_cpu_s = max(0.0, used.cpu_s - self._used.cpu_s) / made
        self.batch_delay_s = min(spent, max(0.0, used.delay_s - self._used.delay_s)) / made
