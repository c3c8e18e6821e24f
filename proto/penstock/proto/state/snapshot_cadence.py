"""Interval of snapshots of a loader's state: every step if snapshots take less than 1% of the time, else longer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["SnapshotCadence"]

SHARE = 0.01
"""Largest share of the runner's time for snapshots that no save has requested."""


class SnapshotCadence:
    """Schedule of snapshots, by the duration of the last snapshot. Times are seconds of the monotonic clock."""

    def __init__(self) -> None:
        self.stopped = False
        """True once no more snapshots are taken, because the loader has no state or cannot return it."""
        self._next = 0.0
        self._taken = 0

    def due(self, now: float) -> bool:
        """Return whether a snapshot is due. The first two snapshots are due at once, because the verification of a
        restored snapshot needs an early one."""
        return not self.stopped and (now >= self._next or self._taken < 2)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measure the time of the snapshot that is taken inside the block."""
        started = time.monotonic()
        yield
        ended = time.monotonic()
        self._taken += 1
        self._next = ended + (ended - started) * (1 / SHARE - 1)
