"""Round robin over shards of any lengths: from a position in the epoch to a shard, and an index in this shard.

A finite source's epoch is read in rounds: sample 0 of each shard, then sample 1 of each, and so on, without the shards
that have ended. If the lengths are known, the sample at a position is found by arithmetic, without reading a shard. An
unknown length counts as infinite, so the results are right only up to the shard's real end. A reader that advances in
the order of positions, and reports each end that it finds by `end`, always gets right results.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from penstock.data.ordering.permutation import Ints
from penstock.data.sharded.protocol import PositionOf

__all__ = ["EndlessOrder", "RoundRobin", "Tail"]


Tail = Literal["emit", "pad", "drop", "emit apart"]
"""Treatment of an epoch's incomplete last batch; see Partition in ordering/partition.py. The value "carry" of other
loaders is not possible here, because it moves samples to the next epoch."""

UNKNOWN = 1 << 62


class RoundRobin:
    """Order of one epoch's samples, read round robin from all shards."""

    def __init__(self, shards: int, lengths: Sequence[int] | Mapping[int, int]) -> None:
        """
        Args:
            shards: number of shards.
            lengths: number of samples in each shard; or a mapping from shard to number of samples, for the shards whose
                length is known.
        """
        self._lengths: Ints = np.full(shards, UNKNOWN, np.int64)
        if isinstance(lengths, Mapping):
            for shard, length in lengths.items():
                self._lengths[shard] = length
        else:
            self._lengths[:] = lengths
        self._lay_out()

    def _lay_out(self) -> None:
        """Divide the epoch's rounds into sections. In all rounds of a section, the same shards are live, which means
        that they have not ended."""
        known = self._lengths[self._lengths < UNKNOWN]
        ends, leaving = np.unique(known, return_counts=True)
        self._first_round: Ints = np.concatenate([[0], ends]).astype(np.int64)
        self._live: Ints = len(self._lengths) - np.concatenate([[0], np.cumsum(leaving)]).astype(np.int64)
        self._first_position: Ints = np.concatenate([[0], np.cumsum(np.diff(self._first_round) * self._live[:-1])])
        self._section, self._ids = -1, self._lengths

    @property
    def length(self) -> int | None:
        """Number of samples in all shards together; None while the length of a shard is unknown."""
        return int(self._first_position[-1]) if self._live[-1] == 0 else None

    def end(self, shard: int, length: int) -> None:
        """Set the length of a shard whose end was found by reading."""
        self._lengths[shard] = length
        self._lay_out()

    def at(self, positions: Ints) -> tuple[list[int], list[int]]:
        """Return two lists with one entry for each position: the number of the sample's shard, and the sample's index
        in this shard. Positions must be below `length`."""
        shards, indices = np.empty(len(positions), np.int64), np.empty(len(positions), np.int64)
        sections = np.searchsorted(self._first_position, positions, side="right") - 1
        for section in np.unique(sections):
            chosen = sections == section
            beyond, rank = np.divmod(positions[chosen] - self._first_position[section], self._live[section])
            shards[chosen] = self._live_in(int(section))[rank]
            indices[chosen] = self._first_round[section] + beyond
        return shards.tolist(), indices.tolist()

    def counts(self, position: int) -> Ints:
        """Return, for each shard, the number of its samples before `position` in the epoch."""
        section = int(np.searchsorted(self._first_position, position, side="right")) - 1
        if self._live[section] == 0:
            return self._lengths.copy()
        beyond, rank = divmod(position - int(self._first_position[section]), int(self._live[section]))
        counts: Ints = np.minimum(self._lengths, self._first_round[section] + beyond)
        counts[self._live_in(section)[:rank]] += 1
        return counts

    def _live_in(self, section: int) -> Ints:
        """Return the numbers of the shards that are live (have not ended) in section number `section`."""
        if section != self._section:
            self._section, self._ids = section, np.flatnonzero(self._lengths > self._first_round[section])
            if section == 0:
                self._ids = np.arange(len(self._lengths))
        return self._ids


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
