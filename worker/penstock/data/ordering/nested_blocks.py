"""Shuffle of a few files that consist of blocks, such as row groups: the blocks are permuted, and samples are permuted
within groups of neighbouring blocks.

    index -> group of permuted pieces -> permuted within the group -> piece -> index in the sequence

A block is decoded as a whole, and a reader needs only the blocks of one group in memory: shuffled reading decodes each
block once, as sequential reading does.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.data.ordering.permutation import Ints, mix, permuted

__all__ = ["NestedBlocks"]

_PIECES, _SAMPLES = 1, 2
"""Constants mixed into the key, so that pieces and samples are permuted differently."""


class NestedBlocks:
    """Order of the samples in a range of a sequence. The range consists of pieces: blocks of files, or parts of blocks
    that a partition's border has cut."""

    def __init__(self, begins: Ints, ends: Ints, *, key: int, block: int | None) -> None:
        """
        Args:
            begins, ends: index in the sequence at which each piece begins and ends, ascending and without gaps; shape
                (pieces,), at least one.
            block: approximate number of samples that are permuted with each other; None: all of them.
        """
        count = len(begins)
        self._low = int(begins[0])
        pieces = permuted(np.arange(count), count, mix(key, _PIECES))
        sizes = (ends - begins)[pieces]
        self._begins: Ints = begins[pieces]
        self._bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        """Index, in the permuted order, at which each piece begins, then the number of samples."""
        mean = int(self._bounds[-1]) / count
        together = count if block is None else max(1, min(count, round(block / mean)))
        firsts = np.append(np.arange(0, count, together), count)
        self._firsts: Ints = firsts
        """First piece of each group of pieces that are permuted together, then the number of pieces."""
        self._group_bounds: Ints = self._bounds[firsts]
        self._key = int(mix(key, _SAMPLES))

    def indexes(self, at: Ints) -> Ints:
        """Return the indexes in the sequence of the samples at indexes `at` of the range. All indexes are counted from
        the sequence's beginning."""
        inside = at - self._low
        group = self._group(inside)
        low = self._group_bounds[group]
        inside = low + permuted(inside - low, self._group_bounds[group + 1] - low, mix(self._key, group))
        piece = np.searchsorted(self._bounds, inside, side="right") - 1
        found: Ints = self._begins[piece] + inside - self._bounds[piece]
        return found

    def blocks(self, at: Ints) -> Iterator[tuple[int, Ints]]:
        """Yield, for each group of pieces that the indexes `at` need, (position in `at` of the first index that needs
        the group, index in the sequence at which each piece of the group begins)."""
        groups, firsts = np.unique(self._group(at - self._low), return_index=True)
        for group, first in zip(groups.tolist(), firsts.tolist(), strict=True):
            yield first, self._begins[self._firsts[group] : self._firsts[group + 1]]

    def _group(self, inside: Ints) -> Ints:
        return np.searchsorted(self._group_bounds, inside, side="right") - 1
