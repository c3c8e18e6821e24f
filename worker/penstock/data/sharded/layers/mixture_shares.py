"""Schedule of a mixture: from the position of a sample to the source that it comes from.

The promise is that at every prefix the number of each source's samples deviates from its share by less than one. So the
k-th sample of a source with share w has a window of positions: from the first p with w p > k - 1, to the last with w (p
- 1) < k. Any assignment of the positions that gives each sample one within its window keeps the promise. The chairman
assignment theorem says that there is one for any number of sources (R. Tijdeman, "The chairman assignment problem",
1980). Its own rule assigns by the earliest deadline among the samples that are due.

That rule alone is not enough here. It has the period of the weights, and positions go to shards in turn, which has
another period. With two equal weights and 60 shards, even shards would always get one source and odd ones the other,
and half of each source would never be read. So each sample has a target position, drawn evenly from its window. A
target is postponed for each earlier time that its source had this position of the period, and the earliest target goes
first. Deadlines decide only if one could otherwise be missed: if for some d there are as many samples with deadlines up
to d as positions left. Tables of some thousand positions are made on demand, and after a million positions they repeat.

An order is a promise. So all of this is computed in integers and never changes; a test compares it with recorded
values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.data.ordering.permutation import Ints, mix
from penstock.proto.errors import InvalidArgumentError

__all__ = ["MAX_PARTS", "MixtureSchedule", "parts_of", "schedule_of"]

MAX_PARTS = 1 << 16
"""Largest sum of the whole numbers that weights are converted to."""
POSITIONS = 1 << 12
"""Smallest number of positions in a table. With usual weights these are enough periods for each position of a period to
get each source by its share. A table takes 6 ms to make."""
ALL_POSITIONS = 1 << 20
"""Approximate number of positions in all tables together: 2 MB."""

_KEY = 0x6D69782D7475726E
_FRACTION_BITS = 24
_BACK = 2
"""Exponent of a target's delay: each time that the source had this position of the period delays the target by a
quarter of the distance between the source's samples. A smaller delay gives some positions a source half too often; a
larger one makes sources alternate again."""

Weight = float | int | Fraction | Decimal


def parts_of(weights: Sequence[Weight]) -> tuple[int, ...]:
    """Return the weights as whole numbers in the same ratio: 0.7, 0.2 and 0.1 become 7, 2 and 1.

    A weight is the fraction in its decimal text. If that takes more than MAX_PARTS parts in all, they are rounded to
    that many, the largest remainders up. Raises InvalidArgumentError for invalid weights.
    """
    exact = [_fraction(number, weight) for number, weight in enumerate(weights)]
    total = sum(exact)
    if total == 0:
        raise InvalidArgumentError(f"at least one weight must be above 0, got {list(weights)}")
    shares = [weight / total for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= MAX_PARTS:
        return tuple(int(share * period) for share in shares)
    parts = [int(share * MAX_PARTS) for share in shares]
    largest = sorted(range(len(parts)), key=lambda number: (parts[number] - shares[number] * MAX_PARTS, number))
    for number in largest[: MAX_PARTS - sum(parts)]:
        parts[number] += 1
    for number, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        if weight and not part:
            raise InvalidArgumentError(
                f"weights[{number}] must be at least 1/{MAX_PARTS:,} of the sum of all weights, {float(total):g}, got "
                f"{weight}: its source would never be read. Make it larger, or 0"
            )
    return _reduced(tuple(parts))


def _fraction(number: int, weight: Any) -> Fraction:
    try:
        exact = Fraction(str(weight))
    except (ValueError, ZeroDivisionError):
        raise InvalidArgumentError(f"weights[{number}] must be a finite number, got {weight!r}") from None
    if exact < 0:
        raise InvalidArgumentError(f"weights[{number}] must be at least 0, got {weight}")
    return exact


def _reduced(parts: tuple[int, ...]) -> tuple[int, ...]:
    divisor = math.gcd(*parts)
    return tuple(part // divisor for part in parts)


@lru_cache(maxsize=64)
def schedule_of(parts: tuple[int, ...]) -> MixtureSchedule:
    """Return the schedule of sources with these parts, at least one of which is not 0."""
    return MixtureSchedule(_reduced(parts))


class MixtureSchedule:
    """Function from positions to sources, for parts without a common divisor."""

    def __init__(self, parts: tuple[int, ...]) -> None:
        self._parts = parts
        self._only = next((number for number, part in enumerate(parts) if part == sum(parts)), None)
        """Source that has all turns, if only one has a part."""
        self._positions = sum(parts) * -(-POSITIONS // sum(parts))
        self._count = ALL_POSITIONS // self._positions
        self._tables: dict[int, npt.NDArray[np.uint16]] = {}

    def at(self, position: int) -> int:
        """Return the number of the source that gives the sample at this position of the mixture's order."""
        if self._only is not None:
            return self._only
        block, inside = divmod(position, self._positions)
        return int(self._table(block % self._count)[inside])

    def many(self, positions: Ints) -> Ints:
        """Return the sources at these positions."""
        if self._only is not None:
            return np.full(len(positions), self._only, np.int64)
        found = np.empty(len(positions), np.int64)
        blocks, inside = np.divmod(positions, self._positions)
        blocks %= self._count
        for number in np.unique(blocks):
            chosen = blocks == number
            found[chosen] = self._table(int(number))[inside[chosen]]
        return found

    def _table(self, number: int) -> npt.NDArray[np.uint16]:
        table = self._tables.get(number)
        if table is None:
            table = self._tables[number] = _table(self._parts, self._positions, number)
        return table


