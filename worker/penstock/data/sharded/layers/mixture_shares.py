"""Order of a mixture with constant weights: which source gives the sample at each position.

In every prefix of the order, the number of each source's samples must deviate from its share by less than one. So the
k-th sample of a source with share w must have a position p in a window: from the first p with w p > k - 1, to the last
p with w (p - 1) < k, which is called its deadline. The chairman assignment theorem says that positions within all
windows exist for any number of sources (R. Tijdeman, "The chairman assignment problem", 1980). The rule in its proof
gives each position to the sample with the earliest deadline among those whose windows have begun.

That rule alone is not enough here. Its order repeats after every period of positions (the sum of the weights as whole
numbers), and the positions go to the shards round robin. With two equal weights the period is 2, so with 60 shards even
shards would get all samples from one source and odd shards from the other, and half of each source would never be read.

So the samples of each period are in a different, random order. Each sample has a random target position in its window,
and each position goes to the sample with the earliest target. A target is delayed if its source has had the same
position of a period before: a little for each time. Deadlines decide only if one would otherwise be missed. That is so
if for some d the samples with deadlines up to d are as many as the positions left up to d.

The order is computed in tables of some thousand positions, when they are needed. After about a million positions it
repeats.

Saved states contain positions in this order. So it must never change, and all of it is computed in integers; a test
compares it with recorded values.
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
"""Largest exponent, up or down, in the text of a weight. That of a float is at most 324. A text such as 1e99999999
would take minutes and gigabytes to convert."""
LARGEST_PRINTED = 1e308
"""Largest sum of weights that an error prints as a number, because a float cannot be much larger."""
POSITIONS = 1 << 12
"""Smallest number of positions in one table of the order. With usual weights these are many periods, in which each
source comes at each position of the period about as often as its share says. A table takes 6 ms to make."""
ALL_POSITIONS = 1 << 20
"""Approximate number of positions after which the order repeats. The tables with all of them take 2 MB."""

_KEY = 0x6D69782D7475726E
_FRACTION_BITS = 24
_BACK = 2
"""Exponent for the delay of a sample's target position. The delay is 2^-2 (a quarter) of the mean distance between
samples of its source, for each time that the source has had this position of a period. With a smaller delay, some
positions of the period get a source half too often. With a larger one, sources alternate, as they do without random
targets."""

Weight = float | int | Fraction | Decimal


def parts_of(weights: Sequence[Weight], names: Sequence[str] | None = None) -> tuple[int, ...]:
    """Return the weights as whole numbers (parts) in the same ratio: 0.7, 0.2 and 0.1 become 7, 2 and 1.

    A float means the fraction that its decimal text says: 0.1 is exactly 1/10. If the parts would sum up to more than
    MAX_PARTS, they are rounded so that they sum up to MAX_PARTS; those with the largest remainders are rounded up.
    Raises InvalidArgumentError for invalid weights.

    `names`: names of the sources, for errors; None: errors have the sources' numbers, from 0.
    """
    keys: Sequence[Any] = range(len(weights)) if names is None else names
    exact = [_fraction(key, weight) for key, weight in zip(keys, weights, strict=True)]
    total = sum(exact)
    if total == 0:
        raise InvalidArgumentError(
            f"at least one weight must be above 0, got {list(weights)}. Give a source a larger weight"
        )
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
                f"weights[{key!r}] must be at least 1/{MAX_PARTS:,} of the sum of all weights ({_text(total)}), got "
                f"{weight}, which would be rounded to 0. Make it larger, or pass 0 to leave the source out"
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
            f"weights[{key!r}] must be 0 or from 1e-{MAX_EXPONENT} to 1e{MAX_EXPONENT}, got {weight!r}. Multiply or "
            "divide all weights by one number, or use 0 to leave the source out"
        )
    if exact < 0:
        raise InvalidArgumentError(f"weights[{key!r}] must be at least 0, got {weight}. Use 0 to leave the source out")
    return exact


def _text(number: Fraction) -> str:
    return f"{float(number):g}" if number < LARGEST_PRINTED else f"more than {LARGEST_PRINTED:g}"


def _reduced(parts: tuple[int, ...]) -> tuple[int, ...]:
    divisor = math.gcd(*parts)
    return tuple(part // divisor for part in parts)


@lru_cache(maxsize=64)
def shares_of(parts: tuple[int, ...]) -> MixtureShares:
    """Return the order of a mixture whose sources have these weights, which are whole numbers, at least one of them
    above 0. The latest 64 orders are kept, with their tables."""
    return MixtureShares(_reduced(parts))


class MixtureShares:
    """Order of a mixture with constant weights: from a position to the number of the source that gives the sample.
    `parts`: weight of each source, as whole numbers without a common divisor."""

    def __init__(self, parts: tuple[int, ...]) -> None:
        self._parts = parts
        self._only = next((number for number, part in enumerate(parts) if part == sum(parts)), None)
        """Number of the only source whose weight is above 0; None if there are several."""
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
class _Queue:
    """Samples of one source that wait for a position in a table, while `table_of` makes the table. Positions count from
    1 at the table's beginning."""

    source: int
    """Number of the source."""
    part: int
    """Number of samples that the source gives in each period."""
    due: list[int]
    """First position that each sample of the source may get."""
    deadline: list[int]
    """Last position that each sample of the source may get."""
    target: list[int]
    """Random target position of each sample of the source, in units of 2^-24 of a position."""
    next: int = 0
    """Number of samples of the source that have a position."""

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
    """Return a table of a mixture's order: the number of the source that gives the sample at each position.

    Args:
        parts: weight of each source, as whole numbers.
        positions: number of positions in the table, a multiple of the sum of `parts`.
        number: number of the table. Tables with different numbers have different random targets.
    """
    period = sum(parts)
    queues = [_Queue.of(source, part, period, positions // period, number) for source, part in enumerate(parts) if part]
    left = [0] * (positions + 1)
    """Number of samples that have no position so far, by deadline (the last position that a sample may get)."""
    for queue in queues:
        for deadline in queue.deadline:
            left[deadline] += 1
        queue.due.append(positions + 1)
    served: dict[tuple[int, int], int] = {}
    """Number of samples that have a position, by (position in the period, source)."""
    table = np.empty(positions, np.uint16)
    bound = positions
    """Deadline of the samples that may get a position now: only samples with deadlines up to `bound` may, because they
    need all positions that are left up to it. It is the last position, if there is no such need."""
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
    """Return the first position d before `deadline` for which the samples with deadlines up to d are as many as the
    positions from `position` to d, so that they need all of these; None if there is no such position. `left`: number of
    samples without a position, by deadline."""
    spare = 0
    for at in range(position, deadline):
        spare += 1 - left[at]
        if spare <= 0:
            return at
    return None
