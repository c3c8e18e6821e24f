"""Block shuffle of one epoch.

    index in a partition -> index in the sequence -> permuted within its block -> part -> shard and sample

- A *part* is a shard, or a piece of a shard. All parts of the epoch, in a random order, form one *sequence* of samples.
- The sequence is cut into equal *partitions*, and a partition into *blocks*. A block is a few neighbouring parts; at
  the border of a partition it may have only a piece of a part. Samples are permuted only within their block.

So only the shards of one block are needed to find the sample at a position. One number is kept in memory for each
part, the index in the sequence at which it begins: 4 MiB for a million shards of fewer than 2^32 samples together.

Files that themselves consist of blocks, such as the row groups of Parquet, add a level. Each row group is then a shard
here. The parts of one file stay neighbours in the sequence, and are called a *file run*. The file runs are permuted,
and a block of the sequence is a few neighbouring file runs, so only a few files are needed at a time. Within the block
the parts are permuted; samples are permuted only within groups of parts that fit in memory (nested_blocks.py). If each
shard is a file, each part is a file run of its own. The *rank* of a file run is its place after the permutation.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.data.ordering.computed_columns import Consecutive
from penstock.data.ordering.nested_blocks import NestedBlocks
from penstock.data.ordering.permutation import Ints, Words, mix, permuted
from penstock.data.ordering.shard_selection import ShardParts

__all__ = ["Blocks", "PartSequence"]

RANKS = 1 << 16
"""Number of file runs whose places in the sequence are computed at a time, which limits the memory needed."""
Blocks = list[tuple[int, Ints]]
"""Blocks (samples that are permuted together) in which some requested positions lie. Each block is given as (index of
the first requested position that lies in it, numbers of its shards)."""


class PartSequence:
    """Shuffled sequence of the samples of an epoch's parts (shards or pieces of shards). The words part, block,
    partition, file run and rank are explained at the head of this module."""

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
        files: Ints | None = None,
        inner: int | None = None,
    ) -> None:
        """
        Args:
            parts: the parts, in the order before they are permuted.
            sizes: number of samples in each shard.
            starts: number of the first sample of each shard, then the number of all samples.
            key: key of the epoch's permutations, 64 bits.
            shuffle: False: the samples come in the order of `parts`.
            block: approximate number of samples that are permuted together; None: all samples of a partition.
            partitions: number of equal partitions into which the sequence is cut.
            files: for each shard, the number of the file in which it is a block; None: each shard is a file.
            inner: approximate number of samples that are permuted together in files with blocks; None: all samples of
                a block.
        """
        self._parts, self._sizes, self._starts = parts, sizes, starts
        self._key, self._shuffle, self._partitions, self._inner = key, shuffle, partitions, inner
        self._part_bounds = starts if parts.count is sizes else _sums(parts.count)
        self._runs: Ints | Consecutive = _runs(parts.shard, files)
        """Number of the first part of each file run, then the number of parts; shape (file runs + 1,)."""
        self._nested = shuffle and files is not None
        self._known: OrderedDict[int, NestedBlocks] = OrderedDict()
        self._length = int(self._part_bounds[-1])
        self._bounds = self._run_bounds(parts.count if files is None else np.diff(self._part_bounds[self._runs]))
        """For each file run, in the order of their ranks (places after the permutation), the index in the sequence at
        which it begins; then the length of the sequence. Shape (file runs + 1,)."""
        mean = self._length / max(1, self._count)
        self._block = self._count if block is None else max(1, min(self._count, round(block / max(1.0, mean))))
        partition = np.arange(partitions + 1)
        self._partition_starts = partition * (self._length // partitions)
        self._partition_starts += np.minimum(partition, self._length % partitions)
        """Index in the sequence at which each partition begins. If the sequence cannot be divided evenly, the first
        partitions have one sample more."""
        self._first = self._rank(self._partition_starts[:-1])
        """For each partition, the rank (place after the permutation) of the file run in which it begins; shape
        (partitions,)."""

    @property
    def _count(self) -> int:
        """Number of file runs (groups of parts that come from one file)."""
        return len(self._runs) - 1

    def ids(self, positions: Ints) -> Ints:
        """Return the numbers of the samples at these positions. Positions are counted from 0 through the partitions in
        turn: with C partitions, position p is sample p div C of partition p mod C."""
        at = self._at(positions)
        if self._shuffle:
            low, high, keys = self._blocks(at, positions % self._partitions)
            if self._nested:
                for chosen, nested in self._windows(low, high, keys):
                    at[chosen] = nested.indexes(at[chosen])
            else:
                at = low + permuted(at - low, high - low, keys)
        part, offset = self._part_of(at)
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
        """Return the blocks in which these positions lie, each block once, with the numbers of its shards."""
        at = self._at(positions)
        low, high, keys = self._blocks(at, positions % self._partitions)
        found = []
        if self._nested:
            for chosen, nested in self._windows(low, high, keys):
                for first, begins in nested.blocks(at[chosen]):
                    found.append((int(chosen[first]), self._parts.shard[self._part_of(begins)[0]]))
            return sorted(found, key=lambda block: block[0])
        _, firsts = np.unique(low, return_index=True)
        for index in np.sort(firsts).tolist():
            ranks = self._rank(np.array([low[index], high[index] - 1])).tolist()
            parts, _ = self._parts_of(*ranks)
            found.append((index, self._parts.shard[parts]))
        return found

    def _windows(self, low: Ints, high: Ints, keys: Words) -> list[tuple[Ints, NestedBlocks]]:
        """Group some indexes of the sequence by the blocks in which they lie. Return, for each block, the places of its
        indexes in the arguments, and the order of the samples within the block. `low`, `high`, `keys`: for each index,
        the beginning, the end and the key of its block, as `_blocks` returns them."""
        found = []
        for begin in np.unique(low).tolist():
            chosen = np.flatnonzero(low == begin)
            nested = self._known.pop(begin, None)
            if nested is None:
                nested = self._nested_blocks(begin, int(high[chosen[0]]), int(keys[chosen[0]]))
            self._known[begin] = nested
            while len(self._known) > 2 * self._partitions:  # the present and the next block of each partition
                self._known.popitem(last=False)
            found.append((chosen, nested))
        return found

    def _nested_blocks(self, low: int, high: int, key: int) -> NestedBlocks:
        parts, begins = self._parts_of(*self._rank(np.array([low, high - 1])).tolist())
        ends = np.minimum(begins + self._parts.count[parts], high)
        begins = np.maximum(begins, low)
        inside = ends > begins
        return NestedBlocks(begins[inside], ends[inside], key=key, block=self._inner)

    def _at(self, positions: Ints) -> Ints:
        """Return, for each position, its index in the sequence before the samples are permuted within blocks."""
        at: Ints = self._partition_starts[positions % self._partitions] + positions // self._partitions
        return at

    def _blocks(self, at: Ints, partition: Ints) -> tuple[Ints, Ints, Words]:
        """Return three arrays that describe, for each index `at` of the sequence, the block that contains it: the index
        at which the block begins, the index at which it ends, and the key of its permutation. `partition`: for each
        index, the number of its partition."""
        first = self._first[partition]
        number = (self._rank(at) - first) // self._block
        low = np.maximum(self._bounds[first + number * self._block], self._partition_starts[partition])
        last = np.minimum(first + (number + 1) * self._block, self._count)
        high = np.minimum(self._bounds[last], self._partition_starts[partition + 1])
        return low, high, mix(self._key, partition, number)

    def _rank(self, at: Ints) -> Ints:
        """Return, for each index `at` of the sequence, the rank (place after the permutation) of the file run that
        contains it."""
        return np.searchsorted(self._bounds, at.astype(self._bounds.dtype), side="right") - 1

    def _run_bounds(self, samples: Ints) -> npt.NDArray[Any]:
        """Return the value of `_bounds`, computed for RANKS file runs at a time, so that little memory is needed.
        `samples`: number of samples in each file run."""
        bounds = np.zeros(self._count + 1, np.uint32 if self._length < 1 << 32 else np.int64)
        total = 0
        for begin in range(0, self._count, RANKS):
            sums = total + np.cumsum(samples[self._run_at(np.arange(begin, min(begin + RANKS, self._count)))])
            bounds[begin + 1 : begin + 1 + len(sums)] = sums
            total = int(sums[-1])
        return bounds

    def _run_at(self, ranks: Ints) -> Ints:
        """Return, for each rank (place after the permutation), the number of the file run that has it."""
        return permuted(ranks, self._count, np.uint64(self._key)) if self._shuffle else ranks

    def _part_of(self, at: Ints) -> tuple[Ints, Ints]:
        """Return, for each index `at` of the sequence, the number of the part that contains it, and the offset from the
        part's first sample."""
        rank = self._rank(at)
        run = self._run_at(rank)
        first = self._runs[run]
        offset = at - self._bounds[rank]
        if self._count == len(self._parts):
            return first, offset
        among = self._part_bounds[first] + offset
        part = np.searchsorted(self._part_bounds, among, side="right") - 1
        return part, among - self._part_bounds[part]

    def _parts_of(self, first: int, last: int) -> tuple[Ints, Ints]:
        """Return the numbers of the parts in the file runs with ranks `first` to `last`, and the index in the sequence
        at which each part begins."""
        runs = self._run_at(np.arange(first, last + 1))
        begins, counts = self._runs[runs], self._runs[runs + 1] - self._runs[runs]
        parts = np.repeat(begins - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        shift = self._bounds[first : last + 1] - self._part_bounds[begins]
        return parts, self._part_bounds[parts] + np.repeat(shift, counts)


def _sums(counts: Ints) -> Ints:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def _runs(shards: Ints | Consecutive, files: Ints | None) -> Ints | Consecutive:
    """Return the number of the first part of each file run (neighbouring parts of one file), then the number of parts.
    `shards`: for each part, the number of its shard. `files`: for each shard, the number of its file; None if each
    shard is a file."""
    if files is None or not len(shards):
        return Consecutive(0, len(shards) + 1)
    shards = np.asarray(shards)
    file = files[shards]
    # the second condition holds where an epoch repeats a file
    new = (file[1:] != file[:-1]) | (shards[1:] <= shards[:-1])
    return np.concatenate([np.zeros(1, np.int64), np.flatnonzero(new) + 1, np.full(1, len(shards), np.int64)])
