"""An endless source's order: which sample of which shard is which row of which batch.

The L shards are laid out in T = L / C columns of C shards, C the partitions. Batch g takes its rows from column
g mod T, going on where that column's batch before it stopped: row r of column t is sample r div C of shard
t * C + r mod C. So where the number of boxes divides C and the batch, a box takes its rows from its own shards of each
column, and where the number of workers divides T, a worker makes the batches of its own columns: a shard is read by one
worker alone. None of that is in the arithmetic: the order is the same for any number of boxes and workers.

The rows of a batch are a number that may change. A new leg of the way begins then, and each column goes on where it
is. A state keeps the legs, a few numbers for each: they say which position in the stream any earlier sample had.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.worker.datasets.ordering.permutation import Ints
from penstock.worker.datasets.sharded.protocol import Place

__all__ = ["Grid", "Leg", "place_in"]


@dataclass(frozen=True)
class Leg:
    """Batches of one size."""

    batch: int
    """Rows of a batch of all boxes."""
    begun: int
    """The number of its first batch, counted from the beginning of the run."""
    position: int
    """Samples before that."""
    rows: tuple[int, ...]
    """Rows of each column before it; () for none."""

    def rows_of(self, column: int) -> int:
        return self.rows[column] if self.rows else 0


@dataclass(frozen=True)
class Grid:
    """The order from the beginning to the leg that is going on."""

    shards: int
    partitions: int
    legs: tuple[Leg, ...]

    @staticmethod
    def begin(shards: int, partitions: int, batch: int) -> Grid:
        return Grid(shards, partitions, (Leg(batch, 0, 0, ()),))

    @property
    def columns(self) -> int:
        return self.shards // self.partitions

    def at(self, batch: int, rows: Ints) -> tuple[list[int], list[int]]:
        """Shard and index in it of these rows of a batch."""
        leg, column = self.legs[-1], batch % self.columns
        before = leg.rows_of(column) + self._batches(column, batch) * leg.batch
        indices, partition = np.divmod(rows + before, self.partitions)
        shards = partition + column * self.partitions
        return shards.tolist(), indices.tolist()

    def counts(self, batch: int) -> Ints:
        """Of each shard, how many of its samples are in the batches before this one."""
        rows = np.asarray(self._rows(batch), np.int64)
        found: Ints = np.maximum(0, -(-(rows[:, None] - np.arange(self.partitions)) // self.partitions)).reshape(-1)
        return found

    def position(self, batch: int) -> int:
        """Samples before this batch."""
        leg = self.legs[-1]
        return leg.position + (batch - leg.begun) * leg.batch

    def changed(self, batch: int, size: int) -> Grid:
        """Batches of another size from batch number `batch` on."""
        last = self.legs[-1]
        if size == last.batch:
            return self
        earlier = self.legs[:-1] if batch == last.begun else self.legs
        if earlier and earlier[-1].batch == size:  # changed, and changed back before a batch was made
            return Grid(self.shards, self.partitions, earlier)
        rows = tuple(self._rows(batch)) if batch else ()
        return Grid(self.shards, self.partitions, (*earlier, Leg(size, batch, self.position(batch), rows)))

    def own(self, box: int, boxes: int, first: int, workers: int) -> Ints:
        """The shards that have rows of a box's batches first, first + workers ...; or a few more."""
        leg, step = self.legs[-1], math.gcd(workers, self.columns)
        together = math.gcd(leg.batch, boxes, self.partitions)
        columns = np.arange(self.columns)
        columns = columns[(columns - first) % step == 0]
        before = np.asarray([leg.rows_of(int(column)) for column in columns], np.int64)
        partitions = np.arange(self.partitions)
        own = (partitions - before[:, None] - box) % together == 0
        found: Ints = (columns[:, None] * self.partitions + partitions)[own]
        return found

    def place(self, shard: int) -> Place:
        """Index in this shard -> position in the stream."""
        return place_in(self.shards, self.partitions, shard, self.legs_of(shard))

    def legs_of(self, shard: int) -> list[list[int]]:
        """What `place_in` needs: batch, begun, position and rows of the shard's column, for each leg."""
        column = shard // self.partitions
        return [[leg.batch, leg.begun, leg.position, leg.rows_of(column)] for leg in self.legs]

    def plain(self) -> list[list[Any]]:
        """The legs as a value of JSON."""
        return [[leg.batch, leg.begun, leg.position, list(leg.rows)] for leg in self.legs]

    @staticmethod
    def of(shards: int, partitions: int, plain: Any) -> Grid:
        """The way back. Raises ValueError for what cannot be."""
        if not isinstance(plain, list) or not plain:
            raise ValueError(f"legs {plain!r}")
        legs: list[Leg] = []
        for batch, begun, position, rows in plain:
            numbers = [batch - 1, begun, position, *rows]
            if any(type(number) is not int or not 0 <= number < 1 << 62 for number in numbers):
                raise ValueError(f"leg {[batch, begun, position, rows]}")
            legs.append(Leg(batch, begun, position, tuple(rows)))
        grid = Grid.begin(shards, partitions, legs[0].batch)
        for leg in legs[1:]:
            grid = grid.changed(leg.begun, leg.batch)
        if grid.legs != tuple(legs):
            raise ValueError(f"legs {plain!r:.200} do not follow from each other")
        return grid

    def _batches(self, column: int, batch: int) -> int:
        """Of this leg and column before batch number `batch`."""
        begun = self.legs[-1].begun
        first = begun + (column - begun) % self.columns
        return max(0, -(-(batch - first) // self.columns))

    def _rows(self, batch: int) -> list[int]:
        """Of each column, in the batches before this one."""
        leg = self.legs[-1]
        return [leg.rows_of(column) + self._batches(column, batch) * leg.batch for column in range(self.columns)]


def place_in(shards: int, partitions: int, shard: int, legs: Sequence[Sequence[int]]) -> Place:
    """Index in a shard -> position in the stream; see Grid.legs_of."""
    columns = shards // partitions
    column, partition = divmod(shard, partitions)

    def place(index: int) -> int:
        row = index * partitions + partition
        batch, begun, position, before = next((leg for leg in reversed(legs) if leg[3] <= row), legs[0])
        turn, at = divmod(row - before, batch)
        return position + ((column - begun) % columns + turn * columns) * batch + at

    return place
