"""An epoch through an epoch: which batches it has, which samples these are made of, and where the next epoch begins.

A place is (epoch, start): a position in the order of which nothing is left out. `start` is negative where samples of
epochs before are still to come, as with tail="carry". So a place means the same whatever is left out (skips.py), in
whatever batches, and for whatever boxes. Batches are dealt by rank among what is not left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from penstock.data.ordering.partition import Partition, Tail, WorkerTurn
from penstock.data.ordering.permutation import Ints
from penstock.data.ordering.skips import KeptPositions, Ranges

__all__ = ["BatchPlan", "EpochPlan", "EpochRemainder", "SampleOrder", "WorkerBatches"]

ORDERED_AT_ONCE = 2048
"""Rows whose samples are found in one go: it takes 0.1 us a row then, and 2 us if batches of 64 are."""


class SampleOrder(Protocol):
    """A function from epoch and position to sample."""

    def __len__(self) -> int:
        """Samples of an epoch."""

    def ids(self, epoch: int, positions: npt.ArrayLike) -> Ints:
        """The numbers of the samples at these positions, which lie in [0, len(self))."""


class BatchPlan(NamedTuple):
    """Of one box's batch."""

    epoch: int
    """The epoch's."""
    positions: Ints
    """Of its rows in that epoch; negative ones lie in epochs before."""
    ids: Ints
    """Numbers of their samples."""
    empty: bool = False
    """The box has no row: what is named is a row of another one, to make an empty batch like it."""

    def place(self, row: int, length: int) -> tuple[int, int]:
        """(epoch, position) of a row, where epochs have `length` samples."""
        epochs, position = divmod(int(self.positions[row]), length)
        return self.epoch + epochs, position


class EpochRemainder:
    """What remains of an epoch from a place on, for all boxes; see Dealing."""

    def __init__(self, epochs: EpochPlan, epoch: int, start: int, batch: int, boxes: int) -> None:
        self.epochs, self.epoch, self.start, self.boxes = epochs, epoch, start, boxes
        self.kept = KeptPositions(epochs.skip, epoch * epochs.length)
        self._partition = Partition(self.kept.rank(epochs.length), self.kept.rank(start), batch, boxes, epochs.tail)
        self.batches = self._partition.batches
        """That each box gets."""

    def position(self, batches: int) -> int:
        """In the epoch, behind the last sample that is used up after so many batches."""
        carries = self.epochs.tail == "carry"
        batches = min(batches, self.batches) if carries else batches
        if batches <= 0:
            return self.start
        if batches >= self.batches and not carries:
            return self.epochs.length
        return int(self.kept.positions(np.array([self._partition.position(batches) - 1]))[0]) + 1

    def place(self, batches: int) -> tuple[int, int]:
        """(epoch, start) of what is to come after so many batches; that of the next epoch at the end of this one."""
        return self.following() if batches >= self.batches else (self.epoch, self.position(batches))

    def following(self) -> tuple[int, int]:
        """(epoch, start) of the next epoch that has a batch."""
        length, skip = self.epochs.length, self.epochs.skip
        number = self.epoch * length + self.position(self.batches)
        """Of the first sample that is still to come, over all epochs."""
        epoch = self.epoch + 1
        while True:
            start = number - epoch * length if self.epochs.tail == "carry" else 0
            begin = epoch * length
            if not skip or skip[-1][1] <= begin or self._like(epoch, start).batches:
                return epoch, start
            ends = [end for first, end in skip if first <= begin < end]  # at most one
            epoch = max([epoch + 1, *(end // length for end in ends)])

    def _like(self, epoch: int, start: int) -> EpochRemainder:
        return EpochRemainder(self.epochs, epoch, start, self._partition.batch, self.boxes)

    def positions(self, number: int, box: int) -> Ints:
        """Of the box's rows of a batch."""
        return self.kept.positions(self._partition.rows(number, box))

    def near(self, box: int, begin: int, count: int, *, run: int, runs: int) -> Ints:
        """Some of the box's positions among the `count` samples from position `begin` on that lie in this epoch: of
        `runs` runs, at most, of `run` samples."""
        partition = self._partition
        first = max(self.kept.rank(begin), self.kept.rank(0))
        end = min(partition.length, first + count)
        several = max(1, min((end - first) // run, runs))
        at = np.linspace(first, max(first, end - run), several).astype(np.int64)[:, None] + np.arange(run)
        at = np.unique(at[at < end])
        return self.kept.positions(at[(at - partition.start) % self.boxes == box])


@dataclass(frozen=True)
class EpochPlan:
    """What all epochs have in common."""

    length: int
    """Samples of an epoch."""
    tail: Tail
    skip: Ranges = ()

    def remainder(self, epoch: int, start: int, batch: int, boxes: int) -> EpochRemainder:
        return EpochRemainder(self, epoch, start, batch, boxes)

    def begin(self, epoch: int, batch: int, place: tuple[int, int]) -> int:
        """Where the epoch of this epoch begins, if batches of this size went on to it from that place, or came from
        it."""
        if self.tail != "carry":
            return 0
        kept = KeptPositions(self.skip, epoch * self.length)
        number = place[0] * self.length + place[1]
        left = -kept.rank(number - epoch * self.length) % batch
        if left == 0:
            return 0
        begin = int(kept.positions(np.array([kept.rank(0) - left]))[0])
        return begin if epoch * self.length + begin >= 0 else 0


@dataclass(frozen=True)
class WorkerBatches:
    """One worker's way along a course."""

    remainder: EpochRemainder
    order: SampleOrder
    turn: WorkerTurn
    box: int

    def ended(self, done: int) -> bool:
        """There is no batch of its behind so many of its own."""
        return self.turn.batch(done) >= self.remainder.batches

    def plans(self, done: int) -> list[BatchPlan]:
        """Of its next batches behind so many of its own; none at the end."""
        remainder, first = self.remainder, self.turn.batch(done)
        if self.ended(done):
            return []
        rows = [remainder.positions(first, self.box)]
        while (number := first + len(rows) * self.turn.of) < remainder.batches:
            if (len(rows) + 1) * len(rows[0]) > ORDERED_AT_ONCE:
                break
            rows.append(remainder.positions(number, self.box))
        empty = not len(rows[-1])  # only an epoch's last batch can be
        if empty:
            rows[-1] = remainder.positions(remainder.batches - 1, 0)[:1]
        ids = np.split(self._ids(np.concatenate(rows)), np.cumsum([len(own) for own in rows[:-1]]))
        plans = [BatchPlan(remainder.epoch, own, numbers) for own, numbers in zip(rows, ids, strict=True)]
        return [*plans[:-1], plans[-1]._replace(empty=empty)]

    def all_plans(self, done: int) -> Iterator[BatchPlan]:
        """Of all batches that are left."""
        while found := self.plans(done):
            yield from found
            done += len(found)

    def _ids(self, positions: Ints) -> Ints:
        epoch, length = self.remainder.epoch, self.remainder.epochs.length
        if positions[0] >= 0:  # the first row is the first in the order, or behind the epoch's beginning
            return self.order.ids(epoch, positions)
        ids = np.empty_like(positions)
        behind = positions // length
        for number in np.unique(behind).tolist():
            chosen = np.flatnonzero(behind == number)
            ids[chosen] = self.order.ids(epoch + number, positions[chosen] - number * length)
        return ids
