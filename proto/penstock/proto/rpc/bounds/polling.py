"""Long polls of the coordinator: how long they may be held, and how soon the next one may follow.

The coordinator sends both values, and a compromised coordinator may send anything: a hold of NaN seconds, a lease of
1e300, or an immediate answer to every poll.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

__all__ = ["HOLD_S", "MOST", "PollPace", "intervals", "within"]

HOLD_S = 1.0
"""Seconds of a long poll until the coordinator has sent its own value, which is a third of the lease."""
LONGEST_S = 3600.0
"""Largest hold and lease that a caller accepts, in seconds; a correct coordinator sends at most 300 s."""

MOST = 1e12
"""Largest other number in a reply that a caller accepts: seconds since 1970, or bytes per second."""


class _Reply(Protocol):
    @property
    def heartbeat_s(self) -> float: ...
    @property
    def lease_s(self) -> float: ...


def within(value: float, most: float, otherwise: float) -> float:
    """Return the value if it is above 0 and at most `most`, else `otherwise` (also for NaN). For numbers from a
    reply."""
    return value if 0.0 < value <= most else otherwise


def intervals(reply: _Reply) -> tuple[float, float]:
    """Return the hold of the next poll and the lease, in seconds; a lease of 0 means not known."""
    return within(reply.heartbeat_s, LONGEST_S, HOLD_S), within(reply.lease_s, LONGEST_S, 0.0)


class PollPace:
    """Limit on polls that are answered at once: the first `BURST` follow without a pause, later ones at `PER_S` a
    second.

    clock: monotonic seconds.
    """

    PER_S = 20.0
    BURST = 100

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at = clock()
        self._left = float(self.BURST)

    def delay_s(self) -> float:
        """Return the seconds to wait before the next poll, and count it."""
        now = self._clock()
        self._left = min(self.BURST, self._left + (now - self._at) * self.PER_S) - 1.0
        self._at = now
        return max(0.0, -self._left / self.PER_S)
