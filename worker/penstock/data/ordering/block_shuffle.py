"""Parts of shards in one permuted sequence, cut into partitions and shuffled block by block; of one epoch.

    index in a partition -> place in the sequence -> permuted within its block -> part -> shard and sample

A block is some neighbouring parts, or what of them lies in the partition. Where one is asked for, only those shards are
needed. Kept is one number for each part: where it begins.
"""

from __future__ import annotations

import numpy as np

from penstock.data.ordering.permutation import Ints, Words, mix, permuted
from penstock.data.ordering.shard_draws import ShardParts

__all__ = ["Blocks", "PartSequence"]

Blocks = list[tuple[int, Ints]]
"""(index of the first place that lies in the block, numbers of its shards)."""


class PartSequence:
    """The samples of some parts. `key`: of the epoch; `block`: samples that are permuted together, about."""

    def __init__(
        self,
        parts: ShardParts,
        sizes: Ints,
        starts: Ints,
        *,
        key: int,
        shuffle: bool,
        block: int | None,
        partitions: int,
    ) -> None:
        self._parts, self._sizes, self._starts = parts, sizes, starts
        self._key, self._shuffle, self._partitions = key, shuffle, partitions
        self._bounds = np.concatenate(
            [np.zeros(1, np.int64), np.cumsum(parts.count[self._turn(np.arange(len(parts)))])]
        )
        self._length = int(self._bounds[-1])
        mean = self._length / max(1, len(parts))
        self._block = len(parts) if block is None else max(1, min(len(parts), round(block / max(1.0, mean))))
        partition = np.arange(partitions + 1)
        self._abandoned = partition * (self._length // partitions) + np.minimum(partition, self._length % partitions)
        """Where the partitions begin: the first ones have one sample more."""
        self._first = self._rank(self._abandoned[:-1])
        """The part in which each partition begins."""

    def ids(self, places: Ints) -> Ints:
        """Samples at these places, in [0, length); place p is the next one of partition p mod C."""
        at = self._at(places)
        if self._shuffle:
            low, high, keys = self._blocks(at, places % self._partitions)
            at = low + permuted(at - low, high - low, keys)
        rank = self._rank(at)
        part = self._turn(rank)
        offset = at - self._bounds[rank]
        shard = self._parts.shard[part]
        cut = np.flatnonzero(self._parts.count[part] < self._sizes[shard])
        if cut.size:
            inside = offset[cut] + self._parts.first[part[cut]]
            if self._shuffle:
                inside = permuted(inside, self._sizes[shard[cut]], self._parts.key[part[cut]])
            offset[cut] = inside
        ids: Ints = self._starts[shard] + offset
        return ids

    def blocks(self, places: Ints) -> Blocks:
        """The blocks in which these places lie."""
        low, high, _ = self._blocks(self._at(places), places % self._partitions)
        _, firsts = np.unique(low, return_index=True)
        found = []
        for index in np.sort(firsts).tolist():
            first, last = self._rank(np.array([low[index], high[index] - 1])).tolist()
            found.append((index, self._parts.shard[self._turn(np.arange(first, last + 1))]))
        return found

    def _at(self, places: Ints) -> Ints:
        """Where in the sequence a place lies, before its block is permuted."""
        at: Ints = self._abandoned[places % self._partitions] + places // self._partitions
        return at

    def _blocks(self, at: Ints, partition: Ints) -> tuple[Ints, Ints, Words]:
        """Where the block of each begins and ends, and its key."""
        first = self._first[partition]
        number = (self._rank(at) - first) // self._block
        low = np.maximum(self._bounds[first + number * self._block], self._abandoned[partition])
        last = np.minimum(first + (number + 1) * self._block, len(self._parts))
        high = np.minimum(self._bounds[last], self._abandoned[partition + 1])
        return low, high, mix(self._key, partition, number)

    def _rank(self, at: Ints) -> Ints:
        """Which of the sequence's parts a place in it lies in."""
        return np.searchsorted(self._bounds, at, side="right") - 1

    def _turn(self, ranks: Ints) -> Ints:
        """The parts that come at these turns."""
        return permuted(ranks, len(self._parts), np.uint64(self._key)) if self._shuffle else ranks
