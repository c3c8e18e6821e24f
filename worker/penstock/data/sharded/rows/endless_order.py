"""Order of an endless source's samples: from a position in the stream to a shard, and an index in this shard.

The L shards are arranged in T = L / C columns of C shards, where C is the number of partitions. The stream is cut into
blocks of B positions. Block q takes its samples from column q mod T, and continues where the previous block of that
column ended: sample r of column t is sample r div C of shard t * C + r mod C, with r from 0.

The order depends on the block size B, but not on batches, boxes and workers. A batch is a range of positions of any
size, so a batch may also be halved and its gradients accumulated.

A shard that two workers need is read by both, and each skips the other's samples. A shard is read by only one worker if
two conditions hold:

- The batches of different workers come from different columns. If B is the global batch size, that is so if T is a
  multiple of the number of workers of a box.
- The rows of different boxes come from different shards of a column: the number of boxes divides both C and the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from penstock.data.ordering.permutation import Ints
from penstock.data.sharded.protocol import PositionOf

__all__ = ["EndlessOrder"]

POSITIONS_PER_CALL = 1 << 20
"""Largest number of positions whose shards are computed at once, which limits the memory for it."""


@dataclass(frozen=True)
class EndlessOrder:
    """Order of an endless source's samples, for a number of shards, a number of partitions and a block size."""

    shards: int
    partitions: int
    block: int
    """Number of consecutive positions whose samples come from one column. A column is a group of `partitions`
    consecutive shards."""

    @property
    def columns(self) -> int:
        return self.shards // self.partitions

    def at(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return two arrays: the number of the shard of the sample at each position, and the sample's index in that
        shard."""
        blocks, inside = np.divmod(positions, self.block)
        column_blocks, columns = np.divmod(blocks, self.columns)
        indices, partitions = np.divmod(column_blocks * self.block + inside, self.partitions)
        return columns * self.partitions + partitions, indices

    def counts(self, position: int) -> Ints:
        """Return, for each shard, the number of its samples before `position` in the stream."""
        blocks, inside = divmod(position, self.block)
        column_blocks, column = divmod(blocks, self.columns)
        rows = np.full(self.columns, column_blocks * self.block, np.int64)
        rows[:column] += self.block
        rows[column] += inside
        found: Ints = np.maximum(0, -(-(rows[:, None] - np.arange(self.partitions)) // self.partitions)).reshape(-1)
        return found

    def position_of(self, shard: int) -> PositionOf:
        """Return a function from the index of a sample in a shard to the sample's position in the stream (see
        protocol.PositionOf)."""
        column, partition = divmod(shard, self.partitions)

        def position_of(index: int) -> int:
            column_block, inside = divmod(index * self.partitions + partition, self.block)
            return (column_block * self.columns + column) * self.block + inside

        return position_of

    def own(self, start: int, batch: int, workers: int, box: int, boxes: int) -> Ints:
        """Return the numbers of the shards from which one worker takes the rows of its batches.

        Args:
            start: position at which the worker's first batch begins.
            batch: number of samples in a global batch.
            workers: number of workers of each box; the worker makes every `workers`-th batch.
            box, boxes: number of the worker's box, and number of all boxes.
        """
        period = self.columns * self.block * (self.partitions // math.gcd(self.partitions, self.block))
        step = math.gcd(workers * batch, period)
        rows = np.arange(box, batch, boxes)
        own = np.zeros(self.shards, bool)
        begins = period // step
        for first in range(0, begins, at_once := max(1, POSITIONS_PER_CALL // len(rows))):
            starts = start + step * np.arange(first, min(begins, first + at_once))
            own[self.at((starts[:, None] + rows).reshape(-1) % period)[0]] = True
        found: Ints = np.flatnonzero(own)
        return found
