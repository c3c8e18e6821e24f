"""Whose turn it is in a mixture: from the place of a sample to the source that it comes from.

Promised is that at every prefix each source's samples number less than one more or less than its share. So the k-th
sample of a source with share w has a window of places: from the first p with w p > k - 1, to the last with
w (p - 1) < k. Any filling of the places that gives each sample one within its window keeps the promise. That there is
one, for any number of sources, is the chairman assignment theorem (R. Tijdeman, "The chairman assignment problem",
1980), whose own rule fills by the earliest deadline among those that are due.

That rule alone would not do here. It repeats itself with the weights' period, and places go round the shards with a
period of their own: with two equal weights and 60 shards, even shards would get one source for ever and odd ones the
other, and half of each source would never be read. So each sample has a target drawn evenly from its share of the line,
which moves back the more often its source had this place of the period before, and the earliest target goes first. The
deadlines decide only where one could otherwise not be met; which is so when for some d as many samples with deadlines
up to d are left as there are places. Tables of some thousand places are made where they are needed, and after a million
places they come again.

An order is a promise, so all of this is integers, and the same for ever; a test holds it.
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

__all__ = ["MOST_PARTS", "MixtureTurns", "parts_of", "turns_of"]

MOST_PARTS = 1 << 16
"""Of all weights together."""
PLACES = 1 << 12
"""Of a table, at least: enough periods of usual weights for each place of a period to see each source as often as it
should. It takes 6 ms to make."""
ALL_PLACES = 1 << 20
"""Of all tables, about: 2 MB."""

_KEY = 0x6D69782D7475726E
_FRACTION_BITS = 24
_BACK = 2
"""A place had once too often moves a target back by a quarter of the distance between two samples of its source. Less
leaves places that see a source half too often; more makes it go in turns again."""

Weight = float | int | Fraction | Decimal


def parts_of(weights: Sequence[Weight]) -> tuple[int, ...]:
    """The weights as whole parts: 0.7, 0.2 and 0.1 are 7, 2 and 1.

    A weight is the fraction that its decimal text says. Where that takes more than MOST_PARTS parts in all, they are
    rounded to so many, the largest remainders up. Raises InvalidArgumentError for weights that cannot be meant.
    """
    exact = [_fraction(number, weight) for number, weight in enumerate(weights)]
    total = sum(exact)
    if total == 0:
        raise InvalidArgumentError(f"weights={list(weights)}: at least one must be more than 0")
    shares = [weight / total for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= MOST_PARTS:
        return tuple(int(share * period) for share in shares)
    parts = [int(share * MOST_PARTS) for share in shares]
    largest = sorted(range(len(parts)), key=lambda number: (parts[number] - shares[number] * MOST_PARTS, number))
    for number in largest[: MOST_PARTS - sum(parts)]:
        parts[number] += 1
    for number, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        if weight and not part:
            raise InvalidArgumentError(
                f"weights[{number}]={weight} of {float(total):g} in all is less than one part in {MOST_PARTS:,}, and "
                "would never be read. Make it larger, or 0"
            )
    return _reduced(tuple(parts))


def _fraction(number: int, weight: Any) -> Fraction:
    try:
        exact = Fraction(str(weight))
    except (ValueError, ZeroDivisionError):
        raise InvalidArgumentError(f"weights[{number}]={weight!r}: it must be a finite number") from None
    if exact < 0:
        raise InvalidArgumentError(f"weights[{number}]={weight}: it must not be negative")
    return exact


def _reduced(parts: tuple[int, ...]) -> tuple[int, ...]:
    divisor = math.gcd(*parts)
    return tuple(part // divisor for part in parts)


@lru_cache(maxsize=64)
def turns_of(parts: tuple[int, ...]) -> MixtureTurns:
    """The turns of sources with so many parts each, of which at least one is not 0."""
    return MixtureTurns(_reduced(parts))


class MixtureTurns:
    """From places to sources, for parts without a common divisor."""

    def __init__(self, parts: tuple[int, ...]) -> None:
        self._parts = parts
        self._only = next((number for number, part in enumerate(parts) if part == sum(parts)), None)
        """The source that has all turns, if there is one."""
        self._places = sum(parts) * -(-PLACES // sum(parts))
        self._count = ALL_PLACES // self._places
        self._tables: dict[int, npt.NDArray[np.uint16]] = {}

    def at(self, place: int) -> int:
        if self._only is not None:
            return self._only
        block, inside = divmod(place, self._places)
        return int(self._table(block % self._count)[inside])

    def many(self, places: Ints) -> Ints:
        if self._only is not None:
            return np.full(len(places), self._only, np.int64)
        found = np.empty(len(places), np.int64)
        blocks, inside = np.divmod(places, self._places)
        blocks %= self._count
        for number in np.unique(blocks):
            identity = blocks == number
            found[identity] = self._table(int(number))[inside[identity]]
        return found

    def _table(self, number: int) -> npt.NDArray[np.uint16]:
        table = self._tables.get(number)
        if table is None:
            table = self._tables[number] = _table(self._parts, self._places, number)
        return table


@dataclass
class _Line:
    """The samples of one source in a table, whose places are counted from 1."""

    source: int
    part: int
    due: list[int]
    deadline: list[int]
    target: list[int]
    """In 2^-24 of a place."""
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


def _table(parts: tuple[int, ...], places: int, number: int) -> npt.NDArray[np.uint16]:
    """The sources of so many places, a multiple of all parts together."""
    period = sum(parts)
    lines = [_Line.of(source, part, period, places // period, number) for source, part in enumerate(parts) if part]
    left = [0] * (places + 1)
    """Samples without a place, by deadline."""
    for line in lines:
        for deadline in line.deadline:
            left[deadline] += 1
        line.due.append(places + 1)
    served: dict[tuple[int, int], int] = {}
    """(Place of the period, source) -> how often it was had."""
    table = np.empty(places, np.uint16)
    bound = places
    """The places up to here are all needed by samples with deadlines up to here: no others may come before."""
    for place in range(1, places + 1):
        inside = place % period
        waiting = []
        for line in lines:
            at = line.next
            if line.due[at] <= place and line.deadline[at] <= bound:
                back = period * served.get((inside, line.source), 0) << _FRACTION_BITS - _BACK
                waiting.append((line.target[at] + back // line.part, line.source, line))
        waiting.sort()
        best = waiting[0][2]
        last = _tight(left, place, best.deadline[best.next])
        if last is not None:
            bound = last
            best = next(line for _, _, line in waiting if line.deadline[line.next] <= bound)
        left[best.deadline[best.next]] -= 1
        best.next += 1
        served[inside, best.source] = served.get((inside, best.source), 0) + 1
        table[place - 1] = best.source
        if place == bound:
            bound = places
    return table


def _tight(left: list[int], place: int, deadline: int) -> int | None:
    """The first d before the deadline for which all places from this one to d are needed by samples with deadlines up
    to d; None if there is none."""
    spare = 0
    for at in range(place, deadline):
        spare += 1 - left[at]
        if spare <= 0:
            return at
    return None
