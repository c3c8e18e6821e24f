"""Skipped samples, left out of an order, for example because training failed on them. A sample's number counts over all
epochs: epoch * samples of an epoch + position. Skips change no other number, and so no position's meaning. A kept
sample's rank counts the kept ones before it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np

from penstock.data.ordering.permutation import Ints
from penstock.proto.errors import InvalidArgumentError

Ranges = tuple[tuple[int, int], ...]
"""(first, end), ascending, none empty, with gaps."""

MAX_DISTANCE = 1 << 61
"""Limit on a skipped sample's distance from an epoch's beginning: 64 bits then suffice for all sums."""


def ranges_of(skip: Iterable[range]) -> Ranges:
    """Sort the ranges, and join them where they touch."""
    found = []
    for piece in skip:
        if not isinstance(piece, range) or piece.step != 1 or not 0 <= piece.start <= piece.stop <= MAX_DISTANCE:
            raise InvalidArgumentError(f"skip must hold ranges of sample numbers, as range(64, 128), got {piece!r}")
        if piece:
            found.append((piece.start, piece.stop))
    joined: list[tuple[int, int]] = []
    for first, end in sorted(found):
        if joined and first <= joined[-1][1]:
            before, after = joined.pop()
            first, end = before, max(end, after)
        joined.append((first, end))
    return tuple(joined)


def added_before(saved: Ranges, now: Ranges, position: int) -> tuple[int, int] | None:
    """Return the first range before `position` skipped in `now` but not in `saved`."""
    ends = [end for _, end in saved]
    for first, end in now:
        index = bisect_right(ends, first)
        if index < len(saved) and saved[index][0] <= first:
            first = ends[index]  # there is a gap between ranges: the number at a range's end is not skipped
            index += 1
        end = min(end, position, *(begin for begin, _ in saved[index : index + 1]))
        if first < end:
            return first, end
    return None


class KeptPositions:
    """Conversion between positions of an epoch and ranks of kept samples, from 0 in it; earlier epochs have negative
    ranks."""

    def __init__(self, ranges: Sequence[tuple[int, int]], begin: int) -> None:
        """`begin`: number of the epoch's first sample."""
        near = [(first - begin, end - begin) for first, end in ranges if -MAX_DISTANCE < first - begin < MAX_DISTANCE]
        self._firsts = [first for first, _ in near]
        self._ends = [end for _, end in near]
        before = sum(max(0, min(end, 0) - first) for first, end in near)
        self._out = list(accumulate((end - first for first, end in near), initial=-before))
        """Samples skipped before each range since the epoch's beginning; then up to the end of the last."""
        ranks = [first - out for first, out in zip(self._firsts, self._out, strict=False)]
        self._arrays = (np.array(ranks, np.int64), np.array(self._out, np.int64)) if near else None

    def rank(self, position: int) -> int:
        """Return the rank of the first kept sample from `position` on."""
        index = bisect_right(self._ends, position)
        inside = max(0, position - self._firsts[index]) if index < len(self._ends) else 0
        return position - self._out[index] - inside

    def positions(self, ranks: Ints) -> Ints:
        if self._arrays is None:
            return ranks
        firsts, out = self._arrays
        return ranks + out[np.searchsorted(firsts, ranks, side="right")]
