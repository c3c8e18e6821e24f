"""Samples that are left out of an order, for a run that goes around data on which it went wrong.

What is left out is named by number, counted from the run's beginning over all epochs: epoch * samples of an epoch +
position. The order is the one without it, with these numbers taken away; so a place in it stays a number, and means the
same whatever is left out behind it. Ranks count what is left.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np

from penstock.data.ordering.permutation import Ints
from penstock.proto.errors import InvalidArgumentError

__all__ = ["KeptPositions", "Ranges", "added_behind", "ranges_of"]

Ranges = tuple[tuple[int, int], ...]
"""(first, behind the last), in order, neither empty nor touching each other."""

FARTHEST = 1 << 61
"""From an epoch's beginning, of what is computed with in 64 bits."""


def ranges_of(skip: Iterable[range]) -> Ranges:
    """The same numbers as `skip` names. Raises InvalidArgumentError for what is no range of sample numbers."""
    found = []
    for piece in skip:
        if not isinstance(piece, range) or piece.step != 1 or not 0 <= piece.start <= piece.stop <= FARTHEST:
            raise InvalidArgumentError(f"skip={piece!r}: each is a range of sample numbers, such as range(6400, 12800)")
        if piece:
            found.append((piece.start, piece.stop))
    joined: list[tuple[int, int]] = []
    for first, end in sorted(found):
        if joined and first <= joined[-1][1]:
            before, behind = joined.pop()
            first, end = before, max(end, behind)
        joined.append((first, end))
    return tuple(joined)


def added_behind(saved: Ranges, now: Ranges, place: int) -> tuple[int, int] | None:
    """The first numbers before `place` that are left out now and were not then."""
    ends = [end for _, end in saved]
    for first, end in now:
        index = bisect_right(ends, first)
        if index < len(saved) and saved[index][0] <= first:
            first = ends[index]  # they do not touch each other: behind it something was not left out
        if first < min(end, place):
            return first, min(end, place)
    return None


class KeptPositions:
    """Positions relative to an epoch's beginning, and their ranks among those that are not left out. Rank 0 is that of
    the first one from there on; earlier ones are negative."""

    def __init__(self, ranges: Sequence[tuple[int, int]], begin: int) -> None:
        """`begin`: number of the epoch's first sample."""
        near = [(first - begin, end - begin) for first, end in ranges if -FARTHEST < first - begin < FARTHEST]
        self._firsts = [first for first, _ in near]
        self._ends = [end for _, end in near]
        before = sum(max(0, min(end, 0) - first) for first, end in near)
        self._out = list(accumulate((end - first for first, end in near), initial=-before))
        """How many are left out before each range, and behind the last; counted from the epoch's beginning."""
        ranks = [first - out for first, out in zip(self._firsts, self._out, strict=False)]
        self._arrays = (np.array(ranks, np.int64), np.array(self._out, np.int64)) if near else None

    def rank(self, position: int) -> int:
        """Of the first position from this one on that is not left out."""
        index = bisect_right(self._ends, position)
        inside = max(0, position - self._firsts[index]) if index < len(self._ends) else 0
        return position - self._out[index] - inside

    def positions(self, ranks: Ints) -> Ints:
        if self._arrays is None:
            return ranks
        firsts, out = self._arrays
        found: Ints = ranks + out[np.searchsorted(firsts, ranks, side="right")]
        return found
