"""Order of a mixture: which source gives the sample at each position.

**Constant weights.** In every prefix of the order, the number of each source's samples must deviate from its share by
less than one. So the k-th sample of a source with share w must have a position p in a window: from the first p with w p
> k - 1, to the last p with w (p - 1) < k, its deadline. Such positions exist for any number of sources (R. Tijdeman,
"The chairman assignment problem", 1980); the proof's rule gives each position to the sample with the earliest deadline
among those whose windows have begun.

That order would repeat after every period (the sum of the weights as whole numbers), and positions go to the shards
round robin: with two equal weights, even shards would get all samples from one source, and half of each source would
never be read. So each period is in a different, random order: each sample has a random target position in its window,
and each position goes to the earliest target. A target is delayed a little for each time that its source had the same
position of a period before. Deadlines decide only if one would otherwise be missed: if for some d the samples with
deadlines up to d are as many as the positions left up to d. Tables of the order are computed when needed.

**Changing weights.** The order consists of segments, in which the weights are constant or change linearly (a ramp). A
ramp is divided into steps, whose weights are the numbers of samples that the sources give in them, so that at the end
of each step a source has given the integral of its share so far, rounded up or down by the earliest deadline. A ramp of
L samples has about sqrt(L / 2) steps, so that a source deviates from the integral by less than 9/4: one sample within a
step, one at its ends, and a quarter because its weights are constant.

Saved states contain positions in this order. So it must never change, and all of it is computed in integers; a test
compares it with recorded values.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.data.ordering.permutation import Ints, gathered, mix
from penstock.data.sharded.layers.mixture_schedule import MAX_PARTS, Segment, reduced

KEPT_POSITIONS = 1 << 24
"""Approximate number of positions whose sources a ramp keeps (32 MB). The oldest are computed again."""


class Phase(NamedTuple):
    """Range of positions in which a mixture's weights are constant: a whole segment, or one step of a ramp."""

    segment: int
    """First position of the segment that contains the phase."""
    start: int
    parts: tuple[int, ...]


class SegmentedOrder:
    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = tuple(segments)
        self._starts = [segment.start for segment in segments]
        self._orders = [_order(segment) for segment in segments]

    def at(self, position: int) -> int:
        number = bisect_right(self._starts, position) - 1
        return self._orders[number].at(position - self._starts[number])

    def many(self, positions: Ints) -> Ints:
        numbers = np.searchsorted(self._starts, positions, "right") - 1
        return gathered(numbers, positions, lambda number, at: self._orders[number].many(at - self._starts[number]))

    def phase(self, position: int) -> Phase:
        number = bisect_right(self._starts, position) - 1
        start, order = self._starts[number], self._orders[number]
        if isinstance(order, _RampOrder):
            step, parts = order.step(position - start)
            return Phase(start, start + step, parts)
        return Phase(start, start, self._segments[number].parts)

    def shares(self, position: int) -> list[float]:
        """Return each source's share of all weights at a position; within a ramp, on the line between its ends."""
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
    """The latest 64 are kept, because all cursors of a mixture use the same one."""
    return SegmentedOrder(segments)


def _order(segment: Segment) -> MixtureShares | _RampOrder:
    if segment.over:
        return _RampOrder(segment.begin, segment.parts, segment.over)
    return shares_of(segment.parts)