@dataclass
class _Line:
    """Samples of one source in a table, whose positions are counted from 1."""

    source: int
    part: int
    due: list[int]
    deadline: list[int]
    target: list[int]
    """Positions drawn for the samples of the source within their windows, in units of 2^-24 of a position."""
    next: int = 0

    @staticmethod
    def of(source: int, part: int, period: int, periods: int, number: int) -> _Line:
        rank = np.arange(part * periods)
        drawn = (mix(_KEY, number, source, rank) >> np.uint64(64 - _FRACTION_BITS)).astype(np.int64)
        return _Line(
            source,
            part,
            due=(rank * period // part + 1).tolist(),
            deadline=(-(-(rank + 1) * period // part)).tolist(),
            target=(((rank << _FRACTION_BITS) + drawn) * period // part).tolist(),
        )


def _table(parts: tuple[int, ...], positions: int, number: int) -> npt.NDArray[np.uint16]:
    """Return the sources of `positions` positions, a multiple of the sum of `parts`."""
    period = sum(parts)
    lines = [_Line.of(source, part, period, positions // period, number) for source, part in enumerate(parts) if part]
    left = [0] * (positions + 1)
    """Number of samples that have no position yet, by deadline."""
    for line in lines:
        for deadline in line.deadline:
            left[deadline] += 1
        line.due.append(positions + 1)
    served: dict[tuple[int, int], int] = {}
    """Number of samples that each (position of the period, source) got so far."""
    table = np.empty(positions, np.uint16)
    bound = positions
    """Position up to which only samples with deadlines up to it may be placed, because they need all positions
    there."""
    for position in range(1, positions + 1):
        inside = position % period
        waiting = []
        for line in lines:
            at = line.next
            if line.due[at] <= position and line.deadline[at] <= bound:
                back = period * served.get((inside, line.source), 0) << _FRACTION_BITS - _BACK
                waiting.append((line.target[at] + back // line.part, line.source, line))
        waiting.sort()
        best = waiting[0][2]
        last = _tight(left, position, best.deadline[best.next])
        if last is not None:
            bound = last
            best = next(line for _, _, line in waiting if line.deadline[line.next] <= bound)
        left[best.deadline[best.next]] -= 1
        best.next += 1
        served[inside, best.source] = served.get((inside, best.source), 0) + 1
        table[position - 1] = best.source
        if position == bound:
            bound = positions
    return table


def _tight(left: list[int], position: int, deadline: int) -> int | None:
    """Return the first d before the deadline for which samples with deadlines up to d need all positions from this one
    to d; None if there is none."""
    spare = 0
    for at in range(position, deadline):
        spare += 1 - left[at]
        if spare <= 0:
            return at
    return None
