"""Order of an endless source: which sample of which shard is at which position of the stream.

The L shards are arranged in T = L / C columns of C shards, where C is the number of partitions. The stream is cut into
blocks of B positions. Block q takes samples from column q mod T, and continues where that column's last block ended:
the r-th sample of column t is sample r div C of shard t * C + r mod C.

The order does not depend on batches, boxes and workers. A batch is a range of positions of any size, so a batch may
also be halved and accumulated. The block only decides which worker reads which shard. A shard is read by one worker
alone under two conditions. First, the block is the global batch, its multiple or its divisor, and the number of workers
divides the remaining columns: then a worker makes the batches of its own columns. Second, the number of boxes divides C
and the batch: then a box takes its rows from its own shards of each column.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from penstock.data.ordering.permutation import Ints
from penstock.data.sharded.protocol import Place

__all__ = ["EndlessOrder"]

POSITIONS_PER_CALL = 1 << 20
"""Positions that are examined in one call."""


@dataclass(frozen=True)
class EndlessOrder:
    """The order of an endless source."""

    shards: int
    partitions: int
    block: int
    """Number of consecutive positions that belong to one column."""

    @property
    def columns(self) -> int:
        return self.shards // self.partitions

    def at(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return the shard, and the index in it, of the sample at each position."""
        blocks, inside = np.divmod(positions, self.block)
        column_blocks, columns = np.divmod(blocks, self.columns)
        indices, partitions = np.divmod(column_blocks * self.block + inside, self.partitions)
        return columns * self.partitions + partitions, indices

    def counts(self, position: int) -> Ints:
        """Return, for each shard, how many of its samples come before this position."""
        blocks, inside = divmod(position, self.block)
        column_blocks, column = divmod(blocks, self.columns)
        rows = np.full(self.columns, column_blocks * self.block, np.int64)
        rows[:column] += self.block
        rows[column] += inside
        found: Ints = np.maximum(0, -(-(rows[:, None] - np.arange(self.partitions)) // self.partitions)).reshape(-1)
        return found

    def place(self, shard: int) -> Place:
        """Return the Place of this shard: the function from an index in it to the position in the stream."""
        column, partition = divmod(shard, self.partitions)

        def place(index: int) -> int:
            column_block, inside = divmod(index * self.partitions + partition, self.block)
            return (column_block * self.columns + column) * self.block + inside

        return place

    def own(self, start: int, batch: int, workers: int, box: int, boxes: int) -> Ints:
        """Return the shards that have rows of a box in every `workers`-th batch, counted from the batch at `start`."""
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
