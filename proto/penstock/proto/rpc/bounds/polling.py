"""Limits on long polls of the coordinator: how long one may be held, and how soon the next may follow.

A compromised coordinator may send anything: a hold of NaN, a lease of 1e300, or an immediate answer to every poll."""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.proto.v1 import coordinator_pb2 as pb

HOLD_S = 1.0
"""Hold of a long poll in seconds before the coordinator's first reply, which states that of the next poll."""
LONGEST_S = 3600.0
"""Largest hold or lease that is accepted, in seconds. A correct coordinator sends at most 300."""

MOST = 1e12
"""Largest value that is accepted for other numbers in a reply."""


_Reply = pb.HeartbeatReply | pb.RegisterWorkerReply | pb.OpenRunReply | pb.WatchRunReply


def within(value: float, most: float, otherwise: float) -> float:
    """Return `value` if it is above 0 and at most `most`, else, and for NaN, `otherwise`."""
    return value if 0.0 < value <= most else otherwise


def intervals(reply: _Reply) -> tuple[float, float]:
    """Return (hold, lease) from a reply, in seconds; for invalid numbers HOLD_S and 0: unknown."""
    return within(reply.heartbeat_s, LONGEST_S, HOLD_S), within(reply.lease_s, LONGEST_S, 0.0)


class PollPace:
    """Rate limit for long polls, if all are answered at once: after the first `BURST`, `PER_S` times a second."""

    PER_S = 20.0
    BURST = 100

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at = clock()
        self._left = float(self.BURST)

    def delay_s(self) -> float:
        """Count the next poll, and return the seconds to wait before it is sent."""
        now = self._clock()
        self._left = min(self.BURST, self._left + (now - self._at) * self.PER_S) - 1.0
        self._at = now
        return max(0.0, -self._left / self.PER_S)
