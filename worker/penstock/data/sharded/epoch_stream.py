"""Epoch of a finite source as one sequence of samples: it finds the rows of each batch that a worker makes.

If the lengths of the shards are known, it finds them by arithmetic (RoundRobin). Otherwise each worker passes over all
rows, and reads ahead only as far as necessary to decide which rows a batch has. With tail="emit" and several boxes
these are as many rows after the batch as there are boxes, because fewer rows than boxes would be added to this batch;
in any other case the batch's own rows.
"""

from __future__ import annotations

import numpy as np

from penstock.data.ordering.partition import Partition
from penstock.data.ordering.permutation import Ints
from penstock.data.sharded.shard_cursors import ShardReaders
from penstock.data.sharded.shard_states import FixedOrder, ShardedPosition
from penstock.proto.errors import DatasetError

Rows = list[tuple[int, int, bool]]
"""(shard, index in the shard, True if the row pads the batch) of each row."""


class EpochStream:
    """Rest of an epoch from position `start` on, divided into global batches, and the rows of one box in each."""

    def __init__(self, fixed_order: FixedOrder, position: ShardedPosition, readers: ShardReaders, box: int) -> None:
        progress = position.progress
        self._start, topology, self._tail = progress.start, progress.topology, fixed_order.tail
        self._batch, self._boxes, self._workers = topology.batch, topology.boxes, topology.workers
        self._round_robin = fixed_order.round_robin(progress.epoch, position.ended)
        self._readers, self._box = readers, box
        self._found = dict(position.ended)
        """Lengths of shards read to their end."""
        self._reached = 0

    @property
    def length(self) -> int | None:
        return self._round_robin.length

    @property
    def ended(self) -> dict[int, int]:
        return dict(self._found)

    def rows(self, number: int, *, read: bool = True) -> Rows | None:
        """Return the box's rows of a batch, None after the last. read=False: the caller skips the batch."""
        begin = self._start + number * self._batch
        if self._round_robin.length is None:
            self._look_ahead(begin, read)
        # the number of samples is unknown, so assume enough positions for any batch
        if self._round_robin.length is None:
            shards, indices = self._round_robin.at(np.arange(begin + self._box, begin + self._batch, self._boxes))
            return list(zip(shards, indices, [False] * len(shards), strict=True))
        return self._rows(number, self._box, self._boxes)

    def all_rows(self, number: int) -> Rows | None:
        """Return the rows of all boxes in a batch, by position; None after the last. Only for known lengths."""
        return self._rows(number, 0, 1)

    def _rows(self, number: int, box: int, boxes: int) -> Rows | None:
        assert self._round_robin.length is not None
        partition = Partition(self._round_robin.length, self._start, self._batch, self._boxes, self._tail)
        if self._round_robin.length < self._start:
            raise DatasetError(
                f"the epoch must have the {self._start} samples of the loaded state, got {self._round_robin.length}"
            )
        if number >= partition.batches:
            return None
        positions, first = partition.rows(number, box, boxes), self._start + number * self._batch + box
        again = (positions != first + boxes * np.arange(len(positions))).tolist()
        return list(zip(*self._round_robin.at(positions), again, strict=True))

    def first(self, number: int) -> tuple[int, int]:
        """Return (shard, index) of the first row of a batch, which belongs to box 0."""
        (shard,), (index,) = self._round_robin.at(np.array([self._start + number * self._batch]))
        return shard, index

    def has_rows(self) -> bool:
        least = self._batch if self._tail == "drop" else 1
        self._pass_over(self._start + least)
        return self._round_robin.length is None or self._round_robin.length >= self._start + least

    def _look_ahead(self, begin: int, read: bool) -> None:
        """Read or skip samples until it is certain which rows the batch at `begin` has."""
        end = begin + self._batch
        self._pass_over(begin)
        if self._round_robin.length is not None:
            return
        at = self._reached
        until = end + self._boxes if self._tail == "emit" and self._boxes > 1 else end
        shards, indices = self._round_robin.at(np.arange(at, until)) if at < until else ([], [])
        first = at
        while at < until and self._round_robin.length is None:
            shard, index = shards[at - first], indices[at - first]
            if at >= end:
                self._readers.look_ahead(shard)
            if self._is_own(at - begin, read):
                exists = self._readers.find(shard, index)
                found = index
            else:
                found = self._readers.reach(shard, index + 1)
                exists = found > index
            if exists:
                at += 1
                self._reached = at
            else:  # after a shard's end, later positions belong to other shards
                self._end(shard, min(found, index))
                if self._round_robin.length is None:
                    first = at
                    shards, indices = self._round_robin.at(np.arange(at, until))

    def _is_own(self, row: int, read: bool) -> bool:
        """Return True if this worker must read a row (counted from the batch's first) now: it is of this batch, may be
        added to it at the epoch's end, or is of the next batch, if this worker makes that."""
        if row < self._batch or self._workers > 1:
            return read and row % self._boxes == self._box
        return (read and row % self._boxes == self._box) or (row - self._batch) % self._boxes == self._box

    def _pass_over(self, position: int) -> None:
        while self._reached < position and self._round_robin.length is None:
            targets: Ints = self._round_robin.counts(position)
            over = True
            for shard in np.flatnonzero(targets > self._round_robin.counts(self._reached)).tolist():
                found = self._readers.reach(shard, int(targets[shard]))
                if found < targets[shard]:
                    self._end(shard, found)
                    over = False
            if over:
                self._reached = position

    def _end(self, shard: int, length: int) -> None:
        self._found[shard] = length
        self._round_robin.end(shard, length)
