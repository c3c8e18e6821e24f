"""How fast a runner is, from two looks at its ledger: for the coordinator, which balances by it.

Batches a second say how fast the loop takes them. What a batch takes the runner says how fast it could be: the time
that it was at work, waits for the loop and for room in the ring left out. One that makes no batch for long is as slow
as it has been at it, before that batch is done.

Pure: the clock and the ledger's figures are given. A runner's user code can write into the ledger what it likes, so
figures that cannot be true count as none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Rates"]

WINDOW_S = 1.0
"""Between two looks that count."""


@dataclass
class Rates:
    """Of one runner."""

    since: float
    """Monotonic seconds of the last look."""
    batches_per_s: float = 0.0
    batch_s: float = 0.0
    """Seconds of work a batch; 0 = not known."""
    _total: int = 0
    _worked_s: float = 0.0
    _done: int = 0

    def look(self, now: float, total: int, worked_s: float) -> None:
        """`total`: batches made so far. `worked_s`: seconds at work so far."""
        if now - self.since < WINDOW_S:
            return
        self.batches_per_s = max(0, total - self._total) / (now - self.since)
        self.since, self._total = now, total
        spent, made = worked_s - self._worked_s, total - self._done
        if not math.isfinite(spent) or spent < 0 or made < 0:
            self._worked_s, self._done = (worked_s if math.isfinite(worked_s) else 0.0), total
        elif made:
            self.batch_s = spent / made
            self._worked_s, self._done = worked_s, total
        elif self.batch_s and spent > self.batch_s:
            self.batch_s = spent
