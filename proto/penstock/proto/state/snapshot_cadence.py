"""How often to take a snapshot: every step while that costs under 1% of the time, less often otherwise."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["SnapshotCadence"]

SHARE = 0.01
"""Of the runner's time that unasked snapshots may take."""


class SnapshotCadence:
    """Knows what the last snapshots cost, and says when the next is due. Seconds of the monotonic clock."""

    def __init__(self) -> None:
        self.stopped = False
        """No more snapshots: the loader has no state, or cannot give it."""
        self._next = 0.0
        self._taken = 0

    def due(self, now: float) -> bool:
        """The first two are always due: the check of a restored snapshot needs an early one."""
        return not self.stopped and (now >= self._next or self._taken < 2)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Around a snapshot."""
        started = time.monotonic()
        yield
        ended = time.monotonic()
        self._taken += 1
        self._next = ended + (ended - started) * (1 / SHARE - 1)
