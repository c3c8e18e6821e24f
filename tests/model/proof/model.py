"""What a box receives, in some sixty lines: the model that real processes are compared with.

A box takes batches from its slots in turn, each a function of (slot, epoch, number in it): for a pure loader nothing
else exists. Its only operations are those of the training loop: a loop over an epoch, over a number of steps, or one
that stays in its epoch (persistent=True); `break`; a save, and a resume from it. No fault is one of them. How a batch
is made is another matter (reference.py), which the model does not know.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Batches", "Box", "NoInputError"]

Batches = Callable[[int, int, int], Any]
"""(slot, epoch, number) -> the batch, or None beyond the end of the epoch."""


class NoInputError(Exception):
    """No slot of the box had a batch in an epoch."""


class Box:
    """Stream of one box. Its position is (epoch, batches taken of each slot, whose turn it is)."""

    def __init__(self, slots: int, batches: Batches, *, step: int = 0, epoch: int = 0) -> None:
        self.slots, self.batches, self.step = slots, batches, step
        self.left = False
        """True if a loop has left its epoch by `break`: the next loop begins the next epoch."""
        self._begin(epoch)

    def _begin(self, epoch: int) -> None:
        self.epoch = epoch
        self.live, self.cursor, self.taken = list(range(self.slots)), 0, [0] * self.slots

    def _take(self) -> Any:
        """Return the next batch of this epoch, or None at its end."""
        while self.live:
            slot = self.live[self.cursor]
            batch = self.batches(slot, self.epoch, self.taken[slot])
            if batch is not None:
                self.taken[slot] += 1
                self.step += 1
                self.cursor = (self.cursor + 1) % len(self.live)
                return batch
            del self.live[self.cursor]
            self.cursor %= max(1, len(self.live))
        return None

    def loop(self, num_steps: int | None = None, *, persistent: bool = False) -> Iterator[Any]:
        """Iterate as DataExecutor does. Dropping the iterator is a `break`. One that took nothing changes nothing."""
        first = self.step
        while num_steps is None or self.step < first + num_steps:
            if self.left:
                self._begin(self.epoch + 1)
                self.left = False
            batch = self._take()
            if batch is not None:
                self.left = num_steps is None and not persistent
                yield batch
                self.left = False
                continue
            if not any(self.taken):
                raise NoInputError
            self._begin(self.epoch + 1)
            if num_steps is None and self.step > first:
                return

    def resumed(self) -> Box:
        """Return the stream as a job goes on with it that loads a state saved here: in the epoch, also where the loop
        was about to leave it."""
        other = copy.copy(self)
        other.live, other.taken, other.left = list(self.live), list(self.taken), False
        return other

    def moved(self, slots: int, batches: Batches) -> Box:
        """Return a box of a job that goes on between two epochs with other numbers of boxes and slots."""
        assert not any(self.taken), "this epoch has begun"
        return Box(slots, batches, step=self.step, epoch=self.epoch)
