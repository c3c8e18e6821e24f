"""Cadence of snapshots of a loader's state: after every batch if they take less than 1% of the time, else fewer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

SHARE = 0.01
"""Largest share of the runner's time for snapshots that are not taken at announced checkpoint steps."""


class SnapshotCadence:
    """Schedule of snapshots by the duration of the last one. `every_s`: smallest number of seconds between two."""

    def __init__(self, every_s: float = 0.0) -> None:
        self._every_s = every_s
        self.stopped = False
        """True once no more snapshots can be taken, because the loader has no state or cannot return it."""
        self._next = time.monotonic() + every_s

    def due(self, now: float) -> bool:
        return not self.stopped and now >= self._next

    def hasten(self) -> None:
        self._next = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        started = time.monotonic()
        yield
        ended = time.monotonic()
        self._next = ended + max(self._every_s, (ended - started) * (1 / SHARE - 1))
