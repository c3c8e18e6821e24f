from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from penstock.data.ordering.permutation import Ints
from penstock.data.sharded.protocol import PositionOf

Tail = Literal["emit", "pad", "drop", "emit apart"]
"""See Partition. "carry" of other loaders would move samples to the next epoch."""

UNKNOWN = 1 << 62


class RoundRobin:
    """Order of a finite source's epoch: sample 0 of each shard, then sample 1 of each, without the shards that have
    ended. An unknown length counts as infinite: results are right up to the shard's end, which a reader must report by
    `end`."""

    def __init__(self, shards: int, lengths: Sequence[int] | Mapping[int, int]) -> None:
        self._lengths: Ints = np.full(shards, UNKNOWN, np.int64)
        if isinstance(lengths, Mapping):
            for shard, length in lengths.items():
                self._lengths[shard] = length
        else:
            self._lengths[:] = lengths
        self._lay_out()

    def _lay_out(self) -> None:
        """Divide the epoch's rounds into sections, in which the same shards have not ended."""
        known = self._lengths[self._lengths < UNKNOWN]
        ends, leaving = np.unique(known, return_counts=True)
        self._first_round: Ints = np.concatenate([[0], ends]).astype(np.int64)
        self._live: Ints = len(self._lengths) - np.concatenate([[0], np.cumsum(leaving)]).astype(np.int64)
        self._first_position: Ints = np.concatenate([[0], np.cumsum(np.diff(self._first_round) * self._live[:-1])])
        self._section, self._ids = -1, self._lengths

    @property
    def length(self) -> int | None:
        return int(self._first_position[-1]) if self._live[-1] == 0 else None

    def end(self, shard: int, length: int) -> None:
        self._lengths[shard] = length
        self._lay_out()

    def at(self, positions: Ints) -> tuple[list[int], list[int]]:
        shards, indices = np.empty(len(positions), np.int64), np.empty(len(positions), np.int64)
        sections = np.searchsorted(self._first_position, positions, side="right") - 1
        for section in np.unique(sections):
            chosen = sections == section
            beyond, rank = np.divmod(positions[chosen] - self._first_position[section], self._live[section])
            shards[chosen] = self._live_in(int(section))[rank]
            indices[chosen] = self._first_round[section] + beyond
        return shards.tolist(), indices.tolist()

    def counts(self, position: int) -> Ints:
        section = int(np.searchsorted(self._first_position, position, side="right")) - 1
        if self._live[section] == 0:
            return self._lengths.copy()
        beyond, rank = divmod(position - int(self._first_position[section]), int(self._live[section]))
        counts: Ints = np.minimum(self._lengths, self._first_round[section] + beyond)
        counts[self._live_in(section)[:rank]] += 1
        return counts

    def _live_in(self, section: int) -> Ints:
        if section != self._section:
            self._section, self._ids = section, np.flatnonzero(self._lengths > self._first_round[section])
            if section == 0:
                self._ids = np.arange(len(self._lengths))
        return self._ids


POSITIONS_PER_CALL = 1 << 20
"""Largest number of positions whose shards are computed at once, which limits the memory for it."""


@dataclass(frozen=True)
class EndlessOrder:
    """Order of an endless source's samples.

    The L shards are arranged in T = L / C columns of C shards, where C is the number of partitions. The stream is cut
    into blocks of B positions. Block q takes its samples from column q mod T, and continues where the previous block of
    that column ended: sample r of column t is sample r div C of shard t * C + r mod C.

    Only one worker reads a shard if the batches of different workers come from different columns (with B the global
    batch: T is a multiple of the workers of a box), and the rows of different boxes from different shards of a column
    (the number of boxes divides C and the batch). Otherwise several read it, and skip each other's samples.
    """

    shards: int
    partitions: int
    block: int
    """Number of consecutive positions whose samples come from one column."""

    @property
    def columns(self) -> int:
        return self.shards // self.partitions

    def at(self, positions: Ints) -> tuple[Ints, Ints]:
        blocks, inside = np.divmod(positions, self.block)
        column_blocks, columns = np.divmod(blocks, self.columns)
        indices, partitions = np.divmod(column_blocks * self.block + inside, self.partitions)
        return columns * self.partitions + partitions, indices

    def counts(self, position: int) -> Ints:
        blocks, inside = divmod(position, self.block)
        column_blocks, column = divmod(blocks, self.columns)
        rows = np.full(self.columns, column_blocks * self.block, np.int64)
        rows[:column] += self.block
        rows[column] += inside
        counts: Ints = np.maximum(0, -(-(rows[:, None] - np.arange(self.partitions)) // self.partitions))
        return counts.reshape(-1)

    def position_of(self, shard: int) -> PositionOf:
        column, partition = divmod(shard, self.partitions)

        def position_of(index: int) -> int:
            column_block, inside = divmod(index * self.partitions + partition, self.block)
            return (column_block * self.columns + column) * self.block + inside

        return position_of

    def own(self, start: int, batch: int, workers: int, box: int, boxes: int) -> Ints:
        """Return the shards of one worker's rows: it makes every `workers`-th batch from `start` on."""
        period = self.columns * self.block * (self.partitions // math.gcd(self.partitions, self.block))
        step = math.gcd(workers * batch, period)
        rows = np.arange(box, batch, boxes)
        own = np.zeros(self.shards, bool)
        begins = period // step
        for first in range(0, begins, at_once := max(1, POSITIONS_PER_CALL // len(rows))):
            starts = start + step * np.arange(first, min(begins, first + at_once))
            own[self.at((starts[:, None] + rows).reshape(-1) % period)[0]] = True
        return np.flatnonzero(own)
