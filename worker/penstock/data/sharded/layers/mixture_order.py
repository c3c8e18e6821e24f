"""Order of a mixture whose weights change with the position: which source gives the sample at each position.

The order consists of segments, in which the weights are constant or change linearly (a ramp). A segment with constant
weights has the order of mixture_shares.py, counted from the segment's first position. So in every prefix of the segment
each source has its share to within one sample, and a position can be looked up without computing those before it.

A ramp is divided into steps with constant weights. The weights of a step are the numbers of samples that the sources
give in it. They are chosen so that at the end of each step, the number of samples that a source has given since the
ramp's beginning is the integral of its share over the ramp so far, rounded up or down. Which of the two is decided step
by step when the ramp is first used: as in mixture_shares.py, the sample with the earliest deadline comes first.

A ramp of L samples has about sqrt(L / 2) steps of sqrt(2 L) samples, so that the constant weights of a step add a
deviation of at most a quarter of a sample. In every prefix of a ramp, a source's number of samples deviates from the
integral of its share by less than 9/4: one sample within a step, one at the step's ends, and the quarter.

Saved states contain positions in this order. So it must never change, and all of it is computed in integers.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.data.ordering.permutation import Ints
from penstock.data.sharded.layers.mixture_schedule import Segment
from penstock.data.sharded.layers.mixture_shares import MAX_PARTS, MixtureShares, shares_of, table_of

__all__ = ["Phase", "SegmentedOrder", "order_of"]

KEPT_POSITIONS = 1 << 24
"""Approximate number of positions for which a ramp keeps the computed source numbers in memory: 32 MB for each ramp.
The oldest ones are dropped, and computed again if necessary."""


class Phase(NamedTuple):
    """Range of positions in which a mixture's weights are constant: a whole segment, or one step of a ramp."""

    segment: int
    """First position of the segment that contains the phase."""
    start: int
    """First position of the phase."""
    parts: tuple[int, ...]
    """Weight of each source as a whole number."""


class SegmentedOrder:
    """Order of a mixture whose weights change: from a position to the number of the source that gives the sample."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = tuple(segments)
        self._starts = [segment.start for segment in segments]
        self._orders = [_order(segment) for segment in segments]

    def at(self, position: int) -> int:
        """Return the number of the source that gives the sample at this position of the mixture's order."""
        number = bisect_right(self._starts, position) - 1
        return self._orders[number].at(position - self._starts[number])

    def many(self, positions: Ints) -> Ints:
        """Return, for each of these positions, the number of the source that gives the sample there."""
        found = np.empty(len(positions), np.int64)
        numbers = np.searchsorted(self._starts, positions, "right") - 1
        for number in np.unique(numbers).tolist():
            chosen = numbers == number
            found[chosen] = self._orders[number].many(positions[chosen] - self._starts[number])
        return found

    def phase(self, position: int) -> Phase:
        """Return the phase (range of positions with constant weights) that contains a position."""
        number = bisect_right(self._starts, position) - 1
        start, order = self._starts[number], self._orders[number]
        if isinstance(order, _RampOrder):
            step, parts = order.step(position - start)
            return Phase(start, start + step, parts)
        return Phase(start, start, self._segments[number].parts)

    def shares(self, position: int) -> list[float]:
        """Return each source's weight at a position as a share of all weights; the shares sum up to 1. Within a ramp
        they lie on the straight line between its beginning and its end."""
        number = bisect_right(self._starts, position) - 1
        segment = self._segments[number]
        shares = _shares(segment.parts)
        if not segment.over:
            return shares
        done = (position - segment.start) / segment.over
        return [was + (to - was) * done for was, to in zip(_shares(segment.begin), shares, strict=True)]


def _shares(parts: Sequence[int]) -> list[float]:
    return [part / sum(parts) for part in parts]


@lru_cache(maxsize=64)
def order_of(segments: tuple[Segment, ...]) -> SegmentedOrder:
    """Return the order of the mixture that has these segments. The latest 64 orders are kept, because all cursors of a
    mixture use the same one."""
    return SegmentedOrder(segments)


