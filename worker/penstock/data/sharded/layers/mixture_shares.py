"""Shares of a mixture's sources under constant weights: which source gives the sample at each position of the order.

In every prefix of the order, the number of each source's samples must deviate from its share by less than one. So the
k-th sample of a source with share w has a window of positions: from the first p with w p > k - 1, to the last with w (p
- 1) < k. An assignment that gives each sample a position within its window meets this condition. The chairman
assignment theorem says that such an assignment exists for any number of sources (R. Tijdeman, "The chairman assignment
problem", 1980). The rule in its proof gives each position to the sample with the earliest deadline among those whose
windows have begun.

That rule alone is not enough here. Its assignment repeats with the period of the weights, and positions go to shards in
turn, with another period. With two equal weights and 60 shards, even shards would always get one source and odd ones
the other, and half of each source would never be read. So each sample has a target position, drawn evenly from its
window. A target is delayed for each earlier time that its source got the same position of the period. Each position
goes to the sample with the earliest target. Deadlines decide only if one would otherwise be missed: if for some d there
are as many samples with deadlines up to d as positions left up to d. Tables of some thousand positions are made on
demand, and after a million positions they repeat.

Saved states are positions in this order. So all of it is computed in integers and must never change; a test compares it
with recorded values.
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

__all__ = ["MAX_PARTS", "MixtureShares", "parts_of", "shares_of", "table_of"]

MAX_PARTS = 1 << 16
"""Largest sum of the whole numbers (parts) to which weights are converted."""
MAX_EXPONENT = 400
"""Largest exponent in the text of a weight; that of a float is at most 324. A text like 1e99999999 would take minutes
and gigabytes to convert."""
MOST = 1e308
"""Largest sum of weights that an error prints as a number; few floats are larger."""
POSITIONS = 1 << 12
"""Smallest number of positions in a table of sources. With usual weights, such a table has enough periods for each
position of the period to get each source by its share. Making a table takes 6 ms."""
ALL_POSITIONS = 1 << 20
"""Approximate number of positions in all tables together, which take 2 MB."""

_KEY = 0x6D69782D7475726E
_FRACTION_BITS = 24
_BACK = 2
"""Exponent that sets the delay of targets: a target is delayed by 2^-2, a quarter, of the distance between its source's
samples, for each time that the source got the same position of the period. A smaller delay gives some positions a
source half too often; a larger one makes sources alternate again."""

Weight = float | int | Fraction | Decimal


def parts_of(weights: Sequence[Weight], names: Sequence[str] | None = None) -> tuple[int, ...]:
    """Return the weights as whole numbers (parts) in the same ratio: 0.7, 0.2 and 0.1 become 7, 2 and 1.

    `names`: names of the sources, for errors; None: errors number them.

    A weight is taken as the fraction in its decimal text. If the parts would sum up to more than MAX_PARTS, the weights
    are rounded so that they sum up to MAX_PARTS; those with the largest remainders are rounded up. Raises
    InvalidArgumentError for invalid weights.
    """
    keys: Sequence[Any] = range(len(weights)) if names is None else names
    exact = [_fraction(key, weight) for key, weight in zip(keys, weights, strict=True)]
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
    for key, part, weight in zip(keys, parts, weights, strict=True):
        if weight and not part:
            raise InvalidArgumentError(
                f"weights[{key!r}] must be at least 1/{MAX_PARTS:,} of the sum of all weights, {_text(total)}, got "
                f"{weight}, with which its source would never be read. Make it larger, or 0"
            )
    return _reduced(tuple(parts))


def _fraction(key: int | str, weight: Any) -> Fraction:
    text = str(weight)
    try:
        exponent = int(text.lower().partition("e")[2] or 0)
        exact = Fraction(text if abs(exponent) <= MAX_EXPONENT else 0)
    except (ValueError, ZeroDivisionError):
        raise InvalidArgumentError(
            f"weights[{key!r}] must be a finite number, got {weight!r}. Correct the weight"
        ) from None
    if abs(exponent) > MAX_EXPONENT:
        raise InvalidArgumentError(
            f"weights[{key!r}] must have an exponent from -{MAX_EXPONENT} to {MAX_EXPONENT}, got {weight!r}. Divide "
            "all weights by a common number"
        )
    if exact < 0:
        raise InvalidArgumentError(f"weights[{key!r}] must be at least 0, got {weight}. Use 0 to leave the source out")
    return exact


def _text(number: Fraction) -> str:
    return f"{float(number):g}" if number < MOST else f"more than {MOST:g}"


def _reduced(parts: tuple[int, ...]) -> tuple[int, ...]:
    divisor = math.gcd(*parts)
    return tuple(part // divisor for part in parts)


@lru_cache(maxsize=64)
def shares_of(parts: tuple[int, ...]) -> MixtureShares:
    """Return the shares of sources with these weights (whole numbers, at least one of them above 0)."""
    return MixtureShares(_reduced(parts))


class MixtureShares:
    """Function from positions of a mixture's order to the numbers of its sources, under constant weights. `parts`:
    weights as whole numbers without a common divisor."""

    def __init__(self, parts: tuple[int, ...]) -> None:
        self._parts = parts
        self._only = next((number for number, part in enumerate(parts) if part == sum(parts)), None)
        """Number of the source that gives all samples, if only one has a weight above 0; None otherwise."""
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
        """Return, for each of these positions, the number of the source that gives the sample there."""
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
            table = self._tables[number] = table_of(self._parts, self._positions, number)
        return table


@dataclass
class _Line:
    """Queue of one source's samples while `table_of` decides which source gives each sample of a period. The places in
    the period are counted from 1."""

    source: int
    """Number of the source whose samples these are."""
    part: int
    """Number of samples that the source gives in each period of the weights."""
    due: list[int]
    """First place in the period that each of the source's samples may get."""
    deadline: list[int]
    """Last place in the period that each of the source's samples may get."""
    target: list[int]
    """Target place of each sample of the source, drawn between the first and the last one, in units of 2^-24 of a
    place."""
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


def table_of(parts: tuple[int, ...], positions: int, number: int) -> npt.NDArray[np.uint16]:
    """Return table number `number`: for each of its `positions` positions, the number of the source that gives the
    sample there. `positions` is a multiple of the sum of `parts`."""
    period = sum(parts)
    lines = [_Line.of(source, part, period, positions // period, number) for source, part in enumerate(parts) if part]
    left = [0] * (positions + 1)
    """Number of samples without a position so far, by deadline (the last position that a sample may get)."""
    for line in lines:
        for deadline in line.deadline:
            left[deadline] += 1
        line.due.append(positions + 1)
    served: dict[tuple[int, int], int] = {}
    """Number of samples placed so far, by (position of the period, source)."""
    table = np.empty(positions, np.uint16)
    bound = positions
    """Deadline up to which the samples need all positions that are left up to it. Until then only these samples may be
    placed."""
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
    """Return the first position d before `deadline` such that all positions from `position` to d are needed by samples
    with deadlines up to d; None if there is no such position. `left`: number of samples without a position, by
    deadline."""
    spare = 0
    for at in range(position, deadline):
        spare += 1 - left[at]
        if spare <= 0:
            return at
    return None
