"""Plan of an epoch: its batches, the samples of each batch, and where the next epoch begins.

A position is (epoch, start) in the order without skips. `start` is negative where samples of earlier epochs are still
to come, as with tail="carry". So a position means the same whatever is skipped (skips.py), for any batch size and
number of boxes. Batches are cut from the samples that are not skipped.
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
"""Rows whose samples are looked up in one call. This many take 0.1 us a row; calls of 64 rows take 2 us a row."""


class SampleOrder(Protocol):
    """A function from epoch and position to sample."""

    def __len__(self) -> int:
        """Return the samples of an epoch."""

    def ids(self, epoch: int, positions: npt.ArrayLike) -> Ints:
        """Return the numbers of the samples at these positions, which lie in [0, len(self))."""


class BatchPlan(NamedTuple):
    """Plan of one box's batch."""

    epoch: int
    """Number of the epoch."""
    positions: Ints
    """Positions of its rows in that epoch; negative ones lie in earlier epochs."""
    ids: Ints
    """Numbers of the rows' samples."""
    empty: bool = False
    """True if the box has no row. The plan then names another box's row, which serves as a model for a batch without
    rows."""

    def position_of(self, row: int, length: int) -> tuple[int, int]:
        """Return (epoch, position) of a row, where epochs have `length` samples."""
        epochs, position = divmod(int(self.positions[row]), length)
        return self.epoch + epochs, position


class EpochRemainder:
    """Rest of an epoch from position `start` on, for all boxes; see Partition."""

    def __init__(self, epochs: EpochPlan, epoch: int, start: int, batch: int, boxes: int) -> None:
        self.epochs, self.epoch, self.start, self.boxes = epochs, epoch, start, boxes
        self.kept = KeptPositions(epochs.skip, epoch * epochs.length)
        self._partition = Partition(self.kept.rank(epochs.length), self.kept.rank(start), batch, boxes, epochs.tail)
        self.batches = self._partition.batches
        """Batches that each box gets."""

    def position(self, batches: int) -> int:
        """Return the position in the epoch after the last sample of the first `batches` batches."""
        carries = self.epochs.tail == "carry"
        batches = min(batches, self.batches) if carries else batches
        if batches <= 0:
            return self.start
        if batches >= self.batches and not carries:
            return self.epochs.length
        return int(self.kept.positions(np.array([self._partition.position(batches) - 1]))[0]) + 1

    def position_after(self, batches: int) -> tuple[int, int]:
        """Return (epoch, start) after `batches` batches; at the end of this epoch, those of the next one."""
        return self.following() if batches >= self.batches else (self.epoch, self.position(batches))

    def following(self) -> tuple[int, int]:
        """Return (epoch, start) of the next epoch that has a batch."""
        length, skip = self.epochs.length, self.epochs.skip
        number = self.epoch * length + self.position(self.batches)
        """Number of the next sample, over all epochs."""
        epoch = self.epoch + 1
        while True:
            start = number - epoch * length if self.epochs.tail == "carry" else 0
            begin = epoch * length
            if not skip or skip[-1][1] <= begin or self._like(epoch, start).batches:
                return epoch, start
            ends = [end for first, end in skip if first <= begin < end]  # at most one range contains the beginning
            epoch = max([epoch + 1, *(end // length for end in ends)])

    def _like(self, epoch: int, start: int) -> EpochRemainder:
        return EpochRemainder(self.epochs, epoch, start, self._partition.batch, self.boxes)

    def positions(self, number: int, box: int) -> Ints:
        """Return the positions of a box's rows of a batch."""
        return self.kept.positions(self._partition.rows(number, box))

    def near(self, box: int, begin: int, count: int, *, run: int, runs: int) -> Ints:
        """Return some of the box's positions among the `count` samples of this epoch from position `begin` on: those in
        at most `runs` runs of `run` samples."""
        partition = self._partition
        first = max(self.kept.rank(begin), self.kept.rank(0))
        end = min(partition.length, first + count)
        several = max(1, min((end - first) // run, runs))
        at = np.linspace(first, max(first, end - run), several).astype(np.int64)[:, None] + np.arange(run)
        at = np.unique(at[at < end])
        return self.kept.positions(at[(at - partition.start) % self.boxes == box])


@dataclass(frozen=True)
class EpochPlan:
    """Settings common to all epochs."""

    length: int
    """Samples of an epoch."""
    tail: Tail
    skip: Ranges = ()

    def remainder(self, epoch: int, start: int, batch: int, boxes: int) -> EpochRemainder:
        return EpochRemainder(self, epoch, start, batch, boxes)

    def begin(self, epoch: int, batch: int, position: tuple[int, int]) -> int:
        """Return the `start` of an epoch that is a whole number of batches of this size before `position`."""
        if self.tail != "carry":
            return 0
        kept = KeptPositions(self.skip, epoch * self.length)
        number = position[0] * self.length + position[1]
        left = -kept.rank(number - epoch * self.length) % batch
        if left == 0:
            return 0
        begin = int(kept.positions(np.array([kept.rank(0) - left]))[0])
        return begin if epoch * self.length + begin >= 0 else 0


@dataclass(frozen=True)
class WorkerBatches:
    """The batches of an epoch that one worker makes."""

    remainder: EpochRemainder
    order: SampleOrder
    turn: WorkerTurn
    box: int

    def ended(self, done: int) -> bool:
        """Return True if the worker has no batch after its first `done`."""
        return self.turn.batch(done) >= self.remainder.batches

    def plans(self, done: int) -> list[BatchPlan]:
        """Return the plans of the worker's next batches after its first `done`; none at the end."""
        remainder, first = self.remainder, self.turn.batch(done)
        if self.ended(done):
            return []
        rows = [remainder.positions(first, self.box)]
        while (number := first + len(rows) * self.turn.of) < remainder.batches:
            if (len(rows) + 1) * len(rows[0]) > ORDERED_AT_ONCE:
                break
            rows.append(remainder.positions(number, self.box))
        empty = not len(rows[-1])  # possible in an epoch's last batch only
        if empty:
            rows[-1] = remainder.positions(remainder.batches - 1, 0)[:1]
        ids = np.split(self._ids(np.concatenate(rows)), np.cumsum([len(own) for own in rows[:-1]]))
        plans = [BatchPlan(remainder.epoch, own, numbers) for own, numbers in zip(rows, ids, strict=True)]
        return [*plans[:-1], plans[-1]._replace(empty=empty)]

    def all_plans(self, done: int) -> Iterator[BatchPlan]:
        """Yield the plans of all remaining batches."""
        while found := self.plans(done):
            yield from found
            done += len(found)

    def _ids(self, positions: Ints) -> Ints:
        epoch, length = self.remainder.epoch, self.remainder.epochs.length
        if positions[0] >= 0:  # the first row is in this epoch, so the batch has no rows of earlier ones
            return self.order.ids(epoch, positions)
        ids = np.empty_like(positions)
        epochs = positions // length
        for number in np.unique(epochs).tolist():
            chosen = np.flatnonzero(epochs == number)
            ids[chosen] = self.order.ids(epoch + number, positions[chosen] - number * length)
        return ids