def _order(segment: Segment) -> MixtureShares | _RampOrder:
    if segment.over:
        return _RampOrder(segment.begin, segment.parts, segment.over)
    return shares_of(segment.parts)


class _RampOrder:
    """Order of a mixture within a ramp: from a position, counted from the ramp's beginning, to the number of the source
    that gives the sample.

    Args:
        begin, end: weight of each source at the ramp's beginning and at its end, as whole numbers.
        length: number of samples of the ramp.
    """

    def __init__(self, begin: tuple[int, ...], end: tuple[int, ...], length: int) -> None:
        size = min(MAX_PARTS, math.isqrt(2 * length))
        count = -(-length // size)
        self._bounds = [length * number // count for number in range(count + 1)]
        """First position of each step of the ramp, then the ramp's length."""
        self._integrals = [
            _Integral(
                2 * length * first * sum(end), last * sum(begin) - first * sum(end), 2 * length * sum(begin) * sum(end)
            )
            for first, last in zip(begin, end, strict=True)
        ]
        self._parts: list[tuple[int, ...]] = []
        self._tables: OrderedDict[int, npt.NDArray[np.uint16]] = OrderedDict()

    def at(self, position: int) -> int:
        number = bisect_right(self._bounds, position) - 1
        return int(self._table(number)[position - self._bounds[number]])

    def many(self, positions: Ints) -> Ints:
        found = np.empty(len(positions), np.int64)
        numbers = np.searchsorted(self._bounds, positions, "right") - 1
        for number in np.unique(numbers).tolist():
            chosen = numbers == number
            found[chosen] = self._table(number)[positions[chosen] - self._bounds[number]]
        return found

    def step(self, position: int) -> tuple[int, tuple[int, ...]]:
        """Return the first position of the step that contains `position`, and the weight of each source in this step,
        as whole numbers."""
        number = bisect_right(self._bounds, position) - 1
        return self._bounds[number], self._steps()[number]

    def _table(self, number: int) -> npt.NDArray[np.uint16]:
        table = self._tables.get(number)
        if table is None:
            size = self._bounds[number + 1] - self._bounds[number]
            table = self._tables[number] = table_of(self._steps()[number], size, number)
            if len(self._tables) * size > KEPT_POSITIONS:
                self._tables.popitem(last=False)
        return table

    def _steps(self) -> list[tuple[int, ...]]:
        """Return, for each step of the ramp, the number of samples that each source gives in it."""
        if not self._parts:
            given = [0] * len(self._integrals)
            for bound in self._bounds[1:]:
                until = self._until(given, bound)
                self._parts.append(tuple(after - before for before, after in zip(given, until, strict=True)))
                given = until
        return self._parts

    def _until(self, given: Sequence[int], bound: int) -> list[int]:
        """Return the number of samples that each source has given from the ramp's beginning to the end of a step.
        `given`: these numbers for the step's beginning; `bound`: position behind the step's last sample."""
        until = [max(had, integral.floor(bound)) for had, integral in zip(given, self._integrals, strict=True)]
        left = bound - sum(until)
        waiting = [number for number, integral in enumerate(self._integrals) if integral.ceil(bound) > until[number]]
        if left < len(waiting):
            waiting.sort(
                key=lambda number: (self._integrals[number].deadline(until[number] + 1, self._bounds[-1]), number)
            )
        for number in waiting[:left]:
            until[number] += 1
        return until


class _Integral(NamedTuple):
    """Integral of a source's share over a ramp: the exact number of samples that the source should have given from the
    ramp's beginning to position x. It is (rate x + bend x^2) / whole."""

    rate: int
    bend: int
    whole: int

    def floor(self, position: int) -> int:
        return (self.rate * position + self.bend * position * position) // self.whole

    def ceil(self, position: int) -> int:
        return -(-(self.rate * position + self.bend * position * position) // self.whole)

    def deadline(self, count: int, length: int) -> int:
        """Return the first position at which the integral is at least `count`; `length` + 1 if the ramp, which has
        `length` samples, ends before."""
        return bisect_left(range(length + 1), count, key=self.floor)
