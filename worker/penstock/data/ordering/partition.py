"""Partition of an epoch into batches, and of each batch into the rows of each box.

Global batch j is the next B samples in the epoch's order. Box b of N takes its rows b, b + N, b + 2N ..., so the order
of all rows is the same for any number of boxes. The workers of a box make its batches in turn. All boxes have the same
number of batches, so that a training loop ends on all boxes at the same step.
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
"""Value of `tail` for an order whose "rows" are batches: an incomplete last group is emitted, and its rows are never
added to the group before."""


@dataclass(frozen=True)
class WorkerTurn:
    """Share of one worker in the batches of its box: it makes the batches `number`, `number` + `of`, `number` + 2 `of`,
    ..."""

    number: int
    of: int

    def done(self, batches: int) -> int:
        """Return how many of the box's first `batches` batches this worker makes."""
        return max(0, -(-(batches - self.number) // self.of))

    def batch(self, done: int) -> int:
        """Return the number, over all workers of the box, of the batch that this worker makes after its first
        `done`."""
        return self.number + done * self.of


@dataclass(frozen=True)
class Partition:
    """Rest of an epoch, from position `start` on, in global batches of `batch` samples for `boxes` boxes.

    The setting `tail` decides what becomes of an incomplete last batch:

    - "emit": it is a batch like the others. But if it has fewer rows than there are boxes, its rows are added to the
      batch before. If there is none before, the last boxes get a batch without rows.
    - "pad": it is filled with samples from the epoch's beginning.
    - "drop": it is left out.
    - "carry": its samples are the first ones of the next epoch, whose `start` is then negative.
    """

    length: int
    start: int
    batch: int
    boxes: int
    tail: Tail | Literal["emit apart"]

    @cached_property
    def batches(self) -> int:
        whole, rest = divmod(self.length - self.start, self.batch)
        if rest == 0 or self.tail in ("drop", "carry") or (self.tail == "emit" and rest < self.boxes and whole):
            return whole
        return whole + 1

    def position(self, batches: int) -> int:
        """Return the position in the epoch's order that follows the samples of the first `batches` global batches."""
        if batches >= self.batches and self.tail != "carry":
            return self.length
        return self.start + min(batches, self.batches) * self.batch

    def rows(self, number: int, box: int = 0, boxes: int | None = None) -> Ints:
        """Return the positions of a box's rows in global batch `number`; with boxes=1, of all rows. With tail="emit"
        only box 0 is sure to have a row in the last batch."""
        begin = self.start + number * self.batch
        size = self.batch
        if number == self.batches - 1 and self.tail in ("emit", APART):
            size = self.length - begin
        rows = np.arange(begin + box, begin + size, boxes or self.boxes)
        return rows if begin + size <= self.length else rows % self.length
