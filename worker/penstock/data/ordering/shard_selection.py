"""Selection of the shards that an epoch takes from a stream. An epoch may take only a part of the stream, or repeat it.

An epoch that takes q L + r samples (r < L) from a stream of L samples takes every shard q times, and r samples more.
The r samples of an epoch begin where those of the epoch before ended. So these samples do not repeat before the whole
stream was read, and each repeat has a new order. If an epoch takes a tenth of the stream, every sample is seen once in
ten epochs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.data.ordering.computed_columns import Consecutive, Zeros
from penstock.data.ordering.permutation import Ints, Words, mix, permuted

__all__ = ["ShardParts", "parts_of"]


@dataclass(frozen=True)
class ShardParts:
    """Parts that an epoch takes: whole shards, and pieces of shards. Each field is an array with one entry for each
    part."""

    shard: Ints | Consecutive
    """Number of the shard that the part belongs to."""
    count: Ints
    """Number of samples in the part."""
    first: Ints | Zeros
    """Index, in the shard's shuffled order, at which the part begins; 0 for a whole shard."""
    key: Words | Zeros
    """Key (64 random bits) of a permutation of the shard's samples: the part is a piece of the permuted shard. Not used
    for a whole shard."""

    def __len__(self) -> int:
        return len(self.shard)

    @staticmethod
    def joined(parts: list[ShardParts]) -> ShardParts:
        if len(parts) == 1:
            return parts[0]
        return ShardParts(
            np.concatenate([np.asarray(part.shard) for part in parts]),
            np.concatenate([part.count for part in parts]),
            np.concatenate([np.asarray(part.first) for part in parts]),
            np.concatenate([np.asarray(part.key).astype(np.uint64) for part in parts]),
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
    """Return the parts (whole shards and pieces of shards) that an epoch takes from a stream.

    Args:
        sizes: number of samples in each of the stream's shards.
        share: number of samples that the epoch takes of the stream.
        first_shard: number of the stream's first shard.
        epoch: number of the epoch.
        key: key of the stream's permutations, 64 bits.
        shuffle: False: the parts come in the order of the shards.
        files: for each of the stream's shards, the number of the file in which it is a block, ascending; None: each
            shard is a file. The shards that an epoch takes from one file stay neighbours.
    """
    count, total = len(sizes), int(sizes.sum())
    times, rest = divmod(share, total) if total else (0, 0)
    if (times, rest) == (1, 0):
        return ShardParts(Consecutive(first_shard, count), sizes, Zeros(count), Zeros(count))
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
    """Return the parts that contain the samples `start` to `stop` - 1 of one repeat of the stream. A repeat is the
    whole stream, with its shards in an order that `key` decides."""
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
