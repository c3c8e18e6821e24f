"""Selection of the shards that a loader downloads before it needs them: those that it will need within a number of
seconds.

The order says at which position each shard is first needed. The rate at which the loop passes positions is measured,
and the number of seconds times this rate is a number of positions. Until a rate is measured, only the shards of the
next batches are downloaded, so that a loop that takes a single batch downloads hardly more than it reads.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from penstock.data.ordering.permutation import Ints

__all__ = ["ReadingRate", "UpcomingShards", "Window"]

MEASURE_S = 0.25
"""Shortest time in seconds over which the rate is measured at which the loop passes positions."""
MARKS = 64
"""Largest number of marks that are kept. A mark is the time and the position at which the loop asked for a batch. The
rate is the mean since the oldest mark: over the last 64 batches, or about the last second if it had more batches."""
FEW_MARKS = 16
"""Number of marks for a second rate, the mean since the 16th newest mark. It is used if it is higher, which is the case
after a pause of the loop, for example for compilation."""
MARK_PAUSE_S = 1.0 / MARKS
"""Shortest time in seconds between two marks (times and positions at which the loop asked for a batch)."""


class ReadingRate:
    """Rate at which a training loop passes positions of the order, in positions per second, as a mean over its last
    batches."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._marks: deque[tuple[float, int]] = deque(maxlen=MARKS)
        """Marks: pairs (time in seconds, position) at which the loop asked for a batch, the newest one last."""
        self._last = -math.inf, 0
        self._per_s: float | None = None

    def passed(self, position: int) -> float | None:
        """Record that the loop asks for a batch that begins at `position`, counted over all epochs. Return the rate in
        positions per second; None while it is unknown. If the position is before that of the last call, the loop has
        gone back, and the measurement begins again."""
        now = self._clock()
        if position < self._last[1]:
            self._marks.clear()
        elif now - self._last[0] < MARK_PAUSE_S:
            return self._per_s
        since = (self._marks[0], self._marks[max(0, len(self._marks) - FEW_MARKS)]) if self._marks else ()
        rates = [(position - first) / (now - began) for began, first in since if now - began >= MEASURE_S]
        self._per_s, self._last = max(rates, default=None), (now, position)
        self._marks.append(self._last)
        return self._per_s


class Window(NamedTuple):
    """Part of a list of upcoming shards, from index `begin` to `end`, exclusive, that is to be downloaded now."""

    begin: int
    end: int
    needed: int
    """Number of shards, at the beginning of the part, that the present batch needs."""


class UpcomingShards:
    """List of the shards that the loop will need, sorted by the positions at which they are first needed. It remembers
    the part of the list (window) for which the download was requested last. Positions are counted from the beginning of
    the present epoch, also those that lie in the next epoch."""

    def __init__(self, shards: Ints, needed_at: Ints, begin: int, listed: int) -> None:
        """Sort the shards by the first position that needs each.

        Args:
            shards: numbers of the shards; a shard may occur several times.
            needed_at: position at which each entry is needed; shape (len(shards),).
            begin: position of the present batch.
            listed: number of positions, from `begin` on, whose shards are in the list.
        """
        order = np.argsort(needed_at, kind="stable")
        _, first = np.unique(shards[order], return_index=True)
        chosen = order[np.sort(first)]
        self.shards: Ints = shards[chosen]
        self._needed_at: list[int] = needed_at[chosen].tolist()  # a search in a list is faster than in an array
        self._begin, self._listed = begin, listed
        self._given = Window(0, 0, 0)
        self._complete = False
        """True if the whole last window is being downloaded; False if the limit on bytes left out its end."""
        self._is_given = False

    def is_old(self, position: int) -> bool:
        """Return True if a new list must be made, because the loop has passed a quarter of the positions of this
        one."""
        return position - self._begin >= self._listed // 4

    def window(self, position: int, last: int, ahead: int) -> Window | None:
        """Return the part of the list to download when the loop is at `position`. Return None as long as the last
        window is still good enough, so that downloads are not requested anew for every batch.

        Args:
            position, last: first and last position of the present batch.
            ahead: number of positions, from `position` on, whose shards are to be downloaded.
        """
        begin = bisect_left(self._needed_at, position)
        needed = bisect_left(self._needed_at, last + 1, begin)
        end = max(needed, bisect_left(self._needed_at, position + ahead, begin))
        quarter = max(1, (self._given.end - self._given.begin) // 4)
        passed, grown = begin - self._given.begin >= quarter, end - self._given.end >= quarter
        if self._is_given and needed <= self._given.end and not passed and not (grown and self._complete):
            return None
        return Window(begin, end, needed - begin)

    def gave(self, window: Window, count: int) -> None:
        """Record that the download of a window was requested. `count`: number of its shards, from the first on, that
        the limit on bytes allowed."""
        self._given = window._replace(end=window.begin + count)
        self._complete = self._given.end == window.end
        self._is_given = True
