"""Plan of an epoch: its batches, their samples, and where the next epoch begins. A position is (epoch, start): `start`
counts the samples before it in the epoch's order, also skipped ones (skips.py), so that skips, batch size and boxes do
not change its meaning. It is negative if samples of earlier epochs are still to come, as with tail="carry"."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from penstock.data.ordering.partition import Partition, Tail, WorkerTurn
from penstock.data.ordering.permutation import Ints, gathered
from penstock.data.ordering.skips import KeptPositions, Ranges

ORDERED_AT_ONCE = 2048
"""Rows looked up in one call: 0.1 us a row then, and 2 us in calls of 64."""


Assign = Callable[[Ints, int, int], tuple[Sequence[Ints], float]]
"""(samples of a global batch, boxes, number of the step) -> (rows of each box, imbalance: highest cost over mean
cost)."""


class SampleOrder(Protocol):
    """Function from epoch and position to sample."""

    def __len__(self) -> int:
        """Number of samples in an epoch."""

    def ids(self, epoch: int, positions: npt.ArrayLike) -> Ints:
        """Return the samples at positions in [0, len(self)) of an epoch."""


class BatchPlan(NamedTuple):
    """A box's batch: samples of its rows, and their positions."""

    epoch: int
    positions: Ints
    """Negative ones belong to earlier epochs."""
    ids: Ints
    empty: bool = False
    """True if the box has no row. The plan then has one of another box, for the dtypes and shapes of a batch of 0
    rows."""
    imbalance: float | None = None
    """The step's highest box cost divided by the mean; None: not measured."""

    def position_of(self, row: int, length: int) -> tuple[int, int]:
        """Return (epoch, position in it) of a row. `length`: samples in an epoch."""
        epochs, position = divmod(int(self.positions[row]), length)
        return self.epoch + epochs, position


