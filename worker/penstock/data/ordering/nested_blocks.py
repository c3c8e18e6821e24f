"""Shuffle of a few files that consist of blocks, such as row groups. First the blocks are permuted. Then samples are
permuted within groups of blocks that are neighbours after this permutation.

    index -> group of permuted pieces -> permuted within the group -> piece -> index in the sequence

A block is decoded as a whole, and a reader needs only the blocks of one group in memory. So shuffled reading decodes
each block once, as sequential reading does.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.data.ordering.permutation import Ints, mix, permuted

__all__ = ["NestedBlocks"]

_PIECES, _SAMPLES = 1, 2
"""Constants mixed into the key, so that pieces and samples are permuted differently."""


class NestedBlocks:
    """Order of the samples in one range of a sequence. The range consists of pieces. A piece is a whole block of a
    file, or the part of a block that lies within the range."""

    def __init__(self, begins: Ints, ends: Ints, *, key: int, block: int | None) -> None:
        """
        Args:
            begins, ends: index in the sequence at which each piece begins and ends, ascending and without gaps; shape
                (pieces,), at least one piece.
            key: key of the range's permutations, 64 bits.
            block: approximate number of samples that are permuted with each other; None: all of them.
        """
        count = len(begins)
        self._low = int(begins[0])
        pieces = permuted(np.arange(count), count, mix(key, _PIECES))
        sizes = (ends - begins)[pieces]
        self._begins: Ints = begins[pieces]
        self._bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        """Number of samples before each piece, when the pieces are in permuted order; then the number of all samples.
        Shape (pieces + 1,)."""
        mean = int(self._bounds[-1]) / count
        together = count if block is None else max(1, min(count, round(block / mean)))
        firsts = np.append(np.arange(0, count, together), count)
        self._firsts: Ints = firsts
        """Number, in permuted order, of the first piece of each group of pieces whose samples are permuted together;
        then the number of pieces. Shape (groups + 1,)."""
        self._group_bounds: Ints = self._bounds[firsts]
        self._key = int(mix(key, _SAMPLES))

    def indexes(self, at: Ints) -> Ints:
        """Return, for each index `at` of the sequence, the sample that the permutation puts there, as the index that
        this sample had before. The indexes must lie in this range."""
        inside = at - self._low
        group = self._group(inside)
        low = self._group_bounds[group]
        inside = low + permuted(inside - low, self._group_bounds[group + 1] - low, mix(self._key, group))
        piece = np.searchsorted(self._bounds, inside, side="right") - 1
        found: Ints = self._begins[piece] + inside - self._bounds[piece]
        return found

    def blocks(self, at: Ints) -> Iterator[tuple[int, Ints]]:
        """Yield (place, begins) for each group of pieces whose samples the permutation puts at the indexes `at`.
        `place`: place in `at` of the first such index. `begins`: indexes in the sequence at which the group's pieces
        begin."""
        groups, firsts = np.unique(self._group(at - self._low), return_index=True)
        for group, first in zip(groups.tolist(), firsts.tolist(), strict=True):
            yield first, self._begins[self._firsts[group] : self._firsts[group + 1]]

    def _group(self, inside: Ints) -> Ints:
        return np.searchsorted(self._group_bounds, inside, side="right") - 1
