"""Order of a mixture whose weights change with the position: from a position to the source of its sample.

Each segment of constant weights begins the schedule of its weights (mixture_shares.py) at its own first position. So
within a segment every prefix has each source's share to within one sample, and a position is looked up without those
before it.

A ramp is divided into steps. At the end of each step, the number of samples that each source has given since the ramp's
beginning is the integral of its share, rounded up or down. For one step after the other it is decided, when the ramp is
first used, which of the two it is: as in mixture_shares.py, the sample with the earliest deadline comes first. Inside a
step the weights are constant: its numbers of samples. A ramp of L samples has about sqrt(L / 2) steps of sqrt(2 L)
samples, so that a step deviates from the straight line by at most a quarter of a sample. In every prefix of a ramp, the
number of each source's samples deviates from the integral of its share by less than 9/4: one sample within a step, one
at its ends, and the quarter.

Saved states are positions in this order, so all of it is computed in integers.
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

__all__ = ["Piece", "SegmentedOrder", "order_of"]

KEPT_POSITIONS = 1 << 24
"""Approximate number of positions of a ramp whose sources are kept in memory, in tables of 32 MB together."""


class Piece(NamedTuple):
    """Piece of a mixture's order: positions with constant weights, either a whole segment or one step of a ramp."""

    segment: int
    """Position at which the piece's segment begins."""
    start: int
    """Position at which the piece begins."""
    parts: tuple[int, ...]
    """Weight of each source as a whole number."""


class SegmentedOrder:
    """Function from positions of a mixture's order to the numbers of its sources, for weights that change."""

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

    def piece(self, position: int) -> Piece:
        """Return the piece of constant weights that contains a position."""
        number = bisect_right(self._starts, position) - 1
        start, order = self._starts[number], self._orders[number]
        if isinstance(order, _RampOrder):
            step, parts = order.step(position - start)
            return Piece(start, start + step, parts)
        return Piece(start, start, self._segments[number].parts)

    def shares(self, position: int) -> list[float]:
        """Return the share of the weights that each source has at a position; the shares sum up to 1."""
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
    """Return the order of a mixture whose weights these segments give."""
    return SegmentedOrder(segments)


def _order(segment: Segment) -> MixtureShares | _RampOrder:
    if segment.over:
        return _RampOrder(segment.begin, segment.parts, segment.over)
    return shares_of(segment.parts)


class _RampOrder:
    """Function from positions in a ramp, counted from its beginning, to the numbers of the sources.

    Args:
        begin, end: weights of the sources at both ends, as whole numbers.
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
        """Return the first position of the step that contains `position`, and the weights in that step."""
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
        """Return the number of samples that each source has given at position `bound` of the ramp, where a step ends.
        `given`: the numbers at the step's beginning."""
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
    """Integral of a source's share over a ramp, from its beginning to position x: (rate x + bend x^2) / whole, in
    samples."""

    rate: int
    bend: int
    whole: int

    def floor(self, position: int) -> int:
        return (self.rate * position + self.bend * position * position) // self.whole

    def ceil(self, position: int) -> int:
        return -(-(self.rate * position + self.bend * position * position) // self.whole)

    def deadline(self, count: int, length: int) -> int:
        """Return the first position at which the integral is at least `count`; `length` + 1 if it never is."""
        return bisect_left(range(length + 1), count, key=self.floor)
