"""Partition of an epoch into batches, and of each into rows of boxes. Global batch j is the next B samples in order.
Box b of N takes rows b, b + N, b + 2N ..., so the order of all rows is the same for any N. A box's workers make its
batches in turn. All boxes have equally many, so that a training loop ends on all at the same step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from penstock.data.ordering.permutation import Ints

Tail = Literal["emit", "pad", "drop", "carry"]
APART: Literal["emit apart"] = "emit apart"
"""`tail` where "rows" are batches: an incomplete last group is emitted, never added to the group before."""


@dataclass(frozen=True)
class WorkerTurn:
    """Share of one worker in its box's batches: `number`, `number` + `of`, `number` + 2 `of`, ..."""

    number: int
    of: int

    def done(self, batches: int) -> int:
        """Return how many of the box's first `batches` this worker makes."""
        return max(0, -(-(batches - self.number) // self.of))

    def batch(self, done: int) -> int:
        """Return the number, over all the box's workers, of the batch after this one's first `done`."""
        return self.number + done * self.of


@dataclass(frozen=True)
class Partition:
    """Rest of an epoch from `start`, in global batches of `batch` samples for `boxes` boxes. An incomplete last one, by
    `tail`:

    - "emit": is a batch. With fewer rows than boxes it is added to the batch before; without one, the last boxes get no
      rows.
    - "pad": is filled with samples from the epoch's beginning.
    - "drop": is left out.
    - "carry": begins the next epoch, whose `start` is then negative.
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
        if batches >= self.batches and self.tail != "carry":
            return self.length
        return self.start + min(batches, self.batches) * self.batch

    def rows(self, number: int, box: int = 0, boxes: int | None = None) -> Ints:
        """Return a box's positions in a global batch; all with boxes=1. With "emit" only box 0 is sure of a row in the
        last."""
        begin = self.start + number * self.batch
        size = self.batch
        if number == self.batches - 1 and self.tail in ("emit", APART):
            size = self.length - begin
        rows = np.arange(begin + box, begin + size, boxes or self.boxes)
        return rows if begin + size <= self.length else rows % self.length
