"""Interleaving of sequences, so that every prefix has each one's share: a function from position to (sequence, unit). A
unit is a sample, a batch or a group of samples.

The sequences are the leaves of a Huffman tree ("A Method for the Construction of Minimum-Redundancy Codes", 1952). Of
the first x of a node's n units, x l/n, rounded half up, belong to its left child of l units: an exact integer division
a level.

Rounding costs 1/2 on each level, and the parent's deviation is scaled by the child's share. So at depth d it is at most
1/2 (1 + w/p1 + w/p2 + ... ), with w for the sequence's units and p1, p2 ... for its ancestors' below the root. In
Huffman's tree p1 >= w, p2 >= p1 + w, and so on, at least like Fibonacci's numbers, whose reciprocals sum up to 2.36. So
**every prefix deviates by less than 1.68 units**; of two sequences by at most 1/2. (Unit j of n at (j + 1/2)/n deviates
by half of the number of sequences.)
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from penstock.data.ordering.permutation import Ints

MAX_DEVIATION = 1.68
"""Exclusive bound of the deviation of a sequence from its share in any prefix."""


@dataclass(frozen=True)
class _Leaf:
    number: int
    units: int


@dataclass(frozen=True)
class _Inner:
    left: _Leaf | _Inner
    right: _Leaf | _Inner
    units: int

    def left_of(self, units: Ints) -> Ints:
        """Return how many of the node's first x = `units` belong to its left child: floor(x l / n + 1/2)."""
        n, part = self.units, self.left.units
        found: Ints = np.floor(units * (part / n) + 0.5).astype(np.int64)
        # A float has 53 bits, so for n < 2^48 the quotient is off by less than one. The division's remainder is small:
        # the remainder survives the overflow of the products, and shows which candidate is exact.
        with np.errstate(over="ignore"):
            rest = 2 * part * units + n - found * (2 * n)
        return found - (rest < 0) + (rest >= 2 * n)


class Interleaving:
    """The numbers of units must sum up to less than 2^48."""

    def __init__(self, units: Sequence[int]) -> None:
        order = count()
        nodes: list[tuple[int, int, _Leaf | _Inner]] = [
            (int(own), next(order), _Leaf(number, int(own))) for number, own in enumerate(units) if own
        ]
        heapq.heapify(nodes)
        while len(nodes) > 1:
            (less, _, small), (more, _, large) = heapq.heappop(nodes), heapq.heappop(nodes)
            heapq.heappush(nodes, (less + more, next(order), _Inner(large, small, less + more)))
        self._root = nodes[0][2] if nodes else None
        self.units = self._root.units if self._root is not None else 0

    def split(self, positions: Ints) -> Iterator[tuple[int, Ints, Ints]]:
        """Yield for each sequence with units at these positions: (its number, indexes in `positions`, its units
        there)."""
        if self._root is not None and len(positions):
            yield from _split(self._root, np.arange(len(positions)), positions)


def _split(node: _Leaf | _Inner, which: Ints, positions: Ints) -> Iterator[tuple[int, Ints, Ints]]:
    while isinstance(node, _Inner):
        before, after = node.left_of(positions), node.left_of(positions + 1)
        goes_left = after > before
        lefts, rights = np.flatnonzero(goes_left), np.flatnonzero(~goes_left)
        if lefts.size:
            yield from _split(node.left, which[lefts], before[lefts])
        if not rights.size:
            return
        node, which, positions = node.right, which[rights], (positions - before)[rights]
    yield node.number, which, positions
