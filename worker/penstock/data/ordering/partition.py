"""Partition of an epoch: the positions of each batch, each box's rows of it, and the rest on another topology.

Global batch j of a partition is the next B positions of the epoch's order. Box b of N takes its rows b, b + N, b + 2N
..., so the order of all rows is the same for any number of boxes. A box's batches are made by its workers in turn. All
boxes have the same number of batches, because a loop on many boxes ends on all of them together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from penstock.data.ordering.permutation import Ints

__all__ = ["APART", "Partition", "Tail", "WorkerTurn"]

Tail = Literal["emit", "pad", "drop", "carry"]
APART: Literal["emit apart"] = "emit apart"
"""Tail for samples that are batches already. Works as "emit", but never adds the last rows to the batch before."""


@dataclass(frozen=True)
class WorkerTurn:
    """Turn of a worker among the workers of its box: of `of` workers, it makes the batches number, number + of, number
    + 2 of, ..."""

    number: int
    of: int

    def done(self, batches: int) -> int:
        """Return how many of the box's first `batches` batches this worker makes."""
        return max(0, -(-(batches - self.number) // self.of))

    def batch(self, done: int) -> int:
        """Return the number, among the box's batches, of this worker's batch after its first `done`."""
        return self.number + done * self.of


@dataclass(frozen=True)
class Partition:
    """Rest of an epoch, from position `start` on, in global batches of `batch` samples for `boxes` boxes.

    An incomplete last batch is emitted, padded with positions from the epoch's beginning, dropped, or carried. A
    carried batch's samples become the first of the next epoch, whose `start` is then negative. An emitted batch with
    fewer rows than boxes is added to the batch before. If there is no batch before (the epoch has too few samples, or
    too few are left after a resume on more boxes), the last boxes get a batch without rows: no sample comes twice.
    """

    length: int
    start: int
    batch: int
    boxes: int
    tail: Tail | Literal["emit apart"]

    @cached_property
    def batches(self) -> int:
        """Batches of each box."""
        whole, rest = divmod(self.length - self.start, self.batch)
        if rest == 0 or self.tail in ("drop", "carry") or (self.tail == "emit" and rest < self.boxes and whole):
            return whole
        return whole + 1

    def position(self, batches: int) -> int:
        """Return the position after the first `batches` batches."""
        if batches >= self.batches and self.tail != "carry":
            return self.length
        return self.start + min(batches, self.batches) * self.batch

    def rows(self, number: int, box: int) -> Ints:
        """Return the positions of the box's rows of a batch. With tail="emit" the last batch may have none, except for
        box 0."""
        begin = self.start + number * self.batch
        size = self.batch
        if number == self.batches - 1 and self.tail in ("emit", APART):
            size = self.length - begin
        rows = np.arange(begin + box, begin + size, self.boxes)
        return rows if begin + size <= self.length else rows % self.length
