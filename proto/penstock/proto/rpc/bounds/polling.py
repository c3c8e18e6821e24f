"""Long polls of the coordinator: how long they may be held, and how soon the next one may follow.

Both are the coordinator's to say, and a coordinator that is taken over may say anything: a hold of NaN seconds, a lease
of 1e300, or an answer at once to every poll, for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

__all__ = ["HOLD_S", "MOST", "PollPace", "intervals", "within"]

HOLD_S = 1.0
"""Seconds of a long poll until the coordinator sends its own value: a third of the lease."""
LONGEST_S = 3600.0
"""Longest hold and lease that a caller believes, in seconds; a coordinator's own are 300 s at most."""

MOST = 1e12
"""Largest other number of a reply that a caller believes: seconds since 1970, or bytes a second."""


class _Reply(Protocol):
    @property
    def heartbeat_s(self) -> float: ...
    @property
    def lease_s(self) -> float: ...


def within(value: float, most: float, otherwise: float) -> float:
    """Return a number from a reply that must be above 0 and at most `most`; else `otherwise`, also for NaN."""
    return value if 0.0 < value <= most else otherwise


def intervals(reply: _Reply) -> tuple[float, float]:
    """Return the hold of the next poll and the lease that goes with it, seconds; a lease of 0 is not known."""
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
