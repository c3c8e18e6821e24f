"""Block shuffle of one epoch.

    index in a partition -> index in the sequence -> permuted within its block -> part -> shard and sample

A *part* is a shard, or a piece of one. All parts, in a random order, form a *sequence* of samples, cut into equal
*partitions*, and these into *blocks* of a few neighbouring parts. Samples are permuted only within their block, so only
its shards are needed to find one. A number is kept for each part: 4 MiB for a million shards of fewer than 2^32
samples.

In files that consist of blocks (row groups of Parquet), each row group is a shard here, and a file's parts stay
neighbours, as a *file run*; its *rank* is its place after file runs are permuted. A block of the sequence is a few of
them, so few files are needed. In it parts are permuted, and samples within groups of parts that fit in memory
(NestedBlocks).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from penstock.data.ordering.permutation import Ints, Words, mix, permuted
from penstock.data.recent import Recent

Blocks = list[tuple[int, Ints]]
"""Of each block: index of the first requested position in it, and its shards."""


@dataclass(frozen=True)
class ShardParts:
    """Parts of an epoch, whole shards and pieces; arrays by part."""

    shard: Ints
    count: Ints
    first: Ints
    """Index in the shard's shuffled order at which the part begins; 0 for a whole shard."""
    key: Words
    """Key of the permutation of the shard of which this is a piece."""

    def __len__(self) -> int:
        return len(self.shard)

    @staticmethod
    def joined(parts: list[ShardParts]) -> ShardParts:
        return ShardParts(
            np.concatenate([part.shard for part in parts]),
            np.concatenate([part.count for part in parts]),
            np.concatenate([part.first for part in parts]),
            np.concatenate([part.key for part in parts]),
        )


def parts_of(
    sizes: Ints,
    share: int,
    first_shard: int,
    *,
    epoch: int,
    key: int,
    shuffle: bool,
    files: Ints | None = None,
) -> ShardParts:
    """Return the parts that an epoch takes from a stream. One of q L + r samples (r < L) of L takes every shard q
    times, and r more from where the epoch before ended, so that these repeat only after the whole stream. Shards that
    an epoch takes from one file (`ShardedOrder`) stay neighbours."""
    count, total = len(sizes), int(sizes.sum())
    times, rest = divmod(share, total) if total else (0, 0)
    whole = np.tile(np.arange(first_shard, first_shard + count), times)
    parts = [ShardParts(whole, np.tile(sizes, times), np.zeros(len(whole), np.int64), np.zeros(len(whole), np.uint64))]
    repeat, at = divmod(epoch * rest, total) if total else (0, 0)
    while rest:
        taken = min(rest, total - at)
        parts.append(
            _piece(sizes, at, at + taken, first_shard, key=int(mix(key, repeat)), shuffle=shuffle, files=files)
        )
        rest, repeat, at = rest - taken, repeat + 1, 0
    return ShardParts.joined(parts)


def _piece(
    sizes: Ints, start: int, stop: int, first_shard: int, *, key: int, shuffle: bool, files: Ints | None
) -> ShardParts:
    """Return the parts of samples `start` to `stop` - 1 of one repeat of the stream, ordered by `key`."""
    order = np.arange(len(sizes))
    if shuffle and files is None:
        order = permuted(order, len(sizes), np.uint64(key))
    elif shuffle and files is not None:
        _, number = np.unique(files, return_inverse=True)
        ranks = permuted(np.arange(number[-1] + 1), int(number[-1]) + 1, np.uint64(key))
        order = np.argsort(ranks[number], kind="stable")
    ends = np.cumsum(sizes[order])
    begins = ends - sizes[order]
    inside = np.flatnonzero((ends > start) & (begins < stop))
    shard, begin, end = order[inside], begins[inside], ends[inside]
    first = np.maximum(begin, start) - begin
    keys = mix(key, shard + 1)
    return ShardParts(shard + first_shard, np.minimum(end, stop) - begin - first, first, keys)