class _RampOrder:
    """Order within a ramp of `length` samples; positions count from its beginning."""

    def __init__(self, begin: tuple[int, ...], end: tuple[int, ...], length: int) -> None:
        size = min(MAX_PARTS, math.isqrt(2 * length))
        count = -(-length // size)
        self._bounds = [length * number // count for number in range(count + 1)]
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
        numbers = np.searchsorted(self._bounds, positions, "right") - 1
        return gathered(numbers, positions, lambda number, at: self._table(number)[at - self._bounds[number]])

    def step(self, position: int) -> tuple[int, tuple[int, ...]]:
        """Return the first position of the step that contains `position`, and its weights."""
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
        if not self._parts:
            given = [0] * len(self._integrals)
            for bound in self._bounds[1:]:
                until = self._until(given, bound)
                self._parts.append(tuple(after - before for before, after in zip(given, until, strict=True)))
                given = until
        return self._parts

    def _until(self, given: Sequence[int], bound: int) -> list[int]:
        """Return the samples that each source has given up to a step's end `bound`. `given`: up to its beginning."""
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
    """Exact number of samples due from the ramp's beginning to position x: (rate x + bend x^2) / whole."""

    rate: int
    bend: int
    whole: int

    def floor(self, position: int) -> int:
        return (self.rate * position + self.bend * position * position) // self.whole

    def ceil(self, position: int) -> int:
        return -(-(self.rate * position + self.bend * position * position) // self.whole)

    def deadline(self, count: int, length: int) -> int:
        """Return the first position at which the integral is at least `count`; `length` + 1 if there is none."""
        return bisect_left(range(length + 1), count, key=self.floor)


POSITIONS = 1 << 12
"""Smallest number of positions in one table: usually many periods, in which each source comes at each position of the
period about as often as its share says. A table takes 6 ms to make."""
ALL_POSITIONS = 1 << 20
"""Approximate number of positions after which the order repeats. Their tables take 2 MB."""

_KEY = 0x6D69782D7475726E
_FRACTION_BITS = 24
_BACK = 2
"""Exponent for the delay of a target: a quarter of the mean distance between samples of its source, for each time that
it has had this position. With less, some positions get a source half too often; with more, sources alternate."""


@lru_cache(maxsize=64)
def shares_of(parts: tuple[int, ...]) -> MixtureShares:
    return MixtureShares(reduced(parts))


class MixtureShares:
    """Order of a mixture with constant weights `parts`, whole numbers without a common divisor."""

    def __init__(self, parts: tuple[int, ...]) -> None:
        self._parts = parts
        self._only = next((number for number, part in enumerate(parts) if part == sum(parts)), None)
        self._positions = sum(parts) * -(-POSITIONS // sum(parts))
        self._count = ALL_POSITIONS // self._positions
        self._tables: dict[int, npt.NDArray[np.uint16]] = {}

    def at(self, position: int) -> int:
        if self._only is not None:
            return self._only
        block, inside = divmod(position, self._positions)
        return int(self._table(block % self._count)[inside])

    def many(self, positions: Ints) -> Ints:
        if self._only is not None:
            return np.full(len(positions), self._only, np.int64)
        blocks, inside = np.divmod(positions, self._positions)
        return gathered(blocks % self._count, inside, lambda number, at: self._table(number)[at])

    def _table(self, number: int) -> npt.NDArray[np.uint16]:
        table = self._tables.get(number)
        if table is None:
            table = self._tables[number] = table_of(self._parts, self._positions, number)
        return table


@dataclass
class _Queue:
    """Samples of one source that wait for a position in a table. Positions count from 1."""

    source: int
    part: int
    due: list[int]
    """First position that each sample may get."""
    deadline: list[int]
    target: list[int]
    """Random target position of each sample, in units of 2^-24 of a position."""
    next: int = 0

    @staticmethod
    def of(source: int, part: int, period: int, periods: int, number: int) -> _Queue:
        rank = np.arange(part * periods)
        drawn = (mix(_KEY, number, source, rank) >> np.uint64(64 - _FRACTION_BITS)).astype(np.int64)
        return _Queue(
            source,
            part,
            due=(rank * period // part + 1).tolist(),
            deadline=(-(-(rank + 1) * period // part)).tolist(),
            target=(((rank << _FRACTION_BITS) + drawn) * period // part).tolist(),
        )


def table_of(parts: tuple[int, ...], positions: int, number: int) -> npt.NDArray[np.uint16]:
    """Return table `number`: the source at each of `positions` positions, a multiple of sum(parts)."""
    period = sum(parts)
    queues = [_Queue.of(source, part, period, positions // period, number) for source, part in enumerate(parts) if part]
    left = [0] * (positions + 1)
    """Number of samples that have no position so far, by deadline."""
    for queue in queues:
        for deadline in queue.deadline:
            left[deadline] += 1
        queue.due.append(positions + 1)
    served: dict[tuple[int, int], int] = {}
    """Number of samples that have a position, by (position in the period, source)."""
    table = np.empty(positions, np.uint16)
    bound = positions
    """Only samples with deadlines up to this may get a position now, because they need all that are left."""
    for position in range(1, positions + 1):
        inside = position % period
        waiting = []
        for queue in queues:
            at = queue.next
            if queue.due[at] <= position and queue.deadline[at] <= bound:
                back = period * served.get((inside, queue.source), 0) << _FRACTION_BITS - _BACK
                waiting.append((queue.target[at] + back // queue.part, queue.source, queue))
        waiting.sort()
        best = waiting[0][2]
        last = _tight(left, position, best.deadline[best.next])
        if last is not None:
            bound = last
            best = next(queue for _, _, queue in waiting if queue.deadline[queue.next] <= bound)
        left[best.deadline[best.next]] -= 1
        best.next += 1
        served[inside, best.source] = served.get((inside, best.source), 0) + 1
        table[position - 1] = best.source
        if position == bound:
            bound = positions
    return table


def _tight(left: list[int], position: int, deadline: int) -> int | None:
    """Return the first d below `deadline` for which the samples due by d need all positions from `position` to d."""
    spare = 0
    for at in range(position, deadline):
        spare += 1 - left[at]
        if spare <= 0:
            return at
    return None
