"""Which of a stream's shards an epoch takes, and how often, when its share is not just all of them.

A stream of L samples whose share is q L + r gives every shard q times, and r samples more. Those go on from epoch to
epoch: laid end to end, they run through all of the stream before any sample comes again, in a new order each time. So
with a share of a tenth every sample was seen once after ten epochs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.data.ordering.permutation import Ints, Words, mix, permuted

__all__ = ["ShardParts", "parts_of"]


@dataclass(frozen=True)
class ShardParts:
    """Pieces of shards, each an array with one entry for each piece."""

    shard: Ints
    """Its number."""
    count: Ints
    """Samples."""
    first: Ints
    """Where a piece begins in the shard's own order; 0 for a whole one."""
    key: Words
    """Of the shard's own order, which matters for pieces only."""

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


def parts_of(sizes: Ints, share: int, first_shard: int, *, epoch: int, key: int, shuffle: bool) -> ShardParts:
    """What an epoch takes of a stream.

    Args:
        sizes: samples of its shards.
        share: samples that the epoch takes of it.
        first_shard: number of its first shard.
        key: of the stream.
    """
    count, total = len(sizes), int(sizes.sum())
    times, rest = divmod(share, total) if total else (0, 0)
    whole = np.tile(np.arange(first_shard, first_shard + count), times)
    parts = [ShardParts(whole, np.tile(sizes, times), np.zeros(len(whole), np.int64), np.zeros(len(whole), np.uint64))]
    cycle, at = divmod(epoch * rest, total) if total else (0, 0)
    while rest:
        taken = min(rest, total - at)
        parts.append(_piece(sizes, at, at + taken, first_shard, key=int(mix(key, cycle)), shuffle=shuffle))
        rest, cycle, at = rest - taken, cycle + 1, 0
    return ShardParts.joined(parts)


def _piece(sizes: Ints, start: int, stop: int, first_shard: int, *, key: int, shuffle: bool) -> ShardParts:
    """Samples [start, stop) of one run through the stream."""
    turn = np.arange(len(sizes))
    if shuffle:
        turn = permuted(turn, len(sizes), np.uint64(key))
    ends = np.cumsum(sizes[turn])
    begins = ends - sizes[turn]
    inside = np.flatnonzero((ends > start) & (begins < stop))
    shard, begin, end = turn[inside], begins[inside], ends[inside]
    first = np.maximum(begin, start) - begin
    keys = mix(key, shard + 1)
    return ShardParts(shard + first_shard, np.minimum(end, stop) - begin - first, first, keys)
