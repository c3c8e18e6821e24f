"""Pauses between the attempts of a transfer that failed; `RemoteFolder` (folders.py) makes the attempts, in `_fetch`
for downloads and in `_retry` for other calls."""

from __future__ import annotations

import random

from penstock.data.remote.transfer import FailureKind

__all__ = ["LAST_PAUSE_S", "pause_before_retry", "tries_text"]

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 10.0
MOST_DOUBLINGS = 30
"""Largest number of times that the pause is doubled: enough for LONGEST_PAUSE_S, and a float holds the result."""
LAST_PAUSE_S = 0.2
"""Smallest number of seconds until the deadline with which a new attempt begins."""


def pause_before_retry(failures: int, left: float, failure_kind: FailureKind) -> float:
    """Return the seconds to wait before the next attempt of a transfer.

    Args:
        failures: number of failed attempts in a row.
        left: seconds until the deadline.
        failure_kind: what is known about the last failure.
    """
    growth = 2.0 ** min(failures - 1, MOST_DOUBLINGS)
    pause: float = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * growth) * random.uniform(0.5, 1.0)
    return max(min(pause, left / 2), failure_kind.again_after_s)


def tries_text(count: int) -> str:
    """Return a number of attempts as text for an error: "1 try" or "3 tries"."""
    return "1 try" if count == 1 else f"{count} tries"