class EpochRemainder:
    """Rest of an epoch from `start` on, divided into batches for all boxes (Partition)."""

    def __init__(self, epochs: EpochPlan, epoch: int, start: int, batch: int, boxes: int) -> None:
        self.epochs, self.epoch, self.start, self.boxes = epochs, epoch, start, boxes
        self.kept = KeptPositions(epochs.skip, epoch * epochs.length)
        self._partition = Partition(self.kept.rank(epochs.length), self.kept.rank(start), batch, boxes, epochs.tail)
        self.batches = self._partition.batches

    def position(self, batches: int) -> int:
        carries = self.epochs.tail == "carry"
        batches = min(batches, self.batches) if carries else batches
        if batches <= 0:
            return self.start
        if batches >= self.batches and not carries:
            return self.epochs.length
        return int(self.kept.positions(np.array([self._partition.position(batches) - 1]))[0]) + 1

    def position_after(self, batches: int) -> tuple[int, int]:
        """Return (epoch, start) after `batches` batches; after the last, where the next epoch with a batch begins."""
        return self.following() if batches >= self.batches else (self.epoch, self.position(batches))

    def following(self) -> tuple[int, int]:
        """Return (epoch, start) of the next epoch with a batch."""
        length, skip = self.epochs.length, self.epochs.skip
        number = self.epoch * length + self.position(self.batches)
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
        return self.kept.positions(self._partition.rows(number, box))

    def all_positions(self, number: int) -> Ints:
        return self.kept.positions(self._partition.rows(number, boxes=1))

    def kept_ranges(self, number: int) -> list[tuple[int, int]]:
        """Return the positions of a global batch's rows as ranges (first, end)."""
        rows = np.sort(self.all_positions(number))
        if not len(rows):
            return []
        ends = np.flatnonzero(np.append(np.diff(rows) > 1, True))
        firsts = np.append(0, ends[:-1] + 1)
        return [(int(rows[first]), int(rows[end]) + 1) for first, end in zip(firsts, ends, strict=True)]

    def skipped_ranges(self, number: int) -> list[tuple[int, int]]:
        """Return skipped ranges (first, end) between the last rows of batches `number` - 1 and `number`."""
        begin, end = max(0, self.position(number)), self.position(number + 1)
        offset = self.epoch * self.epochs.length
        found = [(max(first - offset, begin), min(last - offset, end)) for first, last in self.epochs.skip]
        return [(first, last) for first, last in found if first < last]

    def near(self, box: int | None, begin: int, count: int, *, run: int, runs: int) -> Ints:
        """Return some of the `count` positions after `begin`: up to `runs` groups of `run` neighbours, at even
        distances. `box`: whose; None: all."""
        partition = self._partition
        first = max(self.kept.rank(begin), self.kept.rank(0))
        end = min(partition.length, first + count)
        several = max(1, min((end - first) // run, runs))
        at = np.linspace(first, max(first, end - run), several).astype(np.int64)[:, None] + np.arange(run)
        at = np.unique(at[at < end])
        return self.kept.positions(at if box is None else at[(at - partition.start) % self.boxes == box])


@dataclass(frozen=True)
class EpochPlan:
    length: int
    tail: Tail
    skip: Ranges = ()

    def remainder(self, epoch: int, start: int, batch: int, boxes: int) -> EpochRemainder:
        return EpochRemainder(self, epoch, start, batch, boxes)

    def begin(self, epoch: int, batch: int, position: tuple[int, int]) -> int:
        """Return `start` of an epoch's first batch, negative with tail="carry" if it begins in the epoch before.
        `position`: of any later batch."""
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
    remainder: EpochRemainder
    order: SampleOrder
    turn: WorkerTurn
    box: int
    assign: Assign | None = None
    """None: box b of N takes rows b, b + N, b + 2N, ..."""

    def ended(self, done: int) -> bool:
        return self.turn.batch(done) >= self.remainder.batches

    def plans(self, done: int) -> list[BatchPlan]:
        """Return plans after the first `done` batches, as many as one look-up serves (with `assign` one); none at the
        end."""
        remainder, first = self.remainder, self.turn.batch(done)
        if self.ended(done):
            return []
        if self.assign is not None:
            return [self._assigned(first, self.assign)]
        rows = [remainder.positions(first, self.box)]
        while (number := first + len(rows) * self.turn.of) < remainder.batches:
            if (len(rows) + 1) * len(rows[0]) > ORDERED_AT_ONCE:
                break
            rows.append(remainder.positions(number, self.box))
        empty = not len(rows[-1])  # possible only in an epoch's last batch
        if empty:
            rows[-1] = remainder.positions(remainder.batches - 1, 0)[:1]
        ids = np.split(self._ids(np.concatenate(rows)), np.cumsum([len(own) for own in rows[:-1]]))
        plans = [BatchPlan(remainder.epoch, own, numbers) for own, numbers in zip(rows, ids, strict=True)]
        return [*plans[:-1], plans[-1]._replace(empty=empty)]

    def _assigned(self, number: int, assign: Assign) -> BatchPlan:
        positions = self.remainder.all_positions(number)
        ids = self._ids(positions)
        # the number of the step follows from the position, so that it is the same after any resume
        assigned, imbalance = assign(ids, self.remainder.boxes, int(positions[0]) // len(positions))
        own = assigned[self.box]
        empty = not len(own)
        own = np.zeros(1, np.int64) if empty else own
        return BatchPlan(self.remainder.epoch, positions[own], ids[own], empty, imbalance)

    def all_plans(self, done: int) -> Iterator[BatchPlan]:
        while found := self.plans(done):
            yield from found
            done += len(found)

    def _ids(self, positions: Ints) -> Ints:
        epoch, length = self.remainder.epoch, self.remainder.epochs.length
        if positions[0] >= 0:  # the first row is in this epoch, so the batch has no rows of earlier epochs
            return self.order.ids(epoch, positions)
        epochs, inside = np.divmod(positions, length)
        return gathered(epochs, inside, lambda number, at: self.order.ids(epoch + number, at))
