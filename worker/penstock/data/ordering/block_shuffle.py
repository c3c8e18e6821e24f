"""Block shuffle of one epoch: parts of shards in one permuted sequence, cut into partitions, shuffled block by block.

    index in a partition -> index in the sequence -> permuted within its block -> part -> shard and sample

A block is a few neighbouring parts, cut at the partition's borders. To find the sample at a position, only the shards
of its block are needed. The memory used is one number for each part: the part's beginning.
"""

from __future__ import annotations

import numpy as np

from penstock.data.ordering.permutation import Ints, Words, mix, permuted
from penstock.data.ordering.shard_selection import ShardParts

__all__ = ["Blocks", "PartSequence"]

Blocks = list[tuple[int, Ints]]
"""List of blocks: for each, the index of the first requested position that lies in the block, and the numbers of the
block's shards."""


class PartSequence:
    """Shuffled sequence of the samples of some parts (shards or pieces of shards) in one epoch. `key`: key of the
    epoch; `block`: approximate number of samples that are permuted together."""

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
            [np.zeros(1, np.int64), np.cumsum(parts.count[self._part_at(np.arange(len(parts)))])]
        )
        self._length = int(self._bounds[-1])
        mean = self._length / max(1, len(parts))
        self._block = len(parts) if block is None else max(1, min(len(parts), round(block / max(1.0, mean))))
        partition = np.arange(partitions + 1)
        self._partition_starts = partition * (self._length // partitions)
        self._partition_starts += np.minimum(partition, self._length % partitions)
        """Index in the sequence at which each partition begins. If the sequence cannot be divided evenly, the first
        partitions have one sample more."""
        self._first = self._rank(self._partition_starts[:-1])
        """Rank, in the permuted sequence of parts, of the part in which each partition begins."""

    def ids(self, positions: Ints) -> Ints:
        """Return the numbers of the samples at these positions, which lie in [0, length). With C partitions, position p
        is sample p div C of partition p mod C."""
        at = self._at(positions)
        if self._shuffle:
            low, high, keys = self._blocks(at, positions % self._partitions)
            at = low + permuted(at - low, high - low, keys)
        rank = self._rank(at)
        part = self._part_at(rank)
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

    def blocks(self, positions: Ints) -> Blocks:
        """Return the blocks in which these positions lie, each once, with the shards that it needs."""
        low, high, _ = self._blocks(self._at(positions), positions % self._partitions)
        _, firsts = np.unique(low, return_index=True)
        found = []
        for index in np.sort(firsts).tolist():
            first, last = self._rank(np.array([low[index], high[index] - 1])).tolist()
            found.append((index, self._parts.shard[self._part_at(np.arange(first, last + 1))]))
        return found

    def _at(self, positions: Ints) -> Ints:
        """Return the index in the sequence of each position. The blocks are not permuted yet."""
        at: Ints = self._partition_starts[positions % self._partitions] + positions // self._partitions
        return at

    def _blocks(self, at: Ints, partition: Ints) -> tuple[Ints, Ints, Words]:
        """Return, for each index in the sequence, the beginning, the end and the key of the block that contains it.
        `partition`: partition of each index."""
        first = self._first[partition]
        number = (self._rank(at) - first) // self._block
        low = np.maximum(self._bounds[first + number * self._block], self._partition_starts[partition])
        last = np.minimum(first + (number + 1) * self._block, len(self._parts))
        high = np.minimum(self._bounds[last], self._partition_starts[partition + 1])
        return low, high, mix(self._key, partition, number)

    def _rank(self, at: Ints) -> Ints:
        """Return, for each index in the sequence, the rank of the part that contains it."""
        return np.searchsorted(self._bounds, at, side="right") - 1

    def _part_at(self, ranks: Ints) -> Ints:
        """Return the number of the part at each rank of the permuted sequence of parts."""
        return permuted(ranks, len(self._parts), np.uint64(self._key)) if self._shuffle else ranks
