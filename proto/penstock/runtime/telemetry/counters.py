"""Counters and histograms of a process, as plain numbers. As in Prometheus, a histogram counts up to fixed bounds."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import accumulate

CALL_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of buckets for durations of calls in seconds, up to the longest usual deadline."""


class Histogram:
    """Counts of values in buckets, by their upper bounds; larger values have a bucket of their own."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def add(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def cumulative(self) -> list[int]:
        """Number of values up to each bound, followed by the number of all values."""
        return list(accumulate(self._counts))


class CallCounters:
    def __init__(self) -> None:
        self.answered: Counter[tuple[str, str]] = Counter()
        """(method, status) -> number of calls that were answered with this status."""
        self.seconds: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(CALL_BOUNDS_S))
        """Method -> histogram of the durations of its calls, in seconds."""

    def add(self, method: str, status: str, seconds: float) -> None:
        """`status`: gRPC status of the answer."""
        self.answered[method, status] += 1
        self.seconds[method].add(seconds)
