"""A finite source's epoch as one stream of positions, of which a worker takes its rows.

With the lengths of the shards known it is arithmetic (round_robin.py): a worker reads the samples of its own rows, and
skips in each shard what lies between. With lengths unknown there is no other way than to go along: each worker passes
over all rows, its own or not, and finds where shards end. It looks ahead just as far as it must to know whether a batch
is the last one: with tail="emit" as many rows as there are boxes, for fewer would go with the batch before them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from penstock.data.ordering.partition import Partition
from penstock.data.ordering.permutation import Ints
from penstock.data.sharded.round_robin import RoundRobin, Tail
from penstock.data.sharded.shard_cursors import ShardReaders
from penstock.proto.errors import DatasetError

__all__ = ["EpochStream", "Rows"]

Rows = list[tuple[int, int, bool]]
"""Shard, index in it, and whether the sample comes a second time in this epoch."""


class EpochStream:
    """What is left of an epoch from position `start` on, dealt out in global batches; and one box's rows of them."""

    def __init__(
        self,
        rounds: RoundRobin,
        readers: ShardReaders,
        *,
        ended: Mapping[int, int],
        start: int,
        batch: int,
        box: int,
        boxes: int,
        tail: Tail,
        every: int,
    ) -> None:
        """
        Args:
            ended: shards whose ends were found before.
            every: the worker makes each so-manieth batch of its box.
        """
        self._rounds, self._readers = rounds, readers
        self._start, self._batch, self._tail, self._every = start, batch, tail, every
        self._box, self._boxes = box, boxes
        self._found = dict(ended)
        self._reached = 0
        """All positions before this one exist, and their samples have been read or passed over."""

    @property
    def length(self) -> int | None:
        """Samples of the epoch, once that is known."""
        return self._rounds.length

    @property
    def ended(self) -> dict[int, int]:
        """Shard -> length, as far as it had to be found out."""
        return dict(self._found)

    def rows(self, number: int, *, read: bool = True) -> Rows | None:
        """The box's rows of a batch, in the last one maybe none; None if it is behind the last one.

        `read`: they are going to be read; otherwise the batch is passed over.
        """
        begin = self._start + number * self._batch
        if self._rounds.length is None:
            self._look(begin, read)
        if self._rounds.length is None:  # and there are more positions than any batch of this number could need
            return self._rows(np.arange(begin + self._box, begin + self._batch, self._boxes))
        partition = Partition(self._rounds.length, self._start, self._batch, self._boxes, self._tail)
        if self._rounds.length < self._start:
            raise DatasetError(
                f"the epoch has {self._rounds.length} samples, and is to go on behind sample {self._start}. Were the "
                "data changed?"
            )
        if number >= partition.batches:
            return None
        return self._rows(partition.rows(number, self._box), begin)

    def first(self, number: int) -> tuple[int, int]:
        """Shard and index of the first row of a batch, which box 0 has."""
        (shard,), (index,) = self._rounds.at(np.array([self._start + number * self._batch]))
        return shard, index

    def has_rows(self) -> bool:
        """There is something to deal out."""
        least = self._batch if self._tail == "drop" else 1
        self._pass_over(self._start + least)
        return self._rounds.length is None or self._rounds.length >= self._start + least

    def _rows(self, positions: Ints, begin: int | None = None) -> Rows:
        """`begin`: where the batch begins, if some of its rows may be filled up from the epoch's beginning."""
        again = [False] * len(positions)
        if begin is not None:
            again = (positions != begin + self._box + self._boxes * np.arange(len(positions))).tolist()
        return list(zip(*self._rounds.at(positions), again, strict=True))

    def _look(self, begin: int, read: bool) -> None:
        """Go along until it is sure that a batch is not the last one, or where the epoch ends."""
        end = begin + self._batch
        self._pass_over(begin)
        if self._rounds.length is not None:
            return
        at = self._reached
        until = end + self._boxes if self._tail == "emit" and self._boxes > 1 else end
        shards, indices = self._rounds.at(np.arange(at, until)) if at < until else ([], [])
        first = at
        while at < until and self._rounds.length is None:
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
            else:  # the positions from here on are others' now
                self._end(shard, min(found, index))
                if self._rounds.length is None:
                    first = at
                    shards, indices = self._rounds.at(np.arange(at, until))

    def _is_own(self, row: int, read: bool) -> bool:
        """A row, counted from the batch's first, may have to be read: also as one that goes with the batch because the
        epoch ends behind it, or one of the next batch."""
        if row < self._batch or self._every > 1:
            return read and row % self._boxes == self._box
        return (read and row % self._boxes == self._box) or (row - self._batch) % self._boxes == self._box

    def _pass_over(self, position: int) -> None:
        """Have each shard pass over its samples before a position; none of them is needed here."""
        while self._reached < position and self._rounds.length is None:
            targets: Ints = self._rounds.counts(position)
            over = True
            for shard in np.flatnonzero(targets > self._rounds.counts(self._reached)).tolist():
                found = self._readers.reach(shard, int(targets[shard]))
                if found < targets[shard]:
                    self._end(shard, found)
                    over = False
            if over:
                self._reached = position

    def _end(self, shard: int, length: int) -> None:
        self._found[shard] = length
        self._rounds.end(shard, length)