class PartSequence:
    """Shuffled sequence of an epoch's samples, in the words of this module's head."""

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
        """parts: before they are permuted. sizes: of shards. starts: first sample of each, then the end. block, inner:
        about how many samples are permuted together, overall and in files with blocks; None: all of a partition, of a
        block. files: of each shard; None: each is one."""
        self._parts, self._sizes, self._starts = parts, sizes, starts
        self._key, self._shuffle, self._partitions, self._inner = key, shuffle, partitions, inner
        self._part_bounds = np.concatenate([[0], np.cumsum(parts.count)])
        self._runs = _runs(parts.shard, files)
        """First part of each file run, then the number of parts; shape (file runs + 1,)."""
        self._nested = shuffle and files is not None
        self._known = Recent[int, NestedBlocks](2 * partitions)  # the present and the next block of each partition
        self._length = int(self._part_bounds[-1])
        self._bounds = self._run_bounds(parts.count if files is None else np.diff(self._part_bounds[self._runs]))
        """By rank: index in the sequence at which a file run begins; then the length. Shape (file runs + 1,)."""
        mean = self._length / max(1, self._count)
        self._block = self._count if block is None else max(1, min(self._count, round(block / max(1.0, mean))))
        partition = np.arange(partitions + 1)
        self._partition_starts = partition * (self._length // partitions)
        self._partition_starts += np.minimum(partition, self._length % partitions)
        """Index in the sequence at which each partition begins. The first may have one sample more."""
        self._first = self._rank(self._partition_starts[:-1])
        """Rank of the file run in which each partition begins."""

    @property
    def _count(self) -> int:
        """Number of file runs."""
        return len(self._runs) - 1

    def ids(self, positions: Ints) -> Ints:
        """Return the samples at these positions. With C partitions, p is sample p div C of partition p mod C."""
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
        return self._starts[shard] + offset

    def blocks(self, positions: Ints) -> Blocks:
        """Return the blocks of these positions, each once, with its shards."""
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
        """Return, for each block of these indexes, which are in it and its order. `low`, `high`, `keys`: from
        `_blocks`."""
        found = []
        for begin in np.unique(low).tolist():
            chosen = np.flatnonzero(low == begin)
            block = partial(self._nested_blocks, begin, int(high[chosen[0]]), int(keys[chosen[0]]))
            found.append((chosen, self._known.get(begin, block)))
        return found

    def _nested_blocks(self, low: int, high: int, key: int) -> NestedBlocks:
        parts, begins = self._parts_of(*self._rank(np.array([low, high - 1])).tolist())
        ends = np.minimum(begins + self._parts.count[parts], high)
        begins = np.maximum(begins, low)
        inside = ends > begins
        return NestedBlocks(begins[inside], ends[inside], key=key, block=self._inner)

    def _at(self, positions: Ints) -> Ints:
        """Return each position's index before samples are permuted within blocks."""
        return self._partition_starts[positions % self._partitions] + positions // self._partitions

    def _blocks(self, at: Ints, partition: Ints) -> tuple[Ints, Ints, Words]:
        """Return beginning, end and key of the block of each index `at` in its partition."""
        first = self._first[partition]
        number = (self._rank(at) - first) // self._block
        low = np.maximum(self._bounds[first + number * self._block], self._partition_starts[partition])
        last = np.minimum(first + (number + 1) * self._block, self._count)
        high = np.minimum(self._bounds[last], self._partition_starts[partition + 1])
        return low, high, mix(self._key, partition, number)

    def _rank(self, at: Ints) -> Ints:
        return np.searchsorted(self._bounds, at, side="right") - 1

    def _run_bounds(self, samples: Ints) -> Ints:
        """Return `_bounds`. `samples`: of each file run."""
        return np.concatenate([[0], np.cumsum(samples[self._run_at(np.arange(self._count))])])

    def _run_at(self, ranks: Ints) -> Ints:
        return permuted(ranks, self._count, np.uint64(self._key)) if self._shuffle else ranks

    def _part_of(self, at: Ints) -> tuple[Ints, Ints]:
        """Return the part of each index, and the offset in it."""
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
        """Return the parts in these file runs, and the index at which each begins."""
        runs = self._run_at(np.arange(first, last + 1))
        begins, counts = self._runs[runs], self._runs[runs + 1] - self._runs[runs]
        parts = np.repeat(begins - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        shift = self._bounds[first : last + 1] - self._part_bounds[begins]
        return parts, self._part_bounds[parts] + np.repeat(shift, counts)


def _runs(shards: Ints, files: Ints | None) -> Ints:
    """Return the first part of each file run, then the number of parts."""
    if files is None or not len(shards):
        return np.arange(len(shards) + 1)
    file = files[shards]
    # the second condition holds where an epoch repeats a file
    new = (file[1:] != file[:-1]) | (shards[1:] <= shards[:-1])
    return np.concatenate([np.zeros(1, np.int64), np.flatnonzero(new) + 1, np.full(1, len(shards), np.int64)])


_PIECES, _SAMPLES = 1, 2
"""Mixed into the key, so that pieces and samples are permuted differently."""


class NestedBlocks:
    """Shuffle of a range of a sequence: its pieces are permuted, then samples within groups of neighbouring ones.
    Blocks are decoded as a whole, and only one group's are needed in memory, so each is decoded once."""

    def __init__(self, begins: Ints, ends: Ints, *, key: int, block: int | None) -> None:
        """`begins`, `ends`: of each piece in the sequence, ascending, without gaps."""
        count = len(begins)
        self._low = int(begins[0])
        pieces = permuted(np.arange(count), count, mix(key, _PIECES))
        sizes = (ends - begins)[pieces]
        self._begins: Ints = begins[pieces]
        self._bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        """Samples before each piece in permuted order; then all. Shape (pieces + 1,)."""
        mean = int(self._bounds[-1]) / count
        together = count if block is None else max(1, min(count, round(block / mean)))
        firsts = np.append(np.arange(0, count, together), count)
        self._firsts: Ints = firsts
        """First piece of each group, in permuted order; then the number of pieces."""
        self._group_bounds: Ints = self._bounds[firsts]
        self._key = int(mix(key, _SAMPLES))

    def indexes(self, at: Ints) -> Ints:
        """Return the index that each sample had before the permutation."""
        inside = at - self._low
        group = self._group(inside)
        low = self._group_bounds[group]
        inside = low + permuted(inside - low, self._group_bounds[group + 1] - low, mix(self._key, group))
        piece = np.searchsorted(self._bounds, inside, side="right") - 1
        found: Ints = self._begins[piece] + inside - self._bounds[piece]
        return found

    def blocks(self, at: Ints) -> Iterator[tuple[int, Ints]]:
        """Yield for each group with samples at `at`: place of its first index in `at`, and where its pieces begin."""
        groups, firsts = np.unique(self._group(at - self._low), return_index=True)
        for group, first in zip(groups.tolist(), firsts.tolist(), strict=True):
            yield first, self._begins[self._firsts[group] : self._firsts[group + 1]]

    def _group(self, inside: Ints) -> Ints:
        return np.searchsorted(self._group_bounds, inside, side="right") - 1
