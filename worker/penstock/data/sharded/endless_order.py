"""An endless source's order: which sample of which shard is at which position of the stream.

The L shards are laid out in T = L / C columns of C shards, C the partitions. The stream is cut into blocks of B
positions, and block q takes its samples from column q mod T, going on where that column's block before it stopped: the
r-th sample of column t is sample r div C of shard t * C + r mod C.

Batches, boxes and workers are none of it: a batch is a range of positions, whatever its size, so the order is the same
for all of them, also where a batch is halved and accumulated. The block only decides who reads what. Where it is the
global batch, its multiple or its part, and the number of workers divides the columns that are left then, a worker makes
the batches of its own columns; where the number of boxes divides C and the batch, a box takes its rows from its own
shards of each: a shard is read by one worker alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from penstock.data.ordering.permutation import Ints
from penstock.data.sharded.protocol import Place

__all__ = ["EndlessOrder"]

AT_ONCE = 1 << 20
"""Positions that are looked at in one go."""


@dataclass(frozen=True)
class EndlessOrder:
    """The order of an endless source."""

    shards: int
    partitions: int
    block: int
    """Positions in a row that one column has."""

    @property
    def columns(self) -> int:
        return self.shards // self.partitions

    def at(self, positions: Ints) -> tuple[Ints, Ints]:
        """Shard and index in it of the sample at each position."""
        blocks, inside = np.divmod(positions, self.block)
        turns, columns = np.divmod(blocks, self.columns)
        indices, partitions = np.divmod(turns * self.block + inside, self.partitions)
        return columns * self.partitions + partitions, indices

    def counts(self, position: int) -> Ints:
        """Of each shard, how many of its samples come before this position."""
        blocks, inside = divmod(position, self.block)
        turns, column = divmod(blocks, self.columns)
        rows = np.full(self.columns, turns * self.block, np.int64)
        rows[:column] += self.block
        rows[column] += inside
        found: Ints = np.maximum(0, -(-(rows[:, None] - np.arange(self.partitions)) // self.partitions)).reshape(-1)
        return found

    def place(self, shard: int) -> Place:
        """Index in this shard -> position in the stream."""
        column, partition = divmod(shard, self.partitions)

        def place(index: int) -> int:
            turn, inside = divmod(index * self.partitions + partition, self.block)
            return (turn * self.columns + column) * self.block + inside

        return place

    def own(self, start: int, batch: int, workers: int, box: int, boxes: int) -> Ints:
        """The shards that have rows of a box in the batches that begin at `start`, `workers` batches behind it, and so
        on."""
        period = self.columns * self.block * (self.partitions // math.gcd(self.partitions, self.block))
        step = math.gcd(workers * batch, period)
        rows = np.arange(box, batch, boxes)
        own = np.zeros(self.shards, bool)
        begins = period // step
        for first in range(0, begins, at_once := max(1, AT_ONCE // len(rows))):
            starts = start + step * np.arange(first, min(begins, first + at_once))
            own[self.at((starts[:, None] + rows).reshape(-1) % period)[0]] = True
        found: Ints = np.flatnonzero(own)
        return found
