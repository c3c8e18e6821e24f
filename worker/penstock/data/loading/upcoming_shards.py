"""Selection of the shards to download ahead: those needed within a number of seconds at the measured rate. Before that
is known, only the next batches' shards, so that a loop that takes one batch downloads hardly more than it reads."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from penstock.data.ordering.permutation import Ints

MEASURE_S = 0.25
"""Shortest time over which the rate is measured."""
MARKS = 64
"""Limit on marks (time and position of a request). The rate is that since the oldest: 64 batches, or the last
second."""
FEW_MARKS = 16
"""Marks for a second rate, used if higher: after a pause of the loop, for example to compile."""
MARK_PAUSE_S = 1.0 / MARKS


class ReadingRate:
    """Positions that a training loop passes per second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._marks: deque[tuple[float, int]] = deque(maxlen=MARKS)
        """(time in seconds, position), the newest last."""
        self._last = -math.inf, 0
        self._per_s: float | None = None

    def passed(self, position: int) -> float | None:
        """Record a request at `position` over all epochs, and return the rate, if known. If the loop went back, begin
        again."""
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
    """Part of a list of upcoming shards to be downloaded now."""

    begin: int
    end: int


class UpcomingShards:
    """Shards sorted by the position (from the present epoch's beginning) that first needs them, and the window
    returned last."""

    def __init__(self, shards: Ints, needed_at: Ints, begin: int, listed: int) -> None:
        """`begin`: position of the present batch. `listed`: positions from there whose shards are in the list."""
        order = np.argsort(needed_at, kind="stable")
        _, first = np.unique(shards[order], return_index=True)
        chosen = order[np.sort(first)]
        self.shards: Ints = shards[chosen]
        self._needed_at: list[int] = needed_at[chosen].tolist()  # a search in a list is faster than in an array
        self._begin, self._listed = begin, listed
        self._given: Window | None = None

    def is_old(self, position: int) -> bool:
        """Return True once a quarter of the list is passed."""
        return position - self._begin >= self._listed // 4

    def window(self, position: int, last: int, ahead: int) -> Window | None:
        """Return the part to download for `ahead` positions after `position` of the present batch, which ends at
        `last`; None while the part returned last will do."""
        begin = bisect_left(self._needed_at, position)
        needed = bisect_left(self._needed_at, last + 1, begin)
        end = max(needed, bisect_left(self._needed_at, position + ahead, begin))
        if self._given is not None:
            quarter = max(1, (self._given.end - self._given.begin) // 4)
            passed, grown = begin - self._given.begin >= quarter, end - self._given.end >= quarter
            if needed <= self._given.end and not passed and not grown:
                return None
        self._given = Window(begin, end)
        return self._given
