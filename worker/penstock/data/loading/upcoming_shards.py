"""Selection of the shards that a loader downloads before it needs them: those that it will need within a number of
seconds, by the measured rate at which the loop passes positions. Until a rate is measured, only the shards of the next
batches are downloaded, so that a loop that takes a single batch downloads hardly more than it reads."""

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
"""Largest number of marks. A mark is the time and position at which the loop asked for a batch. The rate is the mean
since the oldest one: over 64 batches, or about the last second if it had more."""
FEW_MARKS = 16
"""Number of marks for a second rate, which is used if it is higher: after a pause of the loop, for example to
compile."""
MARK_PAUSE_S = 1.0 / MARKS
"""Shortest time in seconds between two marks."""


class ReadingRate:
    """Rate at which a training loop passes positions, in positions per second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._marks: deque[tuple[float, int]] = deque(maxlen=MARKS)
        """(time in seconds, position), the newest last."""
        self._last = -math.inf, 0
        self._per_s: float | None = None

    def passed(self, position: int) -> float | None:
        """Record that the loop asks for a batch at `position`, counted over all epochs. Return the rate; None while
        unknown. If the loop has gone back, the measurement begins again."""
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
    """Part of a list of upcoming shards, from `begin` to `end`, that is to be downloaded now."""

    begin: int
    end: int
    needed: int
    """Number of shards, at the beginning of the part, that the present batch needs."""


class UpcomingShards:
    """Shards that the loop will need, sorted by the positions (from the present epoch's beginning) that first need
    them, and the window of the list whose download was requested last."""

    def __init__(self, shards: Ints, needed_at: Ints, begin: int, listed: int) -> None:
        """`needed_at`: position at which each of `shards` is needed. `begin`: position of the present batch. `listed`:
        number of positions from there on whose shards are in the list."""
        order = np.argsort(needed_at, kind="stable")
        _, first = np.unique(shards[order], return_index=True)
        chosen = order[np.sort(first)]
        self.shards: Ints = shards[chosen]
        self._needed_at: list[int] = needed_at[chosen].tolist()  # a search in a list is faster than in an array
        self._begin, self._listed = begin, listed
        self._given = Window(0, 0, 0)
        self._complete = False
        """False if the limit on bytes left out the end of the last window."""
        self._is_given = False

    def is_old(self, position: int) -> bool:
        """Return True if the loop has passed a quarter of the list's positions."""
        return position - self._begin >= self._listed // 4

    def window(self, position: int, last: int, ahead: int) -> Window | None:
        """Return the part of the list to download for `ahead` positions after `position`, the first one of the present
        batch, which ends at `last`; None as long as the last window is still good enough."""
        begin = bisect_left(self._needed_at, position)
        needed = bisect_left(self._needed_at, last + 1, begin)
        end = max(needed, bisect_left(self._needed_at, position + ahead, begin))
        quarter = max(1, (self._given.end - self._given.begin) // 4)
        passed, grown = begin - self._given.begin >= quarter, end - self._given.end >= quarter
        if self._is_given and needed <= self._given.end and not passed and not (grown and self._complete):
            return None
        return Window(begin, end, needed - begin)

    def gave(self, window: Window, count: int) -> None:
        """Record that the download of a window was requested, of which the limit on bytes allowed the first `count`
        shards."""
        self._given = window._replace(end=window.begin + count)
        self._complete = self._given.end == window.end
        self._is_given = True
