"""How several sequences take turns, each with its share at every prefix: a function from a turn to (sequence, place).

The sequences are the leaves of a binary tree, built as D. A. Huffman did ("A Method for the Construction of Minimum-
Redundancy Codes", 1952): the two smallest are joined again and again. Of the first x units of an inner node its left
child has l/n of them, rounded, half up, where the node has n units in all and the child l. So it is a matter of one
division on each level, in exact integers, and each sequence has got all of its units at the end.

How near to its share is a sequence? Rounding costs 1/2 on each level, and what the parent is off by comes down by the
child's share of the parent. So at depth d it is at most 1/2 (1 + w/p1 + w/p2 + ... ), with w for the sequence's units
and p1, p2 ... for its ancestors' below the root. In Huffman's tree p1 >= w, p2 >= p1 + w, and so on: they grow at
least like Fibonacci's numbers, of which the reciprocals 1 + 1/2 + 1/3 + 1/5 + ... sum up to 2.36. So **no prefix is off
by as much as 1.68 units**, for any number of sequences; for two it is 1/2. (Giving j + 1/2 of n units each its moment,
as is often done, is off by half of the number of sequences: of one of 50% and fifty of 1%, the first 25 are all of
the first.)
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from penstock.data.ordering.permutation import Ints

__all__ = ["FARTHEST_OFF", "Interleaving"]

FARTHEST_OFF = 1.68
"""Units that a sequence is ahead of its share, or behind, at most."""


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
        """How many of the first `units` units are the left child's: floor(x l / n + 1/2)."""
        n, part = self.units, self.left.units
        found: Ints = np.floor(units * (part / n) + 0.5).astype(np.int64)
        # Floats of 53 bits are off by less than one for n < 2^48. The rest of the division is small, so that products
        # that overflow do no harm to it, and it tells the one that is exact.
        with np.errstate(over="ignore"):
            rest = 2 * part * units + n - found * (2 * n)
        exact: Ints = found - (rest < 0) + (rest >= 2 * n)
        return exact


class Interleaving:
    """`units`: of each sequence; fewer than 2^48 in all."""

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
        """Of all sequences."""

    def of(self, turns: Ints) -> Iterator[tuple[int, Ints, Ints]]:
        """(sequence, which of the turns are its, the how-manieth of its units each is)."""
        if self._root is not None and len(turns):
            yield from _of(self._root, np.arange(len(turns)), turns)


def _of(node: _Leaf | _Inner, which: Ints, turns: Ints) -> Iterator[tuple[int, Ints, Ints]]:
    while isinstance(node, _Inner):
        before, behind = node.left_of(turns), node.left_of(turns + 1)
        goes_left = behind > before
        lefts, rights = np.flatnonzero(goes_left), np.flatnonzero(~goes_left)
        if lefts.size:
            yield from _of(node.left, which[lefts], before[lefts])
        if not rights.size:
            return
        node, which, turns = node.right, which[rights], (turns - before)[rights]
    yield node.number, which, turns
